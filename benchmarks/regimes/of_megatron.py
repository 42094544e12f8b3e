"""Regimes of Megatron-core. It asks for CUDA in many places, which become the CPU here."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import CLIP, LEARNING_RATE, Training, batch, loss_of, one_process, regime, whole

_MICRO_BATCHES = 2
_EPSILON = 1e-3  # of Adam: with less, an update would be the sign of a gradient that rounding decides


class OnCpu(TorchFunctionMode):
    """Makes tensors for a CUDA device on the CPU, and answers that tensors on the CPU are on a CUDA device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        is_question = function is torch.Tensor.type and len(args) == 1 and not kwargs
        return result.replace("torch.", "torch.cuda.") if is_question else result


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=_EPSILON, weight_decay=0.0)


def _tensor_parallel(config: Any) -> nn.Module:
    """Return the model with two linear layers divided over the ranks of tensor parallelism."""
    from megatron.core.parallel_state import get_tensor_model_parallel_rank
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    model = whole().float()
    full = {"up": model.up, "down": model.down}
    model.up = ColumnParallelLinear(4, 6, config=config, init_method=nn.init.zeros_, bias=True, gather_output=False)
    model.down = RowParallelLinear(
        6, 4, config=config, init_method=nn.init.zeros_, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    own = slice(3 * get_tensor_model_parallel_rank(), 3 * get_tensor_model_parallel_rank() + 3)
    with torch.no_grad():
        model.up.weight.copy_(full["up"].weight[own])
        model.up.bias.copy_(full["up"].bias[own])
        model.down.weight.copy_(full["down"].weight[:, own])
        model.down.bias.copy_(full["down"].bias)
    for layer in (model.up, model.down):  # return their bias, too
        layer.register_forward_hook(lambda module, args, output: output[0])
    return model


def _train(
    rank: int, world: int, *, tensor_parallel: int = 1, is_divided: bool = False, dtype: torch.dtype = torch.float32
) -> Training:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    is_half = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor_parallel,
        gradient_accumulation_fusion=False,
        bf16=is_half,
        params_dtype=dtype,
    )
    on_cpu = OnCpu()
    with on_cpu:
        inner = (_tensor_parallel(config) if tensor_parallel > 1 else whole()).to(dtype)
        averages = DistributedDataParallelConfig(use_distributed_optimizer=is_divided, grad_reduce_in_fp32=True)
        model = DistributedDataParallel(config, averages, inner)
        settings: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": 0.0}
        if is_divided:
            settings = {"optimizer": "adam", "adam_eps": _EPSILON}
        settings |= {"bf16": is_half, "params_dtype": dtype, "use_distributed_optimizer": is_divided}
        optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0, clip_grad=CLIP, **settings), [model]
        )
    replica, num_replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    own = range(replica * world // num_replicas, (replica + 1) * world // num_replicas)

    def backward(step: int) -> None:
        with on_cpu:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            chunks = batch(step, own).chunk(_MICRO_BATCHES)
            for number, tokens in enumerate(chunks, start=1):
                with model.no_sync() if number < _MICRO_BATCHES else contextlib.nullcontext():
                    (loss_of(model(tokens).float(), tokens) / _MICRO_BATCHES).backward()
            finalize_model_grads([model])

    def update() -> None:
        with on_cpu:
            optimizer.step()

    truth = functools.partial(one_process, make=_adam) if is_divided else one_process
    precision = "bfloat16" if is_half else "float32"
    # With tensor parallelism, the first parameter is the same on all ranks, and that of rank 0 is counted.
    bad = 3 if tensor_parallel > 1 else 0
    return Training(model, backward, update=update, truth=truth, precision=precision, bad=bad)


_DIVIDED = {"is_divided": True}
for _name, _world, _options in (
    ("", 2, {}),
    (", bfloat16", 2, {"dtype": torch.bfloat16}),
    (", distributed optimizer", 2, _DIVIDED),
    (", distributed optimizer, bfloat16", 2, _DIVIDED | {"dtype": torch.bfloat16}),
    (", tensor parallel", 2, {"tensor_parallel": 2}),
    (", tensor parallel (2 x 2)", 4, {"tensor_parallel": 2}),
    (", tensor parallel, distributed optimizer (2 x 2)", 4, _DIVIDED | {"tensor_parallel": 2}),
):
    regime(f"Megatron-core{_name}", _world)(functools.partial(_train, **_options))
