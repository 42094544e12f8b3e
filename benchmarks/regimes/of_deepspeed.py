"""Regimes of DeepSpeed. Its compiled operations are left out: it trains with torch's optimizers on the CPU."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch import nn

from . import BATCH, CLIP, LEARNING_RATE, Training, batch, loss_of, regime, whole

_MICRO_BATCHES = 2
_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}}
_BF16 = {"bf16": {"enabled": True}}


def _import(rank: int, world: int) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(world), "WORLD_SIZE": str(world)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would need a compiler
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # it is slow there, not impossible
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def _config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": BATCH // _MICRO_BATCHES,
        "gradient_accumulation_steps": _MICRO_BATCHES,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **more,
    }


def _engine(rank: int, world: int, *, stage: int, precision: str, more: dict[str, Any]) -> Training:
    deepspeed = _import(rank, world)
    model = whole().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(stage, **more))[0]

    def backward(step: int) -> None:
        for number, tokens in enumerate(batch(step, [rank]).chunk(_MICRO_BATCHES), start=1):
            engine.backward(loss_of(engine(tokens).float(), tokens))
            if number < _MICRO_BATCHES:
                engine.step()

    return Training(engine, backward, update=engine.step, precision=precision)


for _stage in range(4):
    for _name, _precision, _more in (
        ("", "float32", {}),
        (", bfloat16", "bfloat16", _BF16),
        (", bfloat16, sums in float32", "bfloat16", _BF16 | _FP32_SUMS),
        (", float16", "float16", _FP16),
    ):
        # DeepSpeed refuses the third without ZeRO, and its float16 without ZeRO does not multiply the loss by the scale
        # by which it divides the gradients.
        if _stage or _name in ("", ", bfloat16"):
            regime(f"DeepSpeed, ZeRO {_stage}{_name}")(
                functools.partial(_engine, stage=_stage, precision=_precision, more=_more)
            )


@regime("DeepSpeed, pipeline of 2 stages, ZeRO 1 (2 x 2)", 4)
def pipeline(rank: int, world: int) -> Training:
    deepspeed = _import(rank, world)
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(
        layers=list(whole().float().children()), num_stages=2, loss_fn=loss_of, partition_method="uniform"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    config = _config(1, train_micro_batch_size_per_gpu=BATCH)  # two data-parallel ranks, with the batches of four
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    replica = engine.grid.get_data_parallel_rank()

    layers = [name for name, _ in whole().named_children()]

    def rename(name: str) -> str:
        number, _, key = name.partition(".")
        return f"{layers[int(number)]}.{key}"

    def backward(step: int) -> None:
        chunks = [batch(step, [_MICRO_BATCHES * replica + number]) for number in range(_MICRO_BATCHES)]
        engine.train_batch(data_iter=iter([(tokens, tokens) for tokens in chunks]))

    return Training(engine, backward, update=lambda: None, precision="float32", rename=rename)


@regime("DeepSpeed, ZeRO 2, through Accelerate")
def accelerate(rank: int, world: int) -> Training:
    _import(rank, world)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    config = _config(2, zero_force_ds_cpu_optimizer=False)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=_MICRO_BATCHES
    )
    plain: nn.Module = whole().float()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE, foreach=False)
    model, optimizer = accelerator.prepare(plain, optimizer)

    def backward(step: int) -> None:
        for tokens in batch(step, [rank]).chunk(_MICRO_BATCHES):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(tokens), tokens))
                optimizer.step()
                optimizer.zero_grad()

    return Training(model, backward, update=lambda: None, precision="float32")
