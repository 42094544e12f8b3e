"""What the fork server of processes.py has before it forks: packages that take seconds to import, compiled loops."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from importlib import import_module

from wandb_gradwatch._measure.measure import compile_for_cpu

MODULES = [
    *["numba", "wandb", "torch._dynamo"],  # the first optimizer of a process imports dynamo
    *["torch.distributed.fsdp", "torch.distributed.tensor.parallel"],
    *["accelerate", "ignite.engine", "lightning.pytorch", "transformers.trainer"],
]
for name in MODULES:
    with suppress(ImportError):
        import_module(name)
with suppress(RuntimeError):  # without numba
    compile_for_cpu("compiled")
sys.stdout.flush()  # what an import has said is no script's: otherwise each forked process writes it again
gc.collect()
gc.freeze()  # a collection in a forked process would copy all of this memory
