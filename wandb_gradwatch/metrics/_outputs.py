"""Activations: the statistics of inputs and outputs of modules. Reference: distances to those of another model."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from .._arguments import check, check_flags, is_number
from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, WatchedTensor
from .._capture.scaling import SCALERS, scale_tensor
from .._measure.elements import onto, wide_dtype
from .._measure.measure import sum_sq
from .._measure.probe_values import Distance, ProbeSums
from .._runtime.sharding import is_sharded
from .._runtime.wrappers import is_measurable, leaves_in, unwrapped
from ..snapshot import keys
from ._forward_hooks import ForwardHooks, Match, ModuleFilter, ModuleIndex, logger
from ._metric import Metric
from ._module_probe import ForwardProbe, Layout, SubjectProbe
from ._rows import HISTOGRAM, STATISTICS, Dims, RowTally, Store, check_names, slices, tensor_name, tensors_in, widened
from ._rules import NonFiniteActivation

DEFAULT_STATISTICS: Final = ("norm", "mean", "std", "min", "max", "dead_ratio", "num_nonfinite", HISTOGRAM)
_OF: Final = ("input", "output", "grad")

Difference = Callable[[Tensor, Tensor], Tensor]
_DISTANCE: Final = Distance("difference", "relative_difference")


class Activations(ForwardProbe):
    """Statistics of module outputs, logged as `activation/<module>/<statistic>` and merged over micro-batches.

    The output of the whole model is `root`. Tensors in a tuple, list or dict are `<module>.output_<index or key>`,
    inputs `<module>.input` or `<module>.input_<index or name>`, gradients of outputs (without the loss scale of a
    gradient scaler) `<module>.grad` or `<module>.grad_<index or key>`, and those of `log_tensor` `<module>.<name>`.

    Each forward of the training is measured once, on the rank that logs; those without gradients and the recomputation
    of activation checkpointing are ignored, and so are modules inside a compiled region, where a hook would break the
    graph. A copied or saved model has no hooks.

    Args:
        match: choose modules by name (a regular expression, searched; several; or a function), or by class, such as
            nn.Linear. None: all.
        of: the tensors to measure: any of "input", "output" and "grad".
        statistics: any of norm, rms, mean, std, min, max, abs_max, dead_ratio, zero_ratio and num_nonfinite (computed
            over finite elements, as for gradients); and "histogram", at steps where gradients have a histogram too
            (`histogram_every` of `watch()`).
        dead_threshold: an element with |a| <= this counts as dead.
        evaluation: measure the forwards of evaluations (the model in eval mode) instead. Those between two samples are
            merged and logged with the later sample as `activation/<module>.eval/<statistic>`.

    Cost: at a sampled step (with `evaluation` at every forward of an evaluation) one batched pass over each matching
        tensor, and 15 numbers per tensor until the sample is complete, 257 more with a histogram. At other steps 1 us
        per matching module, with `evaluation` 2 us.

    Raises:
        ValueError: `statistics` or `of` has an unknown name, or "grad" with `evaluation`; dead_threshold is negative;
            watch() raises it if match matches nothing.
        TypeError: evaluation is not a bool.
    """

    def __init__(
        self,
        match: ModuleFilter | None = None,
        *,
        of: Sequence[str] = ("output",),
        statistics: Sequence[str] = DEFAULT_STATISTICS,
        dead_threshold: float = 0.0,
        evaluation: bool = False,
    ) -> None:
        check_names(f"Activations(): statistics={statistics!r}", statistics, (*STATISTICS, HISTOGRAM))
        check_names(f"Activations(): of={of!r}", of, _OF)
        check_flags("Activations()", evaluation=evaluation)
        if evaluation and "grad" in of:
            raise ValueError(f'Activations(): of={of!r} has "grad", but an evaluation has no backward')
        is_threshold = is_number(dead_threshold) and dead_threshold >= 0
        check(is_threshold, "Activations(): dead_threshold", dead_threshold, "a number, at least 0")
        self._rows = RowTally(statistics, dead_threshold)
        super().__init__(match, self._rows, in_evaluation=evaluation)
        self._of = frozenset(of)
        self.logs = frozenset((keys.ACTIVATION, statistic) for statistic in statistics)
        self.brings = (NonFiniteActivation,) if "num_nonfinite" in statistics else ()
        self._has_histograms = HISTOGRAM in statistics
        self._order: dict[str, int] = {}  # by tensor name: the place in the forward of what the tensor comes from

    def bind(self, models: ModuleIndex) -> None:
        modules = dict(models.modules())
        # The ids of the models' parameters identify their optimizer, and so the gradient scaler.
        self._parameters = {id(parameter) for module in modules.values() for parameter in module.parameters()}
        self.hook_into(models)
        self._match.require_module(modules)

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, hooked = (f"{name}.eval" if self._in_evaluation else name), name
        seen: list[tuple[str, Tensor]] = []
        if "input" in self._of:
            seen += [*tensors_in(args[0] if len(args) == 1 else args, "input"), *tensors_in(kwargs, "input")]
        if "output" in self._of:
            seen += tensors_in(output)
        self._add(hooked, {tensor_name(name, path): tensor for path, tensor in seen})
        if "grad" in self._of:
            for path, tensor in leaves_in(output, "grad"):
                if tensor.requires_grad:
                    hook = partial(self._hooks.gradient_came, self._add_gradient, name, path)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _add_gradient(self, name: str, path: str, gradient: Tensor) -> None:
        scale = scale_tensor(SCALERS.scaler_for(self._parameters))
        for _, tensor in tensors_in(gradient):
            unscaled = tensor if scale is None else widened(tensor) / onto(scale, tensor.device)
            self._add(name, {tensor_name(name, path): unscaled})

    def logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        if is_measurable(thing) and (self._match.chooses(module) or self._match.chooses(f"{module}.{name}")):
            within = f"{module}.eval" if self._in_evaluation else module
            parts = {tensor_name(within, name, label): part for label, part in slices(thing.detach(), dims)}
            self._add(f"{module}.{name}", parts)

    def _add(self, source: str, tensors: Mapping[str, Tensor]) -> None:
        self._seen_any = True
        self._order |= dict.fromkeys(tensors, self._hooks.order[source])
        # The sample of an evaluation is yet to come, and may have histograms.
        histogram = self._has_histograms and (self._histogram_is_due or self._in_evaluation)
        for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
            here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
            self._rows.measure(here, histogram=histogram)

    def take(self) -> Mapping[str, Found]:
        # In the order of the forward: re-entrant checkpointing measures its blocks in the order of the backward.
        read = self._rows.read(self._order.__getitem__, histogram=self._histogram_is_due)
        return {f"{keys.ACTIVATION}/{name}/{statistic}": value for name, statistic, value in read}


class Reference(SubjectProbe, ForwardProbe):
    """L2 distances of parameters and activations to those of a reference model on the same batch.

    Logs `parameter/<name>/difference` and `.../relative_difference` (divided by the reference's norm), and the same
    under `activation/<module>/` for modules that match `activations`. The reference's forward runs inside the sampled
    step's forward, without gradients, with the model's random numbers; it does not change the training's generators.

    Args:
        model: the watched model.
        reference: a model of the same structure, which keeps its mode (training or evaluation). None: a copy of the
            model as it is now, which follows the model's mode.
        match: choose parameters by name: a regular expression (searched), several, or a function. None: all.
        activations: choose modules whose outputs are compared. None: none, and the reference's forward never runs.
        functions: additional differences by name: each gets the tensor and the reference's tensor and returns a tensor,
            whose mean is logged.

    Distances of a sharded parameter (FSDP2, tensor parallel) are those of the whole, merged over the ranks at a flush.
    Create the reference before the model is sharded. `functions` skip sharded parameters, and parameters under FSDP1
    are skipped altogether; a message says so once.

    Memory: the whole reference on every rank; at a sampled step also its outputs of the matching modules, until the
        model's own outputs are compared.

    Raises:
        TypeError: model or reference is not a module.
        ValueError: the reference has other parameters than the model, or is sharded; watch() raises it if match or
            activations matches nothing.
    """

    may_be_several = False  # each covers the whole model

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None = None,
        *,
        match: NameFilter | None = None,
        activations: NameFilter | None = None,
        functions: Mapping[str, Difference] | None = None,
    ) -> None:
        # [2] by family, name and function: the sum of the function's values and their number; for the function "" the
        # sums of squares of the difference and of the reference
        self._sums = Store[tuple[str, str, str], Tensor]()
        super().__init__(match, self._sums)
        source = model if reference is None else reference
        for argument, module in (("model", model), ("reference", source)):
            if not isinstance(module, nn.Module):
                raise TypeError(f"Reference(): {argument} must be a torch.nn.Module, but is {type(module).__name__}")
        if any(map(is_sharded, source.parameters())):
            raise ValueError(
                "Reference(): the model is sharded already, and a reference must be whole; make the Reference before "
                "the model is sharded, or pass reference=, a copy from before"
            )
        self._is_copy = reference is None
        self._reference = copy.deepcopy(model).requires_grad_(False) if reference is None else reference
        self._made_of = weakref.ref(unwrapped(model))  # a strong reference would keep the model alive
        self._frozen = ModuleIndex([("", self._reference)]).parameters()
        self._shapes = _shapes_of(self._reference)
        if wrong := sorted(set(self._shapes.items()) ^ set(_shapes_of(model).items())):
            raise ValueError(
                f"Reference(): the reference must have the model's parameters, but {wrong[0][0]!r} differs; "
                "pass a copy of the model"
            )
        self._activations = None if activations is None else Match(activations, "Reference()")
        is_mapping = functions is None or isinstance(functions, Mapping)
        check(is_mapping, "Reference(): functions", functions, "a dict from name to function, or None", TypeError)
        self._functions = dict(functions or {})
        for name, function in self._functions.items():
            if name in (_DISTANCE.norm, _DISTANCE.ratio):
                raise ValueError(f"Reference(): functions: {name!r} is the name of the distance itself; choose another")
            Metric(name, function)  # type: ignore[arg-type]  # raises if the name or the function is invalid
        families = (keys.PARAMETER,) if activations is None else (keys.PARAMETER, keys.ACTIVATION)
        names = (_DISTANCE.norm, _DISTANCE.ratio, *self._functions)
        self.logs = frozenset((family, name) for family in families for name in names)
        self._prefix = ""
        self._reference_hooks = ForwardHooks(self, ModuleIndex(), when="always")
        self._outputs: dict[str, list[Mapping[str, Tensor]]] = {}  # the reference's outputs: by module, per call

    def bind(self, models: ModuleIndex) -> None:
        # Of several models with the same shapes, such as twins, the one that the reference was made of comes first.
        made_of = self._made_of()
        for prefix, model in sorted(models.alive(), key=lambda one: all(it is not made_of for it in one[1].modules())):
            self._prefix, models_of = prefix, ModuleIndex([(prefix, model)])
            shapes = _shapes_of(model)
            if shapes.keys() == self._shapes.keys() if models_of.uses_fsdp1 else shapes == self._shapes:
                break
        else:
            raise ValueError("Reference(): the model that it was made of is not watched here; pass the same model")
        names = [name for name in models.watched_parameters() if name.removeprefix(self._prefix) in self._frozen]
        self._match.require("parameter", names)
        if self._activations is not None:
            self._activations.require("module", dict(models_of.modules()))
            self.hook_into(models_of)
            self._reference_hooks.models = ModuleIndex([(self._prefix, self._reference)])
            self._reference_hooks.hook(self.sees, self._keep_output)

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._outputs = {}

    def sees(self, name: str, module: nn.Module) -> bool:
        return self._activations is not None and self._activations.chooses(name)

    def forward_begins(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], _: Any) -> None:
        super().forward_begins(name, module, args, kwargs, _)
        self._outputs = {}
        if self._is_copy and self._reference.training != module.training:
            self._reference.train(module.training)
        devices = sorted({p.device.index for p in self._frozen.values() if p.is_cuda})
        self._reference_hooks.open()
        try:
            with torch.random.fork_rng(devices):
                self._reference(*args, **kwargs)
        finally:
            self._reference_hooks.shut()

    def _keep_output(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._outputs.setdefault(name, []).append(dict(tensors_in(output)))

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._seen_any = True
        references = waiting.pop(0) if (waiting := self._outputs.get(name)) else {}
        for path, tensor in tensors_in(output):
            if path in references and references[path].shape == tensor.shape:
                self._compare(keys.ACTIVATION, tensor_name(name, path), tensor, references[path], self._functions)

    def wants(self, subject: str, tensor: WatchedTensor) -> bool:
        is_ours = tensor.name.startswith(self._prefix) and tensor.name.removeprefix(self._prefix) in self._frozen
        return subject == keys.PARAMETER and is_ours and self._match.chooses(tensor.name)

    def measure(self, subject: str, tensor: WatchedTensor, values: Tensor, before: Tensor | None = None) -> None:
        layout = Layout.of(tensor)
        if layout is None and not self.gets_whole(tensor, needed_by="distances to a reference"):
            return
        whole = self._frozen[tensor.name.removeprefix(self._prefix)].detach()
        reference = whole if layout is None else layout.part(whole)
        has_functions = self._functions and self.gets_whole(tensor, needed_by="functions of differences")
        self._compare(keys.PARAMETER, tensor.name, values, reference, self._functions if has_functions else {})

    def _compare(
        self, family: str, name: str, tensor: Tensor, other: Tensor, functions: Mapping[str, Difference]
    ) -> None:
        wide, reference = widened(tensor), widened(onto(other, tensor.device))
        pending = family == keys.ACTIVATION
        # Sums of squares add up over micro-batches and shards, so the norms are those of the whole tensor.
        self._sums.add((family, name, ""), sum_sq([wide - reference, reference]), pending=pending)
        for chosen, function in tuple(functions.items()):
            try:
                value = Metric(chosen, lambda t, f=function: f(t, reference)).value_of(wide)  # type: ignore[misc]
                total = value.sum(dtype=wide_dtype(value.device))
                mean = torch.stack([total, torch.full_like(total, value.numel())])
                self._sums.add((family, name, chosen), mean, pending=pending)
            except Exception as error:
                del self._functions[chosen]
                said = "wandb_gradwatch: %r: the function %r failed on %s/%s and is dropped; the others go on."
                logger.error(said, self, chosen, family, name, exc_info=error)

    def take(self) -> Mapping[str, Found]:
        taken: dict[str, Found] = {}
        for (family, name, function), sums in self._sums.take().items():
            if function:
                taken[f"{family}/{name}/{function}"] = sums[0] / sums[1]
            else:
                taken[f"{family}/{name}"] = ProbeSums(sums, _DISTANCE, name if family == keys.PARAMETER else None)
        return taken

    def close(self) -> None:
        super().close()
        self._reference_hooks.remove()
        self._outputs = {}


def _shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in ModuleIndex([("", model)]).parameters().items()}
