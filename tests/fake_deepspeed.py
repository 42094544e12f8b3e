"""An engine with what the adapter of DeepSpeed reads: ZeRO 0 in one process, or the fragments of ZeRO 1."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients import Chosen
from torch import Tensor, nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch._runtime.sharding import rank, world_size


class Fragment:
    """What DeepSpeed keeps for a parameter of which this rank has a part."""

    def __init__(self, parameter: nn.Parameter, own: slice, gradients: dict[int, list[Tensor] | None]) -> None:
        self.hp_fragment, self.own = parameter.data.view(-1)[own], own
        self.lp_fragment_address = types.SimpleNamespace(start=own.start, numel=own.stop - own.start)
        self.gradient_dict, self.param_group_index = gradients, 0
        self.num_reads = 0

    def get_lp_grad_fragment(self, index: int) -> Tensor:
        self.num_reads += 1
        gradients = self.gradient_dict[0]
        assert gradients is not None
        return gradients[index]


class DeepSpeedZeroOptimizer:
    """Divides all parameters, one after the other, into equal parts, and updates the part of this rank as SGD does."""

    torch_autocast_gradscaler = None
    gradient_accumulation_dtype = torch.float32
    overflow = False

    def __init__(self, optimizer: torch.optim.Optimizer, limit: float, scale: float) -> None:
        self.param_groups, self._limit, self.cur_scale = optimizer.param_groups, limit, scale
        self.bit16_groups = [list(group["params"]) for group in optimizer.param_groups]
        self.averaged_gradients: dict[int, list[Tensor] | None] = {0: None}
        self._global_grad_norm: Tensor | None = None
        self._fragments: list[Fragment] = []
        num_elements, offset = sum(one.numel() for one in self.bit16_groups[0]), 0
        part = -(-num_elements // world_size())
        for parameter in self.bit16_groups[0]:
            begin = max(part * rank() - offset, 0)
            own = slice(begin, min(part * (rank() + 1) - offset, parameter.numel()))
            parameter._dp_group = dist.group.WORLD if world_size() > 1 else None
            parameter._hp_mapping = None
            if own.start < own.stop:
                parameter._index_in_param_group = len(self._fragments)
                parameter._hp_mapping = Fragment(parameter, own, self.averaged_gradients)
                self._fragments.append(parameter._hp_mapping)
            offset += parameter.numel()

    def scale_if_loss(self, loss: Tensor) -> Tensor:
        return loss * self.cur_scale

    def reduce(self) -> None:
        """Average, and keep the gradients of this rank's part, as at the end of the last backward before an update."""
        self.averaged_gradients[0] = []
        for one in self.bit16_groups[0]:
            gradient, one.grad = one.grad.view(-1) / world_size(), None
            if world_size() > 1:
                dist.all_reduce(gradient)
            if one._hp_mapping is not None:
                self.averaged_gradients[0].append(gradient[one._hp_mapping.own])

    def step(self) -> None:
        gradients = self.averaged_gradients[0]
        assert gradients is not None
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        if world_size() > 1:
            dist.all_reduce(squares)
        self._global_grad_norm = norm = squares.sqrt() / self.cur_scale
        self.overflow = not norm.isfinite()
        if not self.overflow:
            divisor = self.cur_scale * max(float(norm) / self._limit, 1.0) if self._limit else self.cur_scale
            for fragment, gradient in zip(self._fragments, gradients, strict=True):
                fragment.hp_fragment -= self.param_groups[0]["lr"] * gradient / divisor
            for parameter in self.bit16_groups[0] if world_size() > 1 else ():
                whole = torch.zeros_like(parameter.data.view(-1))
                if parameter._hp_mapping is not None:
                    whole[parameter._hp_mapping.own] = parameter._hp_mapping.hp_fragment
                dist.all_reduce(whole)
                parameter.data.view(-1).copy_(whole)
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
        if not self._stage:
            self.optimizer.zero_grad()
        self._step_applied = not getattr(self.optimizer, "overflow", False)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package find this engine where it looks for DeepSpeed's."""
    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = DeepSpeedEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)


def measured(rank: int, world: int, *, limit: float) -> dict[str, Any]:
    """Train three steps with and without watch() on every rank: parameter `b` is on both, `a` and `c` on one each."""
    found: dict[str, Any] = {}
    for watched in (False, True):
        engine, sink = DeepSpeedEngine(Chosen(a=3, b=4, c=1), limit=limit), MemorySink()
        with pytest.MonkeyPatch.context() as patch:
            install(patch)
            watcher = wandb_gradwatch.watch(engine, sinks=[sink], sample_every=1, log_every=3) if watched else None
            for step in range(3):
                # The average over the ranks: 2, on all elements of a and c, and 4 on those of b
                size = 4.0 * rank * (step + 1)
                engine.backward(engine.module.loss(a=[size] * 3, b=[2 * size] * 4, c=[size]))
                engine.step()
        if watcher is not None:
            watcher.remove()
        found[f"parameters, {watched}"] = [parameter.tolist() for parameter in engine.module.parameters()]
    snapshot = sink.merged()
    assert snapshot is not None
    return found | {
        "steps": snapshot.steps.tolist(),
        "norms": snapshot.grad_norm.tolist(),
        "received": snapshot.total_grad_norm_clipped.tolist(),
        "elements": snapshot.num_elements[-1].tolist(),
        "parameter norms": snapshot.param_norm.tolist(),
    }
