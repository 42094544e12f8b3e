"""Preload the fork server of processes.py: import packages that take seconds to import, and compile the CPU loops."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from importlib import import_module

from wandb_gradwatch._measure.measure import compile_for_cpu

MODULES = [
    *["numba", "wandb", "torch._dynamo"],  # dynamo: the first optimizer of a process imports it
    *["torch.distributed.fsdp", "torch.distributed.tensor.parallel"],
    *["accelerate", "ignite.engine", "lightning.pytorch", "transformers.trainer"],
]
for name in MODULES:
    with suppress(ImportError):
        import_module(name)
with suppress(RuntimeError):  # raised without numba
    compile_for_cpu("compiled")
sys.stdout.flush()  # otherwise each forked process would print the buffered output of the imports again
gc.collect()
gc.freeze()  # otherwise a garbage collection in a forked process would copy all of this memory
