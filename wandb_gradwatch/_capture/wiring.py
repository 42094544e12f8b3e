"""Detects in the first steps whether gradients and updates belong together. The rules get the facts.

The faults: parameters that no optimizer holds, an optimizer that holds other tensors, gradients that are never reset.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .._measure.elements import elements_of, onto
from .._measure.measure import measure_received
from .._runtime.autograd import Entry
from .._runtime.notices import Notice, Notices
from .._runtime.sharding import local_part
from .._runtime.steps import parameters_of
from ..snapshot import keys
from .clock import SampleClock
from .gradient_versions import REPLACED, GradientVersions, version_of
from .optimizer_registry import OptimizerRegistry
from .parameter_registry import ParameterRegistry
from .updates import held_by_optimizers

_STEPS: Final = 3  # number of steps of each optimizer that are checked
_AGAIN_EVERY: Final = 50  # after these, the sampled steps that are checked for gradients that are no longer reset
_PATIENCE_IN_BACKWARDS: Final = 1000  # number of backwards without a step that raise an alert
# The same at the end of a run that has made no step at all, and where the gradients were reset before each backward
_FEWEST_BACKWARDS: Final = 20
# Steps of other models' optimizers before the first gradient of the watched one; samples before an optimizer's step
_PATIENCE_IN_STEPS: Final = 100
_PATIENCE_IN_WRITES: Final = 10  # writes to a parameter without a gradient; loading a checkpoint makes fewer
# name -> whether a value breaks any training, and why
_SETTINGS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "weight_decay": (lambda decay: decay < 0, "it makes parameters grow whatever their gradient; set it to 0 or more"),
    "momentum": (lambda factor: factor >= 1, "its state forgets nothing and grows with every step; set it below 1"),
    "betas": (lambda factor: factor >= 1, "its state forgets nothing and grows with every step; set them below 1"),
}
_NUM_VALUES: Final = 64  # number of elements of a parameter in its state
_WITNESSES: Final = 5  # number of an optimizer's smallest parameters whose gradients are checked for all


# slot -> the parameter's version, and some of its elements: a write through `.data` changes these alone
_States = dict[int, tuple[int, Tensor]]


@dataclass
class _Carried:
    """Gradients that one optimizer has used and that have not been reset since."""

    seen: GradientVersions = field(default_factory=GradientVersions)  # the smallest of them, as of the last backward
    nonzero: Tensor | None = None  # 0-dim bool on their device: any was not 0 when the next backward began
    were_reset: bool = False  # whether they were when the backward began that is running
    found: Tensor | None = None  # `nonzero` as of that moment
    num_steps: int = 0

    def follow(self, entries: Sequence[Entry]) -> None:
        """Follow the gradients of these parameters from now on."""
        self.nonzero, self.were_reset, self.found = None, False, None
        self.seen.clear()
        self.seen.note(entries)


class Wiring:
    def __init__(
        self,
        parameter_registry: ParameterRegistry,
        optimizer_registry: OptimizerRegistry,
        clock: SampleClock,
        notices: Notices,
    ) -> None:
        self._parameter_registry, self._optimizer_registry = parameter_registry, optimizer_registry
        self._clock, self._notices = clock, notices
        self._carried: defaultdict[int, _Carried] = defaultdict(_Carried)  # by the optimizer's key
        self._first_states: _States | None = None  # of all parameters after the very first step
        self._unowned: _States = {}  # of those with a gradient but no optimizer, until they are reported
        self._samples_to_wait = 0  # until the slots in `_unowned` are reported
        self._known_unowned: frozenset[int] = frozenset()
        self._num_idle = 0  # number of samples with gradients whose optimizer has not stepped yet
        self._facts: dict[str, Tensor] = {}
        self._without_model: Notice | None = None  # to be sent unless an optimizer of the model steps too
        self._is_stale = False  # whether it was sent
        self._has_said_nothing_seen = False
        self._num_backwards = 0  # that have reached the watched model
        self._num_resets = 0  # of their gradients, before the first step
        self._num_elsewhere = 0  # number of steps of other models' optimizers before the first sample
        # slot -> version of the parameter when watch() was called
        self._versions_at_begin = parameter_registry.versions()

    def take(self) -> dict[str, Tensor]:
        """Return the facts found since the last call, by key, as 0-dim tensors on any device."""
        facts, self._facts = self._facts, {}
        return facts

    def stepped(self, optimizer: Optimizer, key: int) -> None:
        """An optimizer has stepped: remember its gradients, which should be reset before a backward adds to them."""
        if self._first_states is None:
            self._first_states = self._states()
        carried = self._carried[key]
        carried.num_steps += 1
        if carried.num_steps == 1:
            self._look_at_settings(optimizer)
        if carried.num_steps <= _STEPS or carried.num_steps % _AGAIN_EVERY == 0:
            entries = sorted(self._optimizer_registry.entries(optimizer), key=lambda entry: entry[1].numel())
            carried.follow([entry for entry in entries if entry[1].grad is not None][:_WITNESSES])

    def _look_at_settings(self, optimizer: Optimizer) -> None:
        """Alert about settings that break any training and that torch does not reject in `param_groups`."""
        for group in optimizer.param_groups:
            for name, (is_wrong, why) in _SETTINGS.items():
                values = group.get(name, 0.0)
                several = values if isinstance(values, tuple | list) else [values]
                if any(is_wrong(one) for one in several if isinstance(one, Real) and not isinstance(one, bool)):
                    fact = f"{type(optimizer).__name__} steps with {name}={values!r}: {why}"
                    self._notices.alert("Optimizer settings", fact, self._clock.open_step, cause="optimizer_settings")
                    return

    @property
    def is_carrying(self) -> bool:
        """Whether gradients are followed that the next backward should not add to."""
        return any([carried.seen.states for carried in self._carried.values()])

    def backward_begins(self) -> None:
        """Check which gradients were reset before this backward, which may turn out to be another model's."""
        for carried, entries in self._carrying():
            writes = carried.seen.writes(entries)
            untouched = [local_part(p.grad) for slot, p in entries if not writes[slot] and p.grad is not None]
            carried.were_reset = not untouched or len(untouched) < len(carried.seen.states)
            if not carried.were_reset and carried.nonzero is None:  # zeroing through `.data` shows only in the values
                nonzero = [elements_of(gradient)[0].ne(0).any() for gradient in untouched]
                home = max((one.device for one in nonzero), key=lambda device: device.type != "cpu")  # so nobody waits
                carried.found = torch.stack([onto(one, home) for one in nonzero]).any()

    def backward_ended(self, *, has_begun: bool) -> None:
        """Remember the gradients' new states; alert when many backwards have ended without an optimizer step.

        `has_begun`: `backward_begins` was called.
        """
        if not has_begun:
            self.forget_gradients()
        self._send_without_model()
        for carried, entries in self._carrying():
            if carried.were_reset:
                carried.follow(())
            else:
                carried.nonzero = carried.found
                carried.seen.note(entries)
        self._num_backwards += 1
        if self._clock.backwards == _PATIENCE_IN_BACKWARDS:
            self._say_no_step(_PATIENCE_IN_BACKWARDS)

    @property
    def has_stale_optimizer(self) -> bool:
        """Whether an optimizer has stepped that holds none of the model's parameters, as far as is known."""
        return self._without_model is not None and not self._optimizer_registry.num_known

    def _send_without_model(self) -> None:
        if self.has_stale_optimizer and self._without_model is not None:
            self._notices.append(self._without_model)
            self._is_stale = True
        self._without_model = None

    def were_reset(self) -> None:
        """The gradients of a backward were reset, and no optimizer has used them: alert if none ever does."""
        self._num_resets += 1
        if self._num_resets == _FEWEST_BACKWARDS and not self._clock.num_closed:
            self._say_no_step(_FEWEST_BACKWARDS)

    def _say_no_step(self, num: int) -> None:
        if self._is_stale:  # that is the reason, and it is told
            return
        self._notices.alert(
            "No gradient",
            f"{num} backwards have ended without an optimizer step that updates a watched parameter",
            self._clock.open_step,
            cause="no_step",
            rival="stale_optimizer",
        )

    def forget_gradients(self) -> None:
        """Forget the remembered gradients: a reset before the next backwards may not be seen."""
        for carried in self._carried.values():
            carried.follow(())

    def _carrying(self) -> Iterator[tuple[_Carried, list[Entry]]]:
        """Yield each entry of `_carried` that follows gradients, with their parameters."""
        if some := [carried for carried in self._carried.values() if carried.seen.states]:
            parameters = dict(self._parameter_registry.scan())
            for carried in some:
                yield carried, [(slot, parameters[slot]) for slot in carried.seen.states if slot in parameters]

    def about_to_step(self, key: int) -> None:
        """Record the fact that an optimizer is about to use gradients that were not reset since its last step."""
        carried = self._carried.get(key)
        if carried is not None and carried.nonzero is not None:
            # Gradients that were assigned after the backward, as GradNorm's are, contain nothing of the step before.
            writes = carried.seen.writes(self._parameter_registry.scan())
            if any(number != REPLACED for number in writes.values()):
                self._facts[keys.WIRING_CARRIED] = carried.nonzero.double()

    def sample_closed(self, marked: frozenset[int]) -> None:
        """Look for parameters that got a gradient in the closed sample but that no optimizer holds or updates."""
        if not marked:  # the parameters may have been replaced: no hook was called that would have led to a scan
            self._parameter_registry.scan()
        unowned = marked - self._clock.owner.keys()
        first, self._first_states = self._first_states, {}
        if unowned and unowned != self._known_unowned:  # checked again only when the set of such parameters changes
            self._known_unowned = unowned
            held = held_by_optimizers()
            at = first or self._states()
            here = {slot: id(p) in held for slot, p in self._parameter_registry.scan() if slot in unowned}
            self._clock.expected = frozenset(slot for slot, is_held in here.items() if is_held)
            self._unowned = {slot: at[slot] for slot, is_held in here.items() if not is_held and slot in at}
            # A sample may close before or after an update by hand: three samples contain one whole iteration.
            self._samples_to_wait = 1 if first else 2
        elif self._unowned:
            self._samples_to_wait -= 1
            if self._samples_to_wait:
                return
            # A parameter that was written to is updated otherwise: by a codebook's average, or an optimizer's wrapper.
            names = self._parameter_registry.names
            for slot, (version, values) in self._states().items():
                before, values_before = self._unowned.get(slot, (-1, values))
                if before == version and (values.shape, values.device) == (values_before.shape, values_before.device):
                    self._facts[keys.WIRING_UNOWNED + names[slot]] = (values == values_before).all()
                elif slot in self._unowned:
                    self._optimizer_registry.updated_otherwise.add(slot)
            self._unowned = {}
        if idle := sorted(self._clock.expected & unowned):
            self._num_idle += 1
            if self._num_idle == _PATIENCE_IN_STEPS:
                self._notices.say(
                    "idle optimizer",
                    f"the gradients of {self._parameter_registry.some_names(idle)} have not been used in "
                    f"{_PATIENCE_IN_STEPS} measured steps: the optimizer that holds these parameters has not stepped "
                    "yet. If it is to step later, all is well; until then nothing is logged about them.",
                )

    def _states(self) -> _States:
        entries = [entry for entry in self._parameter_registry.scan() if not is_lazy(entry[1])]
        return {slot: (version_of(p), elements_of(local_part(p))[0][:_NUM_VALUES].clone()) for slot, p in entries}

    def look_at_parameters(self, *, last_sample: int) -> None:
        """Alert if parameters hold NaN or Inf after steps that were not measured. Waits for the device."""
        if not (self._clock.num_closed or self._clock.marked):
            self._nothing_was_seen()
        registry = self._parameter_registry
        if last_sample < self._clock.step and (broken := _slots_that_are_broken(registry.scan())):
            self._notices.alert(
                "NaN gradient",
                f"NaN or Inf in {len(broken)} of {len(registry.names)} parameters: {registry.some_names(broken)}; what "
                f"happened after step {last_sample} was not measured",
                self._clock.step,
                "ERROR",
            )

    def _nothing_was_seen(self) -> None:
        """Send a message if parameters are written to although neither a step nor a gradient was seen."""
        now = self._parameter_registry.versions()
        writes = (version - self._versions_at_begin.get(slot, 0) for slot, version in now.items())
        if max(writes, default=0) >= _PATIENCE_IN_WRITES:
            self._say_nothing_seen(
                "the model is trained, but no gradient was seen: only gradients in .grad are measured, and "
                "torch.autograd.grad() does not write there. Set parameter.grad before each update, and call "
                "watcher.mark_step() after it."
            )

    def stepped_elsewhere(self) -> bool:
        """Count a step of another model's optimizer before the first sample. Returns whether there is a message."""
        self._num_elsewhere += 1
        if self._num_elsewhere != _PATIENCE_IN_STEPS or self._clock.marked:
            return False
        self._say_of_elsewhere(" If its own training begins later, all is well.")
        return True

    def run_ends(self) -> None:
        """Send what would have been sent later: the run or the watching ends."""
        self._send_without_model()
        has_stepped = self._clock.num_closed > 1 or self._optimizer_registry.num_known  # the end closes one sample
        if not has_stepped and _FEWEST_BACKWARDS <= self._num_backwards < _PATIENCE_IN_BACKWARDS:
            self._say_no_step(self._num_backwards)
        if self._num_elsewhere and not (self._clock.num_closed or self._clock.marked):
            self._say_of_elsewhere()

    def _say_of_elsewhere(self, more: str = "") -> None:
        steps = "1 optimizer step has" if self._num_elsewhere == 1 else f"{self._num_elsewhere} optimizer steps have"
        self._say_nothing_seen(
            f"{steps} been made since watch(), but no backward has reached the watched model, and nothing is logged. "
            "If a copy of it is trained (copy.deepcopy, torch.func.functional_call), pass the model that is trained to "
            f"watch().{more}"
        )

    def _say_nothing_seen(self, text: str) -> None:
        if not self._has_said_nothing_seen:
            self._has_said_nothing_seen = True
            self._notices.say("nothing seen", text)

    def stepped_without_the_model(self, optimizer: Optimizer) -> None:
        """Prepare an alert: the model has gradients, but an optimizer steps that holds none of its parameters.

        If the optimizer belongs to another model, the model's own steps before the next backward and no alert is sent.
        """
        if all(parameter.grad is None for parameter in parameters_of(optimizer)):
            self._without_model = Notice(
                "Optimizer without the model",
                f"{type(optimizer).__name__} stepped, but none of its parameters belongs to the watched model, and "
                "none has a gradient",
                self._clock.open_step,
                cause="stale_optimizer",
            )


def _slots_that_are_broken(entries: Iterable[Entry]) -> list[int]:
    """Return the slots of the parameters that hold NaN or Inf. Waits for the device."""
    filled = [(slot, p) for slot, p in entries if not (is_lazy(p) or p.is_meta)]  # the others hold no values yet
    broken: list[int] = []
    for device in {p.device for _, p in filled}:
        slots, parameters = zip(*[entry for entry in filled if entry[1].device == device], strict=True)
        counts = measure_received(parameters)[:, 1:].sum(dim=1).tolist()
        broken += itertools.compress(slots, counts)
    return sorted(broken)
