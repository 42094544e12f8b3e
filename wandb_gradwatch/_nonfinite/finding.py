"""What a search for the first bad operation has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward"]

_SHOWN: Final = 3  # offending indices

# By `Finding.operation`; None: an operation of the model, or of what comes after it.
REMEDIES: Final[dict[str | None, str]] = {
    None: "clamp what it reads, or add an epsilon to it, before this operation: a where() after it keeps a NaN out of "
    "the forward only",
    "parameter": "an earlier update has made it so: go back to a checkpoint from before that",
    "buffer": "an earlier forward has made it so: go back to a checkpoint from before that",
    "input": "look at the data of this batch",
    "loss": "look at the targets of this batch, and at logs, roots and divisions in the loss function",
}


@dataclass(frozen=True)
class InputRange:
    """One tensor that the operation read."""

    shape: tuple[int, ...]  # its shape
    dtype: str  # its dtype, without "torch."
    minimum: float  # the smallest finite element; NaN where there is none
    maximum: float  # the largest finite element; NaN where there is none
    num_zero: int  # elements that are 0
    num_negative: int  # elements below 0
    num_nonfinite: int  # elements that are NaN or Inf

    @classmethod
    def of(cls, tensor: Tensor) -> InputRange:
        """Look at a tensor. Waits for its device."""
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        finite = values[torch.isfinite(values)].double()
        low, high = (
            (finite.min().item() + 0.0, finite.max().item() + 0.0) if finite.numel() else (float("nan"), float("nan"))
        )
        return cls(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            low,
            high,
            int((finite == 0).sum()),
            int((finite < 0).sum()),
            values.numel() - finite.numel(),
        )

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a number"
        words = [f"{shape} of {self.dtype}, {self.minimum:.3g} to {self.maximum:.3g}"]
        words += [
            f"{count} {name}"
            for count, name in (
                (self.num_zero, "zeros" if self.num_zero > 1 else "zero"),
                (self.num_negative, "negative"),
                (self.num_nonfinite, "not finite"),
            )
            if count
        ]
        return ", ".join(words)


@dataclass(frozen=True)
class Finding:
    """The first operation that made a NaN or an Inf out of finite numbers.

    Args:
        operation: its ATen name, such as "aten.log"; of an operation in the backward, the name of the forward operation
            whose derivative it computes; "parameter", "buffer" or "input" where one of these was bad to begin with.
        module: the path of the module that called it, "" for the model itself, None outside of the model.
        direction: "forward" or "backward".
        file: where the user's code calls it; None where no such line is known.
        line: the line in that file.
        inputs: what it read.
        text: all of it in words, a line for each: what was made and where, what it read, what that reached, the remedy.
    """

    operation: str
    module: str | None
    direction: Direction
    file: str | None
    line: int | None
    inputs: tuple[InputRange, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def made(tensor: Tensor) -> str:
    """What is NaN and what is Inf in a tensor, and where, in words; "" where all is finite. Waits for its device."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    parts = []
    for name, bad in (("NaN", torch.isnan(values)), ("Inf", torch.isinf(values))):
        if count := int(bad.sum()):
            shown = ", ".join(str(tuple(index)) for index in bad.nonzero()[:_SHOWN].tolist())
            parts.append(f"{count} {name} of {bad.numel()} (at {shown}{', ...' if count > _SHOWN else ''})")
    return " and ".join(parts)
