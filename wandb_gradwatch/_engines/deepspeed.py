"""DeepSpeed: ZeRO 0 to 3, its optimizers for float16 and bfloat16, and its pipelines.

Where the averaged gradient is when an update begins:

    ZeRO 0         `param.grad`, whole, as the engine's backward has left it
    ZeRO 1 and 2   `averaged_gradients` of the optimizer: `param._hp_mapping` tells which of them, and is None on ranks
                   that hold no part. With the bfloat16 optimizer it is the whole gradient.
    ZeRO 3         `averaged_gradients`, one for each parameter of a sub-group, padded to a multiple of the ranks
"""

import gc
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .engine import Engine, Function, Held, Outcome, Settings
from .mesh import fragment, mesh_of

_EPSILON: Final = 1e-6  # DeepSpeed adds it to the norm
_INSTEAD: Final = "or log engine.get_global_grad_norm() instead"


def engines_that_train(model: nn.Module) -> list[Any]:
    """Return the engines of DeepSpeed that are this model, or train it or a module that contains it."""
    cls = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    if cls is None:
        return []
    if isinstance(model, cls):
        return [model]
    engines = [one for one in gc.get_objects() if issubclass(type(one), cls)]
    return [one for one in engines if any(model is module for module in one.module.modules())]


def refusal(engine: Any) -> str | None:
    """Return why the gradients of this engine cannot be measured, and what to do; None: they can be."""
    optimizer = engine.optimizer
    averages = engine.pipeline_enable_backward_allreduce if _is_pipeline(engine) else engine.enable_backward_allreduce
    offloads = any(getattr(optimizer, name, False) for name in ("cpu_offload", "offload_optimizer", "offload_param"))
    scales = getattr(optimizer, "torch_autocast_gradscaler", None) or getattr(
        engine, "torch_autocast_z0_gradscaler", None
    )
    compiles = getattr(type(engine), "is_deepcompile_enabled", lambda _: False)(engine)
    for is_so, what, remedy in (
        (not hasattr(optimizer, "param_groups"), "has no optimizer", "give one to deepspeed.initialize()"),
        (engine.has_moe_layers, "has layers of experts", "train them with torch's own parallelism"),
        (offloads, "offloads its optimizer", "leave offload_optimizer and offload_param out of its configuration"),
        (scales, "scales the loss by torch's GradScaler", 'use "fp16" in its configuration'),
        (getattr(engine, "zenflow", False), "uses ZenFlow", 'leave "zenflow" out of its configuration'),
        (compiles, "uses DeepCompile", 'leave "deepcompile" out of its configuration'),
        (not averages, "averages gradients inside its optimizer", "use an optimizer that does not compress them"),
        (_num_tensor_parallel(engine.mpu) > 1, "uses tensor parallelism", "use that of torch, with fully_shard"),
    ):
        if is_so:
            return f"a model whose DeepSpeed engine {what} cannot be watched: {remedy}, {_INSTEAD}"
    return None


def _is_pipeline(engine: Any) -> bool:
    return any(cls.__name__ == "PipelineEngine" for cls in type(engine).__mro__)


def _num_tensor_parallel(mpu: Any) -> int:
    names = ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size", "get_model_parallel_world_size")
    known = (getattr(mpu, name) for name in names if hasattr(mpu, name))
    return int(next(known, lambda: 1)())


