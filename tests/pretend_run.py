"""Run a module on the simulated GPUs, with the kernels in Triton's interpreter, or as if Triton were not installed.

TRITON_INTERPRET=1 python -m pretend_run benchmarks.kernel --tiny
python -m pretend_run --without-triton benchmarks --tiny
"""

from __future__ import annotations

import runpy
import sys

import pretend_gpu

if __name__ == "__main__":
    if sys.argv[1] == "--without-triton":
        del sys.argv[1]
        sys.modules["triton"] = None  # type: ignore[assignment]
    pretend_gpu.install()
    del sys.argv[0]
    module = sys.argv[0]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
