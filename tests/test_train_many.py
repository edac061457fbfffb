"""Many processes: the same batch, the same curve, the same weights as one."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from small_runs import Rows, losses, outcome, random_rows, small, together

from m2s import Absorbing, Hybrid, Linear, RateMatrix, Uniform
from m2s.report import Refused
from m2s.train import state, train
from m2s.train.noise import corrupt, times
from m2s.train.parallel import World


def weighted_rows() -> Rows:
    """Rows with padding and labels."""
    rows = random_rows().rows
    weight = (torch.arange(4) < 1 + torch.arange(len(rows)).unsqueeze(-1) % 4).float()
    return Rows(rows, 5, weight, torch.arange(len(rows)) % 3)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_and_two_have_the_same_curve_and_weights(tmp_path, parallel):
    changes = {"steps": 20, "log_every": 1, "network__labels": True, "precision": "float32"}
    train(small(tmp_path / "one", **changes), weighted_rows())
    together(2, small(tmp_path / "two", parallel=parallel, **changes), weighted_rows())
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 20
    assert two == pytest.approx(one, rel=1e-6)
    ours, theirs = outcome(tmp_path / "one")["log"][-1], outcome(tmp_path / "two")["log"][-1]
    assert theirs["validation_bits"] == pytest.approx(ours["validation_bits"], rel=1e-5)
    expected, found = (state.read(tmp_path / name / "state", 20).tensors() for name in ("one", "two"))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp"), ("fsdp", "one"), ("one", "fsdp")])
def test_a_state_is_taken_up_by_another_number_of_processes(tmp_path, first, second):
    """Stopped at step 8 by removing what came after."""
    train(small(tmp_path / "whole"), random_rows())

    def go(how: str) -> None:
        if how == "one":
            train(small(tmp_path / "run"), random_rows())
        else:
            together(2, small(tmp_path / "run", parallel=how), random_rows())

    go(first)
    newest = tmp_path / "run" / "state" / "step-00000012"
    (newest / "state.json").unlink()
    go(second)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def test_activations_computed_again_change_nothing(tmp_path):
    train(small(tmp_path / "one"), random_rows())
    train(small(tmp_path / "two", recompute=True), random_rows())
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    together(2, small(tmp_path / "three", recompute=True, parallel="fsdp"), random_rows())
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_the_noise_of_a_row_does_not_depend_on_who_draws_it():
    rates = torch.rand(5, 5, dtype=torch.float64)
    rates -= torch.diag(rates.sum(-1))
    x_0 = torch.randint(5, (12, 7))
    rows = torch.arange(12)
    whole, weights = times(rows, 12, 3, 8, 1e-3, 1.0)
    for process in (Uniform(5, Linear()), Absorbing(5, Linear()), Hybrid(5, 0.2), RateMatrix(rates, Linear())):
        x_t = corrupt(process, x_0, whole, rows, 3, 8)
        for part in (slice(0, 4), slice(4, 12)):
            t, weight = times(rows[part], 12, 3, 8, 1e-3, 1.0)
            assert torch.equal(t, whole[part]) and torch.equal(weight, weights[part])
            assert torch.equal(corrupt(process, x_0[part], t, rows[part], 3, 8), x_t[part])
    assert not torch.equal(times(rows, 12, 3, 9, 1e-3, 1.0)[0], whole)


def test_a_batch_that_cannot_be_shared_out_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(World, "start", classmethod(lambda cls, device: cls(0, 3, torch.device("cpu"))))
    with pytest.raises(Refused, match="batch is 8, but it must be a multiple of 12"):
        train(small(tmp_path / "run"), random_rows())
    assert not (tmp_path / "run").exists()


SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, {tests!r})
    from small_runs import random_rows, small
    from m2s.train import loop, train

    out = Path({out!r})
    gradient = loop.Learner.gradient

    def dying(learner, share):
        if learner.progress.step == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(7)
        return gradient(learner, share)

    loop.Learner.gradient = dying
    train(small(out, parallel={parallel!r}), random_rows())
"""


@pytest.mark.parametrize("parallel", ["ddp"])
def test_a_rank_that_dies_is_restarted_and_the_run_ends_the_same(tmp_path, parallel):
    train(small(tmp_path / "whole"), random_rows())
    script = tmp_path / "script.py"
    text = SCRIPT.format(tests=os.path.dirname(__file__), out=str(tmp_path / "run"), parallel=parallel)
    script.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on from step 4 of 12" in done.stderr
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert len(json.loads((tmp_path / "run" / "train.json").read_text())["sessions"]) == 2
