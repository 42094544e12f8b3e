"""Steps of torch's pipeline schedules, which run the backwards of all micro-batches and then scale the gradients.

Only when a schedule's step returns are the gradients complete: zero-bubble schedules assign `.grad` without a backward
that calls hooks, FSDP reduces after the last micro-batch, and every schedule divides by the number of micro-batches.
"""

import gc
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from torch import nn

from .steps import Listeners


class PipelineSchedules(Listeners):
    """Calls listeners around every step of a schedule that has a backward."""

    def _wrappers(self) -> Iterable[tuple[Any, str, Callable[..., Any]]]:
        schedules = sys.modules.get("torch.distributed.pipelining.schedules")  # its import takes seconds
        classes = ("PipelineScheduleSingle", "PipelineScheduleMulti")
        return [] if schedules is None else [(getattr(schedules, name), "step", self._step) for name in classes]

    def _step(self, original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(schedule, "_has_backward", True):  # as in `schedule.eval()`
            return original(schedule, *args, **kwargs)
        for listener in self._listeners:
            listener.schedule_begins(schedule)
        try:
            return original(schedule, *args, **kwargs)
        finally:
            for listener in self._listeners:
                listener.schedule_ended(schedule)


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
