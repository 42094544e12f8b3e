"""Steps of torch's pipeline schedules, which run the backwards of all micro-batches and then scale the gradients.

Only when a schedule's step returns are the gradients complete: zero-bubble schedules assign `.grad` without a backward
that calls hooks, FSDP reduces after the last micro-batch, and every schedule divides by the number of micro-batches.
"""

import gc
import sys
from collections.abc import Collection, Iterable
from typing import Any, Final

from torch import nn

from .._boundary import Call, EntryPoints, entry_point
from .listeners import Listeners


class PipelineSchedules(Listeners):
    """Calls listeners around every step of a schedule that has a backward."""

    def _wrappers(self) -> Iterable[tuple[Any, str, EntryPoints]]:
        schedules = sys.modules.get("torch.distributed.pipelining.schedules")  # its import takes seconds
        classes = ("PipelineScheduleSingle", "PipelineScheduleMulti")
        entry_points: EntryPoints = {"before": self._step_begins, "at_exit": self._step_ends}
        return [] if schedules is None else [(getattr(schedules, name), "step", entry_points) for name in classes]

    @entry_point()
    def _step_begins(self, call: Call) -> None:
        schedule = call.args[0]
        if getattr(schedule, "_has_backward", True):  # not in `schedule.eval()`
            call.found = schedule
            for listener in self._listeners:
                listener.schedule_begins(schedule)

    @entry_point()
    def _step_ends(self, call: Call) -> None:
        for listener in self._listeners if call.found is not None else ():
            listener.schedule_ended(call.found)


SCHEDULES: Final = PipelineSchedules()


def stages_of(schedule: Any) -> list[nn.Module]:
    """Return the modules of a schedule's stages on this rank."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    return [stage.submod for stage in stages]


def divisor_of(schedule: Any) -> int:
    """Return the number by which a schedule divides the gradients after its last backward."""
    return int(schedule._n_microbatches) if schedule.scale_grads else 1


def has_stages(models: Collection[nn.Module]) -> bool:
    """Whether one of these models is the module of a pipeline stage that exists."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    if stage is None:
        return False
    stages = [one for one in gc.get_objects() if issubclass(type(one), stage._PipelineStageBase)]
    return any(one.submod is model for one in stages for model in models)
