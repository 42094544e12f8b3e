"""Search for the first bad operation, in a forward and backward run for the search or in a block of the user's code."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from .._runtime.autograd import replay
from .._runtime.error_boundary import dynamo_disabled
from .._runtime.wrappers import leaves_in, named_modules, named_tensors, unwrapped
from .trace import REMEDIES, Finding, NonfiniteTrace, made

logger: Final = logging.getLogger("wandb_gradwatch")


def find_nonfinite(
    model: nn.Module, inputs: Any, loss_function: Callable[[Any], Tensor] | None = None
) -> Finding | None:
    """Run one forward and backward, and return the first operation that makes a NaN or Inf from finite numbers.

    Nothing is changed: parameters, buffers, `.grad` and random number generators stay bit for bit as they were, and
    hooks on accumulated gradients do not run. Infinities that are written on purpose, such as masks, count only if they
    make a NaN. The model runs in its current mode, under the caller's autocast, without compilation.

    Args:
        model: a module, with or without a wrapper (DistributedDataParallel, torch.compile).
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments; anything else is the only argument.
        loss_function: a function from the model's output to a tensor. None: the sum of all tensors in the output.

    Returns:
        The finding; None if the output, the loss and all gradients are finite.

    Raises:
        TypeError: model is not a module, or loss_function does not return a tensor.

    Cost: the host reads every operation's output, which takes seconds for a large model.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> finding = find_nonfinite(model, torch.zeros(1, 2), lambda output: (output * 0).log().sum())
        >>> finding.operation, finding.module
        ('aten.log', None)
    """
    root = _root_of(model, "find_nonfinite")
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    args = args if isinstance(args, tuple) else (args,)

    def loss_of(output: Any) -> list[tuple[str, Tensor]]:
        if loss_function is None:
            return outputs_of(output)
        loss = loss_function(output)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_function must return a tensor, but returned {type(loss).__name__}")
        return [("the loss", loss)]

    with unchanged(root):
        return search(root, args, kwargs, loss_of=loss_of)


def outputs_of(output: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a model's output, each with a description."""
    return [("the model's output", tensor) for _, tensor in leaves_in(output)]


@dynamo_disabled
def search(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_of: Callable[[Any], list[tuple[str, Tensor]]] = outputs_of,
    gradients: Mapping[int, Tensor] | None = None,
) -> Finding | None:
    """Run one forward and backward of an unwrapped model under the trace; the caller restores what they change.

    `loss_of` returns the tensors that the backward starts from, and `gradients` are theirs by position; None: ones.
    """
    arrived = next(filter(None, map(made, (gradients or {}).values())), None)
    trace = NonfiniteTrace(model)
    parameters, buffers = named_tensors(named_modules(model)), named_tensors(named_modules(model), "_buffers")
    given = {str(place): tensor for place, (_, tensor) in enumerate(leaves_in((args, kwargs)))}
    for kind, named in (("parameter", parameters), ("buffer", buffers), ("input", given)):
        for name, tensor in named.items():
            if (finding := trace.look_at(tensor.detach(), kind, name)) is not None:
                return finding
    with torch.enable_grad(), trace.follow_modules(), trace:
        sinks = loss_of(model(*args, **kwargs))
        if (finding := trace.finding(sinks)) is not None:
            return finding
        if arrived is not None:
            text = (
                f"The gradient of the model's output held {arrived} when it came: it is the loss's, outside of the "
                f"model.\nRemedy: {REMEDIES['loss']}."
            )
            return Finding("loss", None, "backward", None, None, (), text)
        begins = {place: tensor for place, (_, tensor) in enumerate(sinks) if tensor.requires_grad}
        if gradients is None:
            gradients = {place: torch.ones_like(tensor) for place, tensor in begins.items()}
        if begins:
            came = [gradients.get(place, torch.zeros_like(tensor)) for place, tensor in begins.items()]
            torch.autograd.backward(list(begins.values()), came)
    gradients_of = [(f"the gradient of {name}", p.grad) for name, p in parameters.items() if p.grad is not None]
    return trace.finding(reversed(gradients_of))


def _root_of(model: nn.Module, caller: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}(model) needs a torch.nn.Module, but got {type(model).__name__}")
    return unwrapped(model)


class Trace:
    """The result of `trace_nonfinite`: `finding` is set at the end of the block."""

    finding: Finding | None = None


@contextmanager
def trace_nonfinite(model: nn.Module) -> Iterator[Trace]:
    """Observe every operation in a block, such as a training step, to find the first that makes a NaN or Inf.

    Args:
        model: the module whose submodules are named, and whose gradients and parameters are checked after the block.

    Returns:
        A context manager. After the block, `finding` of its result is the `Finding` or None; it is also logged.

    Raises:
        TypeError: model is not a module.

    Cost: the host reads every operation's output.
    """
    root, result = _root_of(model, "trace_nonfinite"), Trace()
    trace = NonfiniteTrace(root)
    sinks: list[tuple[str, Tensor]] = []

    def keep_output(module: nn.Module, _: object, output: Any) -> None:
        sinks.extend((name, tensor.detach()) for name, tensor in outputs_of(output))

    try:
        with root.register_forward_hook(keep_output), trace.follow_modules(), trace:
            yield result
    finally:
        for name, parameter in named_tensors(named_modules(root)).items():
            if parameter.grad is not None:
                sinks.append((f"the gradient of {name}", parameter.grad))
            sinks.append((f"the parameter {name}", parameter.detach()))
        result.finding = trace.finding(sinks)
        if result.finding is not None:
            logger.warning("wandb_gradwatch: %s", result.finding.text)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients, hooks and random number generators after a forward and a backward."""
    places = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    buffers = [(buffer, buffer.clone()) for _, _, buffer in places if buffer is not None]
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    of_all = [hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    hooks = [(hooks, dict(hooks)) for hooks in of_all if hooks]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        replay.is_running = True
        for taken, _ in hooks:
            taken.clear()
        for parameter in parameters:
            parameter.grad = None
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        replay.is_running = False
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for taken, kept in hooks:
            taken.update(kept)
        with torch.no_grad():
            for buffer, values in buffers:
                if not torch.equal(buffer, values):  # writing an equal buffer would invalidate a graph that uses it
                    buffer.copy_(values)
        for module, name, original in places:
            module._buffers[name] = original
