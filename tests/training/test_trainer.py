"""One update: the same in the benchmark as in the loop, and a GPU that never waits for the host but for its numbers."""

import warnings
from pathlib import Path

import pytest
import torch

from m2s.benchmark.train import trainer
from m2s.distributed import World
from m2s.training import resolve, train
from m2s.training.build import make_objects
from m2s.training.cuda_graph import CUDAGraphRunner
from m2s.training.loop import Stopper, training_step
from m2s.training.trainer import Trainer
from small_runs import random_rows, small, tensors


def test_the_benchmark_makes_the_updates_of_the_loop(tmp_path):
    config, rows = small(tmp_path / "run", steps=3), random_rows()
    train(config, rows)
    call, model = trainer(resolve(config), rows)
    for _ in range(3):
        call()
    kept = tensors(max((tmp_path / "run" / "state").glob("step-*")))
    for name, weight in model.named_parameters():
        assert torch.equal(weight.detach(), kept[f"model/{name}"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="waiting is for a GPU")
@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize("method", ["m2s", "mdlm", "sedd-absorb"])
def test_an_update_waits_for_nothing_but_its_numbers(tmp_path: Path, method: str, kernels: str, micro_batch: int) -> None:
    """Those come by an event, which is no operation that waits for all that was started."""
    given = {"method": method, "device": "cuda", "kernels": kernels, "compile": "no", "micro_batch": micro_batch, "steps": 20}
    config, rows = resolve(small(tmp_path, **given)), random_rows()
    learner = Trainer(config, rows, World.start("cuda"), *make_objects(config, rows))
    share = learner.share(0)
    for _ in range(6):
        share = training_step(learner, share, Stopper()).following
    assert isinstance(learner.step, CUDAGraphRunner) and learner.step.recorded
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            training_step(learner, share, Stopper())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    assert not waits, "\n".join(f"{wait.filename}:{wait.lineno}" for wait in waits)
