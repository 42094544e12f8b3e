"""Whether gradients and updates belong together, seen in the first steps: facts, without thresholds, for the rules.

Parameters that no optimizer holds, an optimizer that holds other tensors, gradients that nobody resets.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._runtime.notices import Notice, Notices
from ..snapshot import keys
from .gradient_versions import state_of, version_of
from .optimizer_registry import OptimizerRegistry
from .parameter_registry import ParameterRegistry

_STEPS: Final = 3  # of each optimizer that are looked at
_PATIENCE_IN_BACKWARDS: Final = 1000  # that only accumulate, without a step, are worth a word
_PATIENCE_IN_WRITES: Final = 10  # to a parameter whose gradient was never seen: more than loading a checkpoint makes
_SCAN_EVERY: Final = 5  # samples at least: experts come and go in every one
_SETTINGS: Final[tuple[tuple[str, Callable[[Any], bool], str, str], ...]] = (
    (
        "weight_decay",
        lambda decay: decay < 0,
        "a weight decay below 0, by which parameters grow whatever their gradient",
        "give a decay of 0 or more",
    ),
    *(
        (
            name,
            lambda factor: factor >= 1,
            "an optimizer's state that forgets nothing, and grows with every step",
            f"give {name} below 1, such as 0.9",
        )
        for name in ("momentum", "betas")
    ),
)
_WITNESSES: Final = 5  # small parameters of an optimizer whose gradients stand for all of its


@dataclass
class _Carried:
    """Gradients that one optimizer has used, and that nothing has reset since; none where something has."""

    witnesses: dict[int, int] = field(default_factory=dict)  # slot -> state_of(gradient)
    nonzero: Tensor | None = None  # whether they were not 0 when the next backward had begun, on their device
    num_steps: int = 0


class Wiring:
    """Looks at the first steps of every optimizer."""

    def __init__(
        self, parameter_registry: ParameterRegistry, optimizer_registry: OptimizerRegistry, notices: Notices
    ) -> None:
        self._parameter_registry = parameter_registry
        self._optimizer_registry = optimizer_registry
        self._notices = notices
        self._carried: dict[int, _Carried] = {}  # by the optimizer's key
        self._first_versions: dict[int, int] | None = None  # of the parameters, by slot, after the first step of all
        self._unowned: dict[int, int] = {}  # slots with a gradient and no optimizer, with their versions, until told of
        self._samples_to_wait = 0  # until what is in `_unowned` is told of
        self._known_unowned: frozenset[int] = frozenset()
        self._marked_before: frozenset[int] = frozenset()
        self._has_changed = False  # which parameters have a gradient, since they were last looked at
        self._samples_since_scan = _SCAN_EVERY
        self._facts: dict[str, Tensor] = {}
        self._without_model: Notice | None = None  # to be said unless an optimizer of the model steps, too
        self._versions_at_first: dict[int, int] = {}  # of the parameters, by slot, when watch() was called

    def take(self) -> dict[str, Tensor]:
        """What has been found since the last call, by key: 0-dim tensors, which nobody waits for."""
        facts, self._facts = self._facts, {}
        return facts

    # ---- gradients that nobody resets

    def stepped(self, optimizer: Optimizer, key: int, step: int) -> None:
        """An optimizer has stepped: from now on its gradients should be reset before they are added to."""
        if self._first_versions is None:
            self._first_versions = {slot: version_of(parameter) for slot, parameter in self._parameter_registry.scan()}
        carried = self._carried.get(key) or self._carried.setdefault(key, _Carried())
        carried.num_steps += 1
        if carried.num_steps == 1:
            self._look_at_settings(optimizer, step)
        if carried.num_steps <= _STEPS:
            entries = sorted(self._optimizer_registry.entries(optimizer), key=lambda entry: entry[1].numel())
            present = [(slot, p.grad) for slot, p in entries if p.grad is not None][:_WITNESSES]
            carried.witnesses = {slot: state_of(gradient) for slot, gradient in present}
            carried.nonzero = None

    def _look_at_settings(self, optimizer: Optimizer, step: int) -> None:
        """Settings that no training survives, and that torch does not refuse, at least not in `param_groups`."""
        for group in optimizer.param_groups:
            for name, is_wrong, cause, remedy in _SETTINGS:
                values = group.get(name, 0.0)
                several = values if isinstance(values, tuple | list) else [values]
                if any(is_wrong(one) for one in several if isinstance(one, Real) and not isinstance(one, bool)):
                    fact = f"{type(optimizer).__name__} steps with {name}={values!r}."
                    text = f"{fact}\nProbable cause: {cause}. Remedy: {remedy}."
                    self._notices.alert("Optimizer settings", text, step)
                    return

    def backward_begins(self, has_accumulated: bool) -> None:
        """The moment to see what was reset before a backward: none of its gradients is there yet, or the first one."""
        if self._without_model is not None:
            if not self._optimizer_registry.knows_any:
                self._notices.append(self._without_model)
            self._without_model = None
        for carried, present in self._with_witnesses():
            untouched = [gradient for slot, gradient in present if state_of(gradient) == carried.witnesses[slot]]
            if not untouched or len(untouched) < len(carried.witnesses) - has_accumulated:
                carried.witnesses, carried.nonzero = {}, None
            elif carried.nonzero is None:  # what was zeroed through `.data` leaves no trace but the zeros
                carried.nonzero = torch.stack([gradient.detach().ne(0).any() for gradient in untouched]).any()

    def backward_ended(self) -> None:
        """A backward has added to them."""
        for carried, present in self._with_witnesses():
            carried.witnesses = {slot: state_of(gradient) for slot, gradient in present}

    def forget_gradients(self) -> None:
        """No hook will tell of the next backwards, nor of what is reset before them."""
        for carried in self._carried.values():
            carried.witnesses, carried.nonzero = {}, None

    def _with_witnesses(self) -> Iterator[tuple[_Carried, list[tuple[int, Tensor]]]]:
        """What is carried, and its witnesses' gradients as they are now."""
        if some := [carried for carried in self._carried.values() if carried.witnesses]:
            parameters = dict(self._parameter_registry.scan())
            for carried in some:
                there = [(slot, parameters[slot].grad) for slot in carried.witnesses if slot in parameters]
                yield carried, [(slot, gradient) for slot, gradient in there if gradient is not None]

    def about_to_step(self, key: int) -> None:
        """An optimizer is about to use gradients; those that were never reset since it last did are a fact."""
        carried = self._carried.get(key)
        if carried is not None and carried.witnesses and carried.nonzero is not None:
            self._facts[keys.WIRING_CARRIED] = carried.nonzero.double()

    # ---- parameters without an optimizer

    def _look_for_frozen(self, marked: frozenset[int]) -> None:
        """What has no gradient any more, or has one for the first time, may have been frozen or unfrozen."""
        self._has_changed |= marked != self._marked_before
        self._marked_before, self._samples_since_scan = marked, self._samples_since_scan + 1
        if self._has_changed and self._samples_since_scan >= _SCAN_EVERY:
            self._has_changed, self._samples_since_scan = False, 0
            self._parameter_registry.scan()

    def sample_closed(self, marked: frozenset[int], owner: Mapping[int, int]) -> None:
        """A sample of optimizer steps is over: parameters that got a gradient and that no optimizer holds."""
        self._look_for_frozen(marked)
        unowned = marked - owner.keys()
        first, self._first_versions = self._first_versions, {}
        if unowned and unowned != self._known_unowned:  # looked for once, and again only when others are without one
            self._known_unowned = unowned
            held = _held_by_any_optimizer()
            here = self._parameter_registry.scan()
            at = first or {slot: version_of(p) for slot, p in here}
            self._unowned = {slot: at[slot] for slot, p in here if slot in unowned and slot in at and id(p) not in held}
            # A sample may be closed before or after an update by hand: one whole iteration lies between three of them.
            self._samples_to_wait = 1 if first else 2
        elif self._unowned:
            self._samples_to_wait -= 1
            if self._samples_to_wait:
                return
            # Those that something else has written to, a codebook's average or a wrapper of an optimizer, are updated.
            names = self._parameter_registry.names
            for slot, parameter in self._parameter_registry.scan():
                if self._unowned.get(slot) == version_of(parameter):
                    self._facts[keys.WIRING_UNOWNED + names[slot]] = torch.ones((), dtype=torch.float64)
            self._unowned = {}

    # ---- backwards and steps that do not belong together

    def begins(self) -> None:
        """The model is watched from now on."""
        self._versions_at_first = {slot: version_of(parameter) for slot, parameter in self._parameter_registry.scan()}

    def nothing_was_seen(self) -> None:
        """Somebody asks, and there was no step yet, nor a gradient: say so if it is trained all the same."""
        writes = (version_of(p) - self._versions_at_first.get(slot, 0) for slot, p in self._parameter_registry.scan())
        if max(writes, default=0) >= _PATIENCE_IN_WRITES:
            self._notices.say(
                "nothing seen",
                "the model is trained, but no gradient was seen: what lies in .grad is measured, and "
                "torch.autograd.grad() puts nothing there. Set parameter.grad before each update, and call "
                "watcher.mark_step() after it.",
            )

    def without_a_step(self, num_backwards: int, step: int) -> None:
        """So many backwards have ended in the open step."""
        if num_backwards == _PATIENCE_IN_BACKWARDS:
            self._notices.alert(
                "No gradient",
                f"{num_backwards} backwards have gone by without an optimizer step that updates a watched "
                "parameter.\nProbable cause: not clear: either step() is missing, or the optimizer holds other tensors "
                "than the model. Remedy: call step() after backward(), and make the optimizer from the parameters of "
                "the model that is trained.",
                step,
            )

    def stepped_without_the_model(self, optimizer: Optimizer, step: int) -> None:
        """The first optimizer to step, or the last one known, holds nothing that is watched, which a backward reaches.

        It may be another model's, perhaps in another thread: then this one's own steps before its next backward.
        """
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            self._without_model = Notice(
                "Optimizer without the model",
                f"{type(optimizer).__name__} stepped, but nothing that it holds is a parameter of the watched "
                "model, and none of it has a gradient.\nProbable cause: the optimizer owns other tensors than the "
                "model, which was rebuilt or copied after the optimizer was made. Remedy: make the optimizer from "
                "the parameters of the model that is trained, after the model is complete.",
                step,
            )


def _held_by_any_optimizer() -> set[int]:
    """Ids of what the process's optimizers hold, those that have not stepped yet among them."""
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
    return {id(parameter) for group in groups for parameter in group["params"]}
