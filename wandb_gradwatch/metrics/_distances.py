"""Updates: how far each parameter moves in a step. Reference: distances to the tensors of a frozen model."""

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, WatchedTensor
from .._measure.elements import onto, wide_dtype
from .._measure.measure import sum_sq
from .._measure.probe_values import Distance, ProbeSums
from .._runtime.sharding import is_sharded, local_part
from .._runtime.wrappers import unwrapped
from ..snapshot import keys
from ._forward_hooks import ForwardHooks, Match, ModuleIndex, logger
from ._metric import Metric
from ._module_probe import NO_OPTIMIZER, ForwardProbe, Layout, ParameterProbe, SubjectProbe
from ._rows import Store, add_on_device, tensor_name, tensors_in, widened

# The metric names of the distances; a user's function may not take them.
DIFFERENCE, RELATIVE = "difference", "relative_difference"
_DIFFERENCE: Final = Distance(DIFFERENCE, RELATIVE)
_CHANGE: Final = Distance("norm", "ratio")

Difference = Callable[[Tensor, Tensor], Tensor]


class Updates(SubjectProbe, ParameterProbe):
    """The norm of each parameter's change in a step, and its ratio to the parameter's norm before the step.

    Logs `update/<parameter>/norm` and `update/<parameter>/ratio`. A healthy ratio is often quoted as 1e-3. The ratio is
    missing for a parameter that was all zero. The change includes learning rate, momentum and weight decay. Both
    numbers of a sharded parameter are those of the whole parameter, merged over the ranks at the flush.

    Args:
        match: choose parameters by name: a regular expression (searched), several, or a function. None: all.
        max_mib: the memory in MiB that the copies may take on one rank.

    Memory: at sampled steps one copy of the matching parameters (of this rank's shards) while the optimizer steps, and
    one parameter's change at a time, in float32 if the parameter is half precision.

    Raises:
        ValueError: by watch(): match matches nothing, or the matching parameters exceed max_mib.
    """

    logs, unseen = frozenset({(keys.UPDATE, "norm"), (keys.UPDATE, "ratio")}), NO_OPTIMIZER

    def __init__(self, match: NameFilter | None = None, *, max_mib: float = 1024) -> None:
        super().__init__(match)
        self._max_mib = max_mib

    def bind(self, models: ModuleIndex) -> None:
        super().bind(models)
        parts = [local_part(one) for name, one in models.watched_parameters().items() if self._match.chooses(name)]
        size = sum(part.numel() * part.element_size() for part in parts) / 2**20
        if size > self._max_mib:
            raise ValueError(
                f"{self!r} would copy {size:.0f} MiB of parameters at each sampled step, more than "
                f"max_mib={self._max_mib:g}; match fewer parameters, or raise max_mib"
            )

    def wants(self, subject: str, tensor: WatchedTensor) -> bool:
        return subject == keys.UPDATE and self._match.chooses(tensor.name)

    def measure(self, subject: str, tensor: WatchedTensor, values: Tensor, before: Tensor | None = None) -> None:
        assert before is not None
        self._found[f"{keys.UPDATE}/{tensor.name}"] = ProbeSums(sum_sq([values, before]), _CHANGE, tensor.name)


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
        self._sums = Store[tuple[str, str, str], Tensor](add_on_device)
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
        self._functions = dict(functions or {})
        for name, function in self._functions.items():
            if name in (DIFFERENCE, RELATIVE):
                raise ValueError(f"Reference(): functions: {name!r} is the name of the distance itself; choose another")
            Metric(name, function)  # type: ignore[arg-type]  # raises if the name or the function is invalid
        families = (keys.PARAMETER,) if activations is None else (keys.PARAMETER, keys.ACTIVATION)
        names = (DIFFERENCE, RELATIVE, *self._functions)
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
                taken[f"{family}/{name}"] = ProbeSums(sums, _DIFFERENCE, name if family == keys.PARAMETER else None)
        return taken

    def close(self) -> None:
        super().close()
        self._reference_hooks.remove()
        self._outputs = {}


def _shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in ModuleIndex([("", model)]).parameters().items()}
