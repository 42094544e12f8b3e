"""What the capture needs to know of an engine that averages, scales and clips gradients in memory of its own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

Settings = Mapping[str, Any]  # of a group of parameters, such as `lr`


@dataclass(frozen=True)
class Held:
    """A trainable parameter, and which part of it this rank updates.

    `mesh` and `placements` are those of the part as a DTensor. Without a mesh every rank holds the whole parameter.
    """

    name: str  # in the model
    parameter: nn.Parameter
    shape: tuple[int, ...]  # of the whole parameter
    mesh: Any = None
    placements: Sequence[Any] = ()


@dataclass(frozen=True)
class Outcome:
    """What the engine's step has made of the gradients that were there before."""

    is_skipped: bool = False  # loss scaling has skipped the update
    # The gradients that the update used, divided by those before the step and by the inverse of the loss scale. A
    # tensor is on the device of the gradients and has one element. None: the engine does not tell.
    factor: float | Tensor | None = 1.0


@dataclass(frozen=True)
class Function:
    """A function of an engine that is replaced while the model is watched: an object and the name of its method."""

    owner: Any
    name: str


class Engine(ABC):
    """A model under an engine. Nothing here changes what the engine computes, waits for a device or communicates."""

    name: ClassVar[str]
    step: Function  # called once for each update, when the gradients are complete
    backward: Function | None = None  # called with the loss
    clips: bool = False  # whether the engine limits the norm of the gradients
    scales: bool = False  # whether the engine multiplies the loss, and divides the gradients in its step

    @abstractmethod
    def held(self) -> list[Held]:
        """Return the model's trainable parameters, in its order."""

    @abstractmethod
    def values(self, one: Held) -> Tensor:
        """Return a view of this rank's part of a parameter, in the dtype of its gradient."""

    @abstractmethod
    def gradient(self, one: Held) -> Tensor | None:
        """Return this rank's part of the gradient, before a step: averaged, unclipped, still with the loss scale.

        It has the shape of `values`. None: no backward has reached the parameter, as far as the engine tells.
        """

    def see(self, gradients: Sequence[Tensor]) -> None:  # noqa: B027 (most engines need not)
        """Get all parts of gradients that `gradient` has returned, before a measured step."""

    @abstractmethod
    def groups(self, held: Sequence[Held]) -> list[tuple[Settings, list[Held]]]:
        """Return the optimizer's groups: their present settings, and their parameters."""

    @abstractmethod
    def loss_scale(self) -> float | Tensor:
        """Return the factor of the loss in the backwards before the next step; 1 without a scaler."""

    @abstractmethod
    def outcome(self, result: Any, loss_scale: float | Tensor) -> Outcome:
        """Return what has become of a step. `result` is what the function `step` returned, the scale that before it."""

    def loss_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
        """Return the loss in the arguments of `backward`, and whether it is a share of the loss of the update."""
        return None, False
