"""Run test_gpu.py and test_gpu_regimes.py on a simulated GPU, with the kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_gpu.py has run on it")
def test_what_runs_on_a_gpu_runs_on_a_pretended_one() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", "pretend_gpu", "-p", "no:cacheprovider"]
    suites = [str(HERE / name) for name in ("pretend_suite.py", "test_gpu.py", "test_gpu_regimes.py")]
    result = subprocess.run([*command, *suites], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "the Triton kernels failed" not in result.stdout
