"""An engine with what the adapter of DeepSpeed reads, in one process: ZeRO 0, or the fragments of ZeRO 1."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Fragment:
    """What DeepSpeed keeps for a parameter of which this rank has a part."""

    def __init__(self, parameter: nn.Parameter, gradients: dict[int, list[Tensor] | None]) -> None:
        self.hp_fragment = parameter.data.view(-1)
        self.lp_fragment_address = types.SimpleNamespace(start=0, numel=parameter.numel())
        self.gradient_dict, self.param_group_index = gradients, 0
        self.num_reads = 0

    def get_lp_grad_fragment(self, index: int) -> Tensor:
        self.num_reads += 1
        gradients = self.gradient_dict[0]
        assert gradients is not None
        return gradients[index]


class DeepSpeedZeroOptimizer:
    """Averages, unscales and clips gradients in a list of its own, and then steps."""

    torch_autocast_gradscaler = None
    gradient_accumulation_dtype = torch.float32
    overflow = False

    def __init__(self, optimizer: torch.optim.Optimizer, limit: float, scale: float) -> None:
        self.optimizer, self._limit, self.cur_scale = optimizer, limit, scale
        self.bit16_groups = [list(group["params"]) for group in optimizer.param_groups]
        self.averaged_gradients: dict[int, list[Tensor] | None] = {0: None}
        self._global_grad_norm: Tensor | None = None
        for index, parameter in enumerate(self.bit16_groups[0]):
            parameter._hp_mapping = Fragment(parameter, self.averaged_gradients)
            parameter._index_in_param_group, parameter._dp_group = index, None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def scale_if_loss(self, loss: Tensor) -> Tensor:
        return loss * self.cur_scale

    def reduce(self) -> None:
        """Move the gradients out of `param.grad`, as at the end of the last backward before an update."""
        self.averaged_gradients[0] = [one.grad.view(-1) for one in self.bit16_groups[0]]
        for one in self.bit16_groups[0]:
            one.grad = None

    def step(self) -> None:
        gradients = self.averaged_gradients[0]
        assert gradients is not None
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt() / self.cur_scale
        self._global_grad_norm = norm
        self.overflow = not norm.isfinite()
        if not self.overflow:
            divisor = self.cur_scale * max(float(norm) / self._limit, 1.0) if self._limit else self.cur_scale
            for parameter, gradient in zip(self.bit16_groups[0], gradients, strict=True):
                parameter.grad = (gradient / divisor).view_as(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.averaged_gradients[0] = None


class DeepSpeedEngine(nn.Module):
    """Makes an update after `micro_batches` calls of `step`."""

    has_moe_layers = False
    enable_backward_allreduce = True
    mpu = None

    def __init__(
        self, model: nn.Module, *, limit: float = 0.0, micro_batches: int = 1, stage: int = 1, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.module, self._limit, self._micro_batches = model, limit, micro_batches
        self._stage, self._scale = stage, scale
        self.basic_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.optimizer: Any = self.basic_optimizer
        if stage:
            self.optimizer = DeepSpeedZeroOptimizer(self.basic_optimizer, limit, scale)
        self._num_steps, self._step_applied = 0, False

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def gradient_clipping(self) -> float:
        return self._limit

    def fp16_enabled(self) -> bool:
        return self._scale != 1

    def bfloat16_enabled(self) -> bool:
        return False

    def zero_optimization(self) -> bool:
        return bool(self._stage)

    def get_global_grad_norm(self) -> Any:
        return getattr(self.optimizer, "_global_grad_norm", None)

    def was_step_applied(self) -> bool:
        return self._step_applied

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        loss = loss / self._micro_batches if scale_wrt_gas else loss
        (self.optimizer.scale_if_loss(loss) if self._stage else loss).backward()
        if self._stage and self._is_boundary():
            self.optimizer.reduce()
        return loss

    def _is_boundary(self) -> bool:
        return (self._num_steps + 1) % self._micro_batches == 0

    def step(self) -> None:
        if self._is_boundary():
            self._take_model_step(None)
        self._num_steps += 1

    def _take_model_step(self, lr_kwargs: Any) -> None:
        if not self._stage and self._limit:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._limit)
        self.optimizer.step()
        self.optimizer.zero_grad() if not self._stage else None
        self._step_applied = not getattr(self.optimizer, "overflow", False)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package find this engine where it looks for DeepSpeed's."""
    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = DeepSpeedEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)