class DeepSpeed(Engine):
    """A model under an engine of DeepSpeed, all of it or one of its modules."""

    name = "DeepSpeed"

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self._engine, self._model, self._optimizer = engine, model, engine.optimizer
        kind = {cls.__name__ for cls in type(self._optimizer).__mro__}
        self.clips = engine.gradient_clipping() > 0
        # The engine itself clips, without keeping the norm. In a pipeline the norm is an average over the stages.
        is_plain = not (engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())
        self._needs_norm = self.clips and is_plain and not _is_pipeline(engine)
        self._is_zero_3 = "DeepSpeedZeroOptimizer_Stage3" in kind
        self._is_bf16 = "BF16_Optimizer" in kind
        self._is_unfused = "FP16_UnfusedOptimizer" in kind
        self._is_zero_1_or_2 = "DeepSpeedZeroOptimizer" in kind
        # The engine multiplies the loss for these optimizers only. The others divide the gradients all the same.
        self.scales = engine.fp16_enabled() and hasattr(self._optimizer, "scale_if_loss")
        self.step = Function(engine, "_take_model_step")  # the part of `step` that is made once per update
        self.backward = Function(engine, "backward")
        self._norm: Tensor | None = None  # of all gradients of a measured step, where the engine does not keep it
        # By the id of a parameter, ZeRO 3: its group of sub-group and its place there
        self._places: dict[int, tuple[int, int]] = {}
        if self._is_zero_3:
            self._places = {
                id(one): (number, place)
                for number, group in enumerate(self._optimizer.fp16_groups)
                for place, one in enumerate(group)
            }

    def held(self) -> list[Held]:
        return [
            self._held(name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad
        ]

    def _held(self, name: str, parameter: Any) -> Held:
        if self._is_zero_3:
            shape, group = tuple(parameter.ds_shape), parameter.ds_process_group
        elif hasattr(parameter, "_hp_mapping"):
            shape, group = tuple(parameter.shape), parameter._dp_group
        else:
            return Held(name, parameter, tuple(parameter.shape))
        mesh = mesh_of(group, device=parameter.device)
        return Held(name, parameter, shape, mesh, () if mesh is None else (fragment(),))

    def values(self, one: Held) -> Tensor:
        parameter: Any = one.parameter
        found: Tensor
        if self._is_zero_3:
            group, begin, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            masters = self._optimizer.fp32_partitioned_groups_flat[group]
            is_wide = masters.dtype == self._gradient_dtype(parameter)
            found = masters[begin:] if is_wide else parameter.ds_tensor.view(-1)
            return found[: self._size(parameter)]
        if not hasattr(parameter, "_hp_mapping"):
            return one.parameter.data
        part, dtype = parameter._hp_mapping, self._gradient_dtype(parameter)
        if part is None:
            return one.parameter.new_empty(0, dtype=dtype)
        found = part.hp_fragment if part.hp_fragment.dtype == dtype else _slice(part, parameter.data)
        return found

    def gradient(self, one: Held) -> Tensor | None:
        parameter: Any = one.parameter
        found: Tensor
        if self._is_zero_3:
            group, place = self._places.get(id(parameter), (-1, -1))
            if (gradients := self._optimizer.averaged_gradients.get(group)) is None:
                return None
            found = gradients[place]
            return found.view(-1)[: self._size(parameter)]
        if not hasattr(parameter, "_hp_mapping"):
            return one.parameter.grad
        if (part := parameter._hp_mapping) is None:
            return one.parameter.new_empty(0, dtype=self._gradient_dtype(parameter))
        if part.gradient_dict.get(part.param_group_index) is None:
            return None
        found = part.get_lp_grad_fragment(parameter._index_in_param_group)
        return _slice(part, found) if self._is_bf16 else found.view(-1)

    def _gradient_dtype(self, parameter: Any) -> torch.dtype:
        name = "grad_acc_dtype" if self._is_bf16 else "gradient_accumulation_dtype"
        found: torch.dtype = getattr(self._optimizer, name, parameter.dtype)
        return found

    def _size(self, parameter: Any) -> int:
        """Return the number of elements that this rank holds, without the padding of ZeRO 3."""
        size, rank = parameter.ds_tensor.numel(), dist.get_rank(parameter.ds_process_group)
        return max(0, min(int(size), int(parameter.ds_numel) - rank * int(size)))

    def see(self, gradients: Sequence[Tensor]) -> None:
        if self._needs_norm:
            self._norm = nn.utils.get_total_norm(gradients)

    def groups(self, held: Sequence[Held]) -> list[tuple[Settings, list[Held]]]:
        optimizer = self._optimizer
        settings = optimizer.param_groups
        names = ("bit16_groups", "bf16_groups", "fp16_groups")
        of_groups = next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), None)
        if of_groups is None:
            of_groups = [group["params"] for group in settings]
        elif self._is_zero_3:
            settings = [settings[optimizer.sub_group_to_group_id[number]] for number in range(len(of_groups))]
        held_of = {id(one.parameter): one for one in held}
        found = [[held_of[id(p)] for p in group if id(p) in held_of] for group in of_groups]
        return [(given, some) for given, some in zip(settings, found, strict=True) if some]

    def loss_scale(self) -> float | Tensor:
        return self._divisor() if self.scales else 1.0

    def _divisor(self) -> float:
        """Return the scale by which the optimizer divides the gradients."""
        for owner in (getattr(self._optimizer, "loss_scale_config", None), self._optimizer):
            if (scale := getattr(owner, "cur_scale", None)) is not None:
                return float(scale)
        return 1.0

    def outcome(self, result: Any, loss_scale: float | Tensor) -> Outcome:
        if not self._engine.was_step_applied():
            # Without a loss scale, which overflows now and then, NaN and Inf are a fault of the training.
            return Outcome(is_skipped=self.scales)
        # The gradients are divided by the scale that is in use after the step: in the step at which it grows, by more
        # than they were multiplied by.
        scale, limit = self._divisor(), self._engine.gradient_clipping()
        factor = loss_scale / scale
        if not self.clips:
            return Outcome(factor=factor)
        norm, self._norm = self._unscaled_norm(loss_scale, scale), None
        if norm is None:
            return Outcome(factor=None)
        excess = (norm + _EPSILON) / limit
        if not isinstance(excess, Tensor):
            return Outcome(factor=factor / max(excess, 1.0))
        # A norm of NaN or Inf is negative in DeepSpeed, and taken for infinite.
        return Outcome(factor=factor / torch.where(norm < 0, math.inf, excess).clamp(min=1.0))

    def _unscaled_norm(self, before: float | Tensor, after: float | Tensor) -> Any:
        """Return the norm that DeepSpeed limits: that of the gradients divided by the scale `after` the step."""
        if self._norm is not None:
            return self._norm
        norm = self._engine.get_global_grad_norm()
        if norm is None:
            return None
        if self._is_unfused:
            return norm / after
        return norm * before / after if self._is_zero_1_or_2 else norm  # these divide it by the scale before the step

    def loss_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
        given = dict(zip(("loss", "retain_graph", "scale_wrt_gas"), args, strict=False)) | dict(kwargs)
        return given.get("loss"), not given.get("scale_wrt_gas", True)


def _slice(part: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole parameter or gradient."""
    address = part.lp_fragment_address
    return whole.view(-1).narrow(0, address.start, address.numel)
