"""Megatron-core: gradients are accumulated and averaged in `param.main_grad`, complete when its optimizer steps.

With the distributed optimizer a rank's part of `main_grad` is averaged, and the rest is the rank's own. Parameters that
tensor parallelism has not divided are the same on all of its ranks, and are counted once.
"""

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn

from .engine import Engine, Function, Held, Outcome, Settings
from .mesh import fragment, mesh_of, replicate, shard

_EPSILON: Final = 1e-6  # Megatron-core adds it to the norm
_INSTEAD: Final = "or log the grad_norm that optimizer.step() returns instead"


def has_main_grad(model: nn.Module) -> bool:
    """Return whether gradients of this model are accumulated outside of `param.grad`."""
    return any(getattr(parameter, "main_grad", None) is not None for parameter in model.parameters())


def optimizer_of(model: nn.Module) -> Any:
    """Return the optimizer of Megatron-core that updates this model, the outermost one; None if there is none yet."""
    cls = getattr(sys.modules.get("megatron.core.optimizer.optimizer"), "MegatronOptimizer", None)
    if cls is None:
        return None
    own = set(map(id, model.parameters()))
    found = [one for one in gc.get_objects() if issubclass(type(one), cls)]
    inner = {id(part) for one in found for part in getattr(one, "chained_optimizers", ())}
    updating = (one for one in found if not own.isdisjoint(map(id, _parameters_of(one))))
    return next((one for one in updating if id(one) not in inner), None)


def refusal(model: nn.Module, optimizer: Any) -> str | None:
    """Return why the gradients of this model cannot be measured, and what to do; None: they can be."""
    parameters: list[Any] = list(model.parameters())
    for is_so, what, remedy in (
        (
            optimizer is None,
            "gradients are in parameter.main_grad, but no optimizer of Megatron-core has its parameters,",
            "call watch() after get_megatron_optimizer()",
        ),
        (
            any(not getattr(one, "allreduce", True) for one in parameters),
            "experts are divided over the ranks by Megatron-core",
            "use expert_model_parallel_size=1",
        ),
        (
            any(hasattr(one, "__fsdp_param__") for one in parameters),
            "parameters are sharded by Megatron-FSDP",
            "use fully_shard (FSDP2) of torch",
        ),
    ):
        if is_so:
            return f"a model whose {what} cannot be watched: {remedy}, {_INSTEAD}"
    return None


def _parts_of(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", None) or [optimizer])


def _groups_of(part: Any) -> list[list[Any]]:
    """Return the model's parameters in each group of an optimizer, of the distributed one those with a part here."""
    kinds = [
        names
        for names in (("model_float16_groups", "model_fp32_groups"), ("float16_groups", "fp32_from_fp32_groups"))
        if hasattr(part, names[0])
    ]
    if kinds:
        return [[*some, *more] for some, more in zip(*(getattr(part, name) for name in kinds[0]), strict=True)]
    return [group["params"] for group in part.param_groups]


def _parameters_of(optimizer: Any) -> Iterable[Any]:
    for part in _parts_of(optimizer):
        for buffer in getattr(part, "buffers", ()):  # of the distributed optimizer: with those of other ranks
            yield from buffer.params
        for group in _groups_of(part):
            yield from group


class MegatronCore(Engine):
    """A model whose gradients Megatron-core's DistributedDataParallel averages, and its optimizer."""

    name = "Megatron-core"

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._groups: Any = sys.modules["megatron.core.parallel_state"]
        self.step = Function(optimizer, "step")
        self._limit = optimizer.config.clip_grad
        self.scales = bool(optimizer.config.fp16)
        # By the id of a parameter: the distributed optimizer that divides it over the ranks
        self._divides = {
            id(parameter): part
            for part in _parts_of(optimizer)
            for buffer in getattr(part, "buffers", ())
            for parameter in buffer.params
        }

    def held(self) -> list[Held]:
        found: Iterable[tuple[str, Any]] = self._model.named_parameters()
        # Tied embeddings of two pipeline stages have the same gradient: that of the first stage is counted.
        return [self._held(name, one) for name, one in found if one.requires_grad and not getattr(one, "shared", False)]

    def _held(self, name: str, parameter: Any) -> Held:
        optimizer = self._divides.get(id(parameter))
        is_cut = bool(getattr(parameter, "tensor_model_parallel", False))
        tensor_parallel = self._groups.get_tensor_model_parallel_group()
        shape = list(parameter.shape)
        if is_cut:
            shape[parameter.partition_dim] *= dist.get_world_size(tensor_parallel)
        data_parallel = (
            self._groups.get_data_parallel_group(with_context_parallel=True)
            if optimizer is None
            else optimizer.data_parallel_group
        )
        mesh = mesh_of(data_parallel, tensor_parallel, device=parameter.device)
        if mesh is None or (optimizer is None and not is_cut and mesh.size() == dist.get_world_size()):
            return Held(name, parameter, tuple(shape))
        is_even = optimizer is None and getattr(parameter, "partition_stride", 1) == 1
        cut = shard(parameter.partition_dim) if is_cut and is_even else fragment()
        placements = (replicate() if optimizer is None else fragment(), cut if is_cut else replicate())
        return Held(name, parameter, tuple(shape), mesh, placements)

    def values(self, one: Held) -> Tensor:
        parameter: Any = one.parameter
        main: Tensor | None = getattr(parameter, "main_param", None)  # in float32, or this rank's part of it
        if main is None or main.dtype != parameter.main_grad.dtype:
            return self._part(parameter, parameter.data)
        return main.detach() if id(parameter) not in self._divides else main.detach().view(-1)

    def gradient(self, one: Held) -> Tensor | None:
        parameter: Any = one.parameter
        return self._part(parameter, parameter.main_grad)

    def _part(self, parameter: Any, whole: Tensor) -> Tensor:
        """Return the part of a parameter or gradient that this rank updates."""
        optimizer = self._divides.get(id(parameter))
        if optimizer is None:
            return whole
        if parameter not in optimizer.model_param_gbuf_map:
            return whole.view(-1)[:0]
        own = optimizer._get_model_param_range_map(parameter)["param"]
        return whole.view(-1)[own.start : own.end]

    def groups(self, held: Sequence[Held]) -> list[tuple[Settings, list[Held]]]:
        left = {id(one.parameter): one for one in held}
        found: list[tuple[Settings, list[Held]]] = []
        every: list[Mapping[str, Any]] = []
        for part in _parts_of(self._optimizer):
            every += part.param_groups
            for settings, group in zip(part.param_groups, _groups_of(part), strict=True):
                if some := [left.pop(id(one)) for one in group if id(one) in left]:
                    found.append((settings, some))
        if left:  # other ranks hold them, in groups that are not known here
            shared = {key: value for key, value in every[0].items() if all(one.get(key) is value for one in every)}
            found.append((shared, list(left.values())))
        return found

    def loss_scale(self) -> float | Tensor:
        scale: Tensor = self._optimizer.get_loss_scale()
        return scale.reshape(())

    def outcome(self, result: Any, loss_scale: float | Tensor) -> Outcome:
        is_applied, norm, _ = result
        if not is_applied:
            return Outcome(is_skipped=True)
        if not self._limit > 0 or norm is None:
            return Outcome()
        return Outcome(factor=min(self._limit / (norm + _EPSILON), 1.0))
