"""Fused kernels give the same losses, for every method, number of processes and compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m2s.training import Config, train
from small_runs import losses, random_rows, small, together

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("large_blocks")  # tests/ops/test_adamw.py has the blocks as they are
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = random_rows(length=2)


def short(out: Path, **changes: object) -> Config:
    """A few steps of a few examples: without a GPU the kernels are interpreted. Compilers draw other dropout masks."""
    few = {"steps": 3, "batch": 4, "micro_batch": 2, "log_every": 1, "validate_every": 0, "network__dropout": 0.0}
    return small(out, **{**few, "device": DEVICE, "precision": "float32", "compile": "no", **changes})


@pytest.mark.parametrize("method", ["m2s", "m2s-offset", "sedd", "md4", "gidd", "gidd-clipped", "neural-ctmc", "duo", "ar"])
def test_every_method(tmp_path, method):
    for kernels in ("reference", "fused"):
        # The loss of the second step depends on the gradients of the first and on the optimizer.
        train(short(tmp_path / kernels, method=method, kernels=kernels, steps=2), ROWS)
    assert losses(tmp_path / "fused") == pytest.approx(losses(tmp_path / "reference"), rel=1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="two processes need two GPUs")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes(tmp_path, parallel):
    train(short(tmp_path / "one"), ROWS)
    together(2, short(tmp_path / "two", kernels="fused", parallel=parallel), ROWS)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_recomputed_blocks(tmp_path):
    train(short(tmp_path / "plain"), ROWS)
    train(short(tmp_path / "fused", kernels="fused", recompute=True), ROWS)
    assert losses(tmp_path / "fused") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


COMPILED = """
import functools
import sys
from pathlib import Path
import torch
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from small_runs import together
from test_fused_training import ROWS, short
from m2s.training import train

if __name__ == "__main__":
    out = Path(sys.argv[2])
    compiled = torch.compile
    torch.compile = functools.partial(compiled, backend="aot_eager")  # the same graphs, without C++ code in each process
    together(2, short(out / "sharded", compile="yes", parallel="fsdp", device="cpu"), ROWS)
    torch.compile = compiled
    train(short(out / "fused", compile="yes", kernels="fused"), ROWS)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_compiled_blocks(tmp_path):
    """With fused kernels, as on a GPU by default, and with reference kernels and shards."""
    train(short(tmp_path / "plain"), ROWS)
    # In another process without shape checks, which compilers cannot trace.
    script = tmp_path / "script.py"
    script.write_text(COMPILED)
    command = [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path)]
    apart = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # looks for GPUs without initializing CUDA, before a fork
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=apart)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("fused", "sharded"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
