"""The refined coordinate check: does each layer learn, and is its change of the right size at every width?

After t updates the output of a layer has changed for two reasons: its own weights changed, and its input changed. For
a layer with weights W and input x,

    W_t x_t - W_0 x_0  =  (W_t - W_0) x_t  +  W_0 (x_t - x_0)

The check measures the two terms separately. In a parameterisation that transfers its learning rate over widths, both
terms keep their size per coordinate as the width grows. In others the first term grows or shrinks with a power of the
width.

Source: M. Haas et al., arXiv 2505.22491.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._arguments import check, is_number
from .._capture.parameter_registry import NameFilter
from .._measure.columns import FloatArray
from ._forward_hooks import Match, ModuleIndex

# W widths, T checked steps, L layers

# Layers whose output is linear in their input, apart from the bias.
_LINEAR_IN_INPUT: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class CoordinateCheck:
    """The result of coordinate_check(). Sizes are root mean squares over all coordinates and positions of the batch."""

    widths: FloatArray  # [W]
    steps: FloatArray  # [T] number of updates before each check
    layers: tuple[str, ...]  # [L] names of modules
    weight_change: FloatArray  # [W, T, L] the size of (W_t - W_0) x_t, without biases
    input_change: FloatArray  # [W, T, L] the size of W_0 (x_t - x_0), without biases; 0 for layers fed by the data
    output: FloatArray  # [W, T, L] the size of W_t x_t, with biases: the layer's output

    def growth(self, quantity: str = "weight_change") -> FloatArray:
        """Return the exponent p of size ~ width^p for each layer at the last step: [L]; NaN if a size is 0.

        0: the size does not depend on the width. 1: the size doubles with the width.

        Raises:
            ValueError: quantity is none of weight_change, input_change and output.
        """
        if quantity not in ("weight_change", "input_change", "output"):
            raise ValueError(f'quantity={quantity!r} must be "weight_change", "input_change" or "output"')
        sizes_WL = getattr(self, quantity)[:, -1]
        with np.errstate(divide="ignore"):
            logs_WL = np.log(sizes_WL)
        known = np.isfinite(logs_WL).all(axis=0)
        slopes = np.polyfit(np.log(self.widths), np.where(known, logs_WL, 0.0), 1)[0]
        return np.where(known, slopes, np.nan)


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    make_optimizer: Callable[[nn.Module, int], Optimizer],
    *,
    widths: Sequence[int],
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    match: NameFilter | None = None,
    check_steps: Iterable[int] | None = None,
    seed: int = 0,
) -> CoordinateCheck:
    """Train a model at several widths for a few steps, and measure what changed the output of each layer.

    The terms are computed in float64 from the differences of weights and inputs, not from differences of outputs, so a
    small learning rate loses no digits. All widths see the same batches. The caller's random number generators are left
    unchanged.

    Args:
        make_model: a function from a width to a new model.
        make_optimizer: a function from a model and its width to an optimizer, with learning rates scaled for the width.
        widths: at least two.
        batches: one per update; the last one is also the batch x of the measurement.
        loss: a function from a model and a batch to a scalar; it must run the model's forward exactly once.
        match: choose layers among the modules with their own weight and no children (linear, convolution, embedding,
            norm): a regular expression (searched), several, or a function of the name. None: all.
        check_steps: the numbers of updates after which to measure. None: after the last update.
        seed: the random seed for each model.

    Returns:
        The sizes [W, T, L], with `growth()`.

    Raises:
        ValueError: fewer than two widths; no batch; a check step outside 1 to len(batches); match matches nothing.
        TypeError: make_model, make_optimizer or loss is not a function.

    Memory: two copies of one model, and two copies of the layers' inputs on one batch.
    """
    for name, function in (("make_model", make_model), ("make_optimizer", make_optimizer), ("loss", loss)):
        check(callable(function), f"coordinate_check(): {name}", function, "a function", TypeError)
    steps = sorted({len(batches)} if check_steps is None else set(check_steps))
    are_widths = all(is_number(width) and width > 0 for width in widths) and len(set(widths)) > 1
    check(are_widths, "coordinate_check(): widths", widths, "at least two widths to compare, all above 0")
    if not batches or not steps or steps[0] < 1 or steps[-1] > len(batches):
        raise ValueError(
            f"coordinate_check(): steps {steps} are to be checked, but there are {len(batches)} batches; pass a batch "
            "per update, and check_steps between 1 and their number"
        )
    found: list[list[dict[str, FloatArray]]] = []
    with torch.random.fork_rng():
        for width in widths:
            torch.manual_seed(seed)
            model = make_model(width)
            found.append(_check_one(model, make_optimizer(model, width), batches, loss, match, steps))
    layers = tuple(found[0][0])
    if other := [width for width, per_step in zip(widths, found, strict=True) if tuple(per_step[0]) != layers]:
        raise ValueError(
            f"coordinate_check(): the model of width {other[0]} has other layers than that of width {widths[0]}"
        )
    sizes_WTLQ = np.array([[[sizes[layer] for layer in layers] for sizes in per_step] for per_step in found])
    return CoordinateCheck(
        np.array(widths, dtype=np.float64), np.array(steps, dtype=np.float64), layers, *np.moveaxis(sizes_WTLQ, -1, 0)
    )


def _check_one(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    match: NameFilter | None,
    steps: Sequence[int],
) -> list[dict[str, FloatArray]]:
    """Return the sizes [Q] of each layer, for each checked step."""
    modules = ModuleIndex([("", model)]).modules()
    named = {name: it for name, it in modules if it._parameters.get("weight") is not None and not it._modules}
    layers = {name: named[name] for name in Match(match, "coordinate_check()").require("layer", named)}
    initial = {name: copy.deepcopy(layer) for name, layer in layers.items()}
    inputs_0 = _inputs(model, layers, batches[-1], loss)
    found = []
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        torch.autograd.backward(loss(model, batch))
        optimizer.step()
        if step in steps:
            inputs_t = _inputs(model, layers, batches[-1], loss)
            found.append({name: _sizes(layers[name], initial[name], x, inputs_0[name]) for name, x in inputs_t.items()})
    return found


def _inputs(
    model: nn.Module, layers: Mapping[str, nn.Module], batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Tensor]:
    """Return each layer's input on a batch, in evaluation mode; for a layer called several times, the first input."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            inputs.setdefault(name, args[0].detach().clone())

    with ExitStack() as before, torch.no_grad():
        for module in model.modules():
            before.callback(setattr, module, "training", module.training)
        for name, layer in layers.items():
            before.enter_context(layer.register_forward_pre_hook(partial(keep, name)))
        model.eval()
        loss(model, batch)
    return {name: inputs[name] for name in layers if name in inputs}


@torch.no_grad()
def _sizes(layer_t: nn.Module, layer_0: nn.Module, x_t: Tensor, x_0: Tensor) -> FloatArray:
    wide_t, wide_0, change = (copy.deepcopy(layer).double().eval() for layer in (layer_t, layer_0, layer_t))
    x_t, x_0 = (x.double() if x.is_floating_point() else x for x in (x_t, x_0))
    output = wide_t(x_t)
    # Every layer with its own weights is linear in them if its bias is zero.
    for layer in (wide_t, wide_0, change):
        if (bias := layer._parameters.get("bias")) is not None:
            bias.zero_()
    for parameter, before in zip(change.parameters(), wide_0.parameters(), strict=True):
        parameter.sub_(before)
    weight_change = change(x_t)
    is_linear = isinstance(layer_t, _LINEAR_IN_INPUT)
    input_change = wide_0(x_t - x_0) if is_linear else wide_0(x_t) - wide_0(x_0)
    return np.array([float(moved.square().mean().sqrt()) for moved in (weight_change, input_change, output)])
