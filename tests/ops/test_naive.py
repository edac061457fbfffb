"""The definitions of the row losses (`naive.py`) against the tuned versions in torch (`cpu.py`), in float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import m2s
from m2s.ops.cross_entropy import cpu as cross_entropy_cpu
from m2s.ops.cross_entropy import naive as cross_entropy_naive
from m2s.ops.factorized_entropy import cpu as factorized_cpu
from m2s.ops.factorized_entropy import naive as factorized_naive
from m2s.ops.posterior_entropy import cpu as posterior_cpu
from m2s.ops.posterior_entropy import naive as posterior_naive
from m2s.ops.score_entropy import cpu as score_cpu
from m2s.ops.score_entropy import naive as score_naive
from m2s.process import RankOne

PROCESSES = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "uniform, log-linear": lambda vocab: m2s.Uniform(vocab, m2s.LogLinear()),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, 0.3),
    "hybrid, masks only": lambda vocab: m2s.Hybrid(vocab, 0.0),
}
VOCABS = [2, 3, 17, 300]


def problem(name: str, vocab: int) -> tuple[RankOne, Tensor, Tensor, Tensor]:
    """A process, clean and noisy tokens, and times across the interval."""
    process = PROCESSES[name](vocab)
    x_0 = torch.randint(vocab, (12, 1))
    t = torch.linspace(0.02, 0.98, 12, dtype=torch.float64)
    return process, x_0.squeeze(-1), process.corrupt(x_0, t).squeeze(-1), t


def with_gradient(loss: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The losses, and the gradient of their weighted sum."""
    weight = torch.linspace(0.5, 2, len(loss), dtype=loss.dtype)
    return loss.detach(), torch.autograd.grad((loss * weight).sum(), leaf)[0]


def assert_agree(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Losses to 1e-11 of their size, gradients to 1e-11 of the norm of their row; the definition cancels a few digits."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-11)
    size = torch.linalg.vector_norm(expected[1], dim=-1).clamp(min=1)
    assert (torch.linalg.vector_norm(found[1] - expected[1], dim=-1) <= 1e-11 * size).all()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", PROCESSES)
def test_posterior_score_entropy(name: str, vocab: int) -> None:
    """Loss and gradient through the bridge, with an offset at the current token and an ignored column."""
    process, x_0, x_t, t = problem(name, vocab)
    logits = (2 * torch.randn(len(x_0), vocab + 1, dtype=torch.float64)).requires_grad_()
    offset = torch.where(x_t == process.vocab, 0, torch.randn(len(x_0), dtype=torch.float64))
    arguments = (logits, offset, x_0, x_t, process.at(x_t, t), process.mask, vocab)
    found, expected = (with_gradient(op.posterior_score_entropy(*arguments), logits) for op in (posterior_cpu, posterior_naive))
    assert_agree(found, expected)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", PROCESSES)
def test_unconstrained_score_entropy(name: str, vocab: int) -> None:
    """Loss and gradient of an unconstrained log-score."""
    process, x_0, x_t, t = problem(name, vocab)
    log_score = torch.randn(len(x_0), process.states, dtype=torch.float64, requires_grad=True)
    arguments = (log_score, x_0, x_t, process.at(x_t, t), process.mask)
    found, expected = (with_gradient(op.unconstrained_score_entropy(*arguments), log_score) for op in (score_cpu, score_naive))
    assert_agree(found, expected)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", PROCESSES)
def test_factorized_score_entropy(name: str, vocab: int) -> None:
    """Loss and gradient of an exit rate and a jump distribution, with two ignored columns."""
    process, x_0, x_t, t = problem(name, vocab)
    site = process.at(x_t, t)
    outputs = torch.randn(len(x_0), process.states, dtype=torch.float64, requires_grad=True)
    expected = with_gradient(factorized_naive.factorized_score_entropy(outputs, x_0, x_t, site, process.mask), outputs)
    scalars = factorized_cpu.row_scalars(x_0, x_t, site, vocab, process.mask)
    weight = torch.linspace(0.5, 2, len(x_0), dtype=torch.float64)
    wide = torch.nn.functional.pad(outputs.detach(), (0, 2), value=torch.nan)
    loss, gradient = factorized_cpu.row_losses(wide, x_t, x_0, scalars, process.mask is not None, vocab, weight, torch.float64)
    assert gradient is not None and (gradient[:, process.states :] == 0).all()
    assert_agree((loss, gradient[:, : process.states]), expected)


@pytest.mark.parametrize("vocab", VOCABS)
def test_cross_entropy(vocab: int) -> None:
    """Loss and gradient of the cross-entropy, with an ignored column."""
    logits = (2 * torch.randn(12, vocab + 1, dtype=torch.float64)).requires_grad_()
    x_t, x_0 = torch.full((12,), vocab), torch.randint(vocab, (12,))
    rate = torch.rand(12, dtype=torch.float64)
    expected = with_gradient(cross_entropy_naive.cross_entropy(logits, x_0, rate, vocab), logits)
    weight = torch.linspace(0.5, 2, 12, dtype=torch.float64)
    loss, gradient = cross_entropy_cpu.row_losses(
        logits.detach(), x_t, x_0, rate.unsqueeze(0), True, vocab, weight, torch.float64
    )
    assert gradient is not None
    assert_agree((loss, gradient), expected)


def test_every_definition_is_short() -> None:
    """`naive.py` is the readable definition of an operation: about 60 lines at most."""
    for path in sorted(Path(m2s.__file__).parent.glob("ops/*/naive.py")):
        assert len(path.read_text().splitlines()) <= 60, path
