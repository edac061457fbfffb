"""The registry of metrics: the built-in n-gram statistics, and one that a plugin adds."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
from m2s.cli import main
from m2s.errors import UserError
from m2s.evaluation import METRICS
from m2s.registry import load_plugin

PLUGIN = '''
from m2s.evaluation import METRICS


@METRICS.register("mean-token")
def mean_token(samples, reference=None, checkpoint=None, **options):
    """The mean token of a sample."""
    means = samples.double().mean(1)
    return {"mean": {"value": float(means.mean()), "error": float(means.std()) / len(means) ** 0.5}}
'''


def test_ngrams_of_known_sequences() -> None:
    samples = torch.tensor([[1, 1, 2, 2], [5, 5, 5, 5], [1, 2, 3, 4]])
    found = METRICS["ngrams"](samples, max_n=2)["samples"]
    assert found["entropy_1"]["value"] == pytest.approx((1 + 0 + 2) / 3)
    assert found["entropy_1"]["error"] == pytest.approx(1 / math.sqrt(3))  # the standard deviation of 1, 0, 2 is 1
    assert found["distinct_1"]["value"] == pytest.approx((2 / 4 + 1 / 4 + 1) / 3)
    # pairs: 11 12 22, 55 55 55 and 12 23 34
    assert found["entropy_2"]["value"] == pytest.approx((math.log2(3) + 0 + math.log2(3)) / 3)
    assert found["distinct_2"]["value"] == pytest.approx((1 + 1 / 3 + 1) / 3)
    assert set(found) == {"entropy_1", "distinct_1", "entropy_2", "distinct_2"}


def test_ngrams_against_a_reference() -> None:
    digits = m2s.data.load("digits")
    found = METRICS["ngrams"](torch.zeros(2, 64, dtype=torch.long), digits.test[:8], max_n=1)
    assert found["samples"]["entropy_1"] == {"value": 0.0, "error": 0.0}
    assert found["reference"]["entropy_1"]["value"] > 1 and json.dumps(found)
    assert METRICS["ngrams"](digits.test[:1])["samples"]["entropy_3"]["error"] is None


def test_ngrams_reject_invalid_input() -> None:
    with pytest.raises(UserError, match="measures samples, but none are given"):
        METRICS["ngrams"](None)
    with pytest.raises(UserError, match=r"max_n is 5, but it must lie in 1\.\.4"):
        METRICS["ngrams"](torch.zeros(2, 4, dtype=torch.long), max_n=5)


@pytest.mark.parametrize(
    "tokens",
    [np.int64(3), np.zeros(4, int), np.zeros((2, 2, 2), int), np.zeros((2, 3)), -np.eye(2, dtype=int), np.zeros((0, 4), int)],
)
def test_arrays_that_are_no_tokens_are_an_error_of_one_line(tokens, tmp_path: Path, capsys) -> None:
    np.savez(tmp_path / "a.npz", tokens=tokens)
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "ngrams", str(tmp_path / "a.npz")])
    assert ended.value.code == 2 and "expected tokens from 0 on, integers [N, L]" in capsys.readouterr().err


def test_a_plugin_adds_a_metric(tmp_path: Path) -> None:
    (tmp_path / "my_metric.py").write_text(PLUGIN)
    load_plugin(tmp_path / "my_metric.py")
    try:
        found = METRICS.find("mean-token")(torch.tensor([[1, 3], [4, 4]]))
        assert found["mean"] == {"value": 3.0, "error": 1.0}
    finally:
        METRICS.remove("mean-token")
    with pytest.raises(UserError, match="there is no metric 'ngram': did you mean ngrams"):
        METRICS.find("ngram")
