"""A network whose output is NaN or infinite gives an error, not samples."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import m2s
import m2s.hub
from m2s.cli import main
from m2s.errors import UserError
from m2s.heads import NextToken, Shifted
from m2s.models import DiT, DiTConfig

HEADS = {
    "posterior": m2s.Posterior(m2s.Uniform(5, m2s.Linear())),
    "masks": m2s.Posterior(m2s.Absorbing(5, m2s.Linear())),
    "score": m2s.LogScore(m2s.Uniform(5, m2s.Linear())),
    "next token": NextToken(Shifted(5)),
}


def network(value: float, only_call: int | None = None, hidden: bool = False, states: int = 6):
    """Logits 0, with one other value at sample 2, site 3, in all calls or in one."""
    calls = 0

    def model(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor | m2s.Unprojected:
        nonlocal calls
        output = torch.zeros(*x_t.shape, states)
        if only_call in (None, calls):
            output[2, 3, 1] = value
        calls += 1
        return m2s.Unprojected(output, torch.eye(states), None) if hidden else output

    return model


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", HEADS)
def test_every_kind_of_head(kind: str, value: float) -> None:
    with pytest.raises(UserError, match=r"sample 2, site 3 in the (first|last) call is (nan|inf), so nothing can be drawn"):
        m2s.sample(network(value), HEADS[kind], (3, 4), steps=4)


@pytest.mark.parametrize(("call", "name"), [(0, "first"), (4, "last")])
@pytest.mark.parametrize("hidden", [False, True])
def test_first_and_last_call(call: int, name: str, hidden: bool) -> None:
    with pytest.raises(UserError, match=f"in the {name} call is nan"):
        m2s.sample(network(math.nan, call, hidden), HEADS["posterior"], (3, 4), steps=5)


def test_of_a_window_and_of_later_samples() -> None:
    with pytest.raises(UserError, match="sample 18, site 3 in the first call"):
        m2s.sample(network(math.nan), HEADS["posterior"], (3, 8), steps=2, start=16, window=4, overlap=0, micro_batch=16)


def test_what_is_not_drawn_may_be_anything() -> None:
    """Padding rows and columns, clamped sites, and tokens that are ruled out."""
    m2s.sample(network(math.nan), HEADS["posterior"], (2, 4), steps=2)  # row 2 is padding
    clamp = torch.full((3, 4), -1)
    clamp[2, 3] = 0
    m2s.sample(network(math.nan), HEADS["posterior"], (3, 4), steps=2, clamp=clamp)
    m2s.sample(network(-math.inf), HEADS["posterior"], (3, 4), steps=2)

    def padded(x_t: Tensor, t: Tensor) -> Tensor:
        return torch.zeros(*x_t.shape, 8).index_fill_(-1, torch.tensor([7]), math.nan)

    m2s.sample(padded, HEADS["posterior"], (3, 4), steps=2)


def test_a_posterior_without_a_token() -> None:
    with pytest.raises(UserError, match="call is -inf"):
        m2s.sample(lambda x_t, t: torch.full((*x_t.shape, 5), -math.inf), HEADS["posterior"], (3, 4), steps=2)


def test_a_network_that_overflows_is_an_error_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finite weights whose output is not finite: nothing is written but the empty folder of shards."""
    model = DiT(DiTConfig(5, width=8, depth=1, heads=2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1e30)
    m2s.hub.save(tmp_path / "run", model, HEADS["posterior"], {"kind": "text", "length": 4})
    with pytest.raises(SystemExit) as stop:
        main(["sample", str(tmp_path / "run"), "--n", "2", "--steps", "2", "--out", str(tmp_path / "a.npz")])
    err = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and "in the first call is nan" in err and not (tmp_path / "a.npz").exists()


def test_scores_that_overflow_are_an_error_and_no_masks_in_the_samples() -> None:
    """Logits of 1e30 are finite, but their exponential is not."""
    head = m2s.LogScore(m2s.Hybrid(2, p_uniform=0.1))
    table = torch.randn(3, 3, generator=torch.Generator().manual_seed(1)) * 1e30
    failed = 0
    for seed in range(20):
        try:
            tokens = m2s.sample(lambda x_t, t: table[x_t], head, (2, 3), steps=2, seed=seed)
            assert tokens.max() < 2
        except ValueError as error:
            failed += "a sample ends with a mask" in str(error)
    assert failed > 0
