"""The projection: definition, Newton's method in torch and the kernel, each against the other in float64.

On a GPU where there is one, in Triton's interpreter elsewhere. tests/realizability/test_projection.py checks the torch version
against the optimality conditions and an active-set solver. A float32 score s is exact; mu = (s - sigma)/b is then rounded a few
times at a size of 1. The exponential of a log-score is accurate to two ulp, in units of b: 1e-6 max(1, s/b).
"""

import itertools

import pytest
import torch
from test_projection import GPT2, KINDS, RANK_ONE, kkt_residual, scores
from torch import Tensor

import m2s
from m2s.ops import use_backend
from m2s.ops.project import naive, nearest_posterior
from m2s.ops.project.cpu import nearest_posterior as reference
from m2s.process import SiteCoefficients

triton = pytest.importorskip("triton")

from m2s.ops.project.triton import nearest_posterior as with_passes  # noqa: E402
from m2s.ops.project.triton import threshold  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JUNK = (float("nan"), float("inf"), -float("inf"), 1e30)


def sites(process: m2s.Process, count: int, t: float) -> tuple[Tensor, Tensor, SiteCoefficients]:
    """Current tokens of every kind (first, last, mask, any), their times and scalars."""
    x_t = torch.randint(process.states, (count,), generator=torch.Generator().manual_seed(count))
    x_t[-1], x_t[0] = 0, process.states - 1
    times = torch.full((count,), t, dtype=torch.float64)
    return x_t, times, process.at(x_t, times)


def padded(score: Tensor, x_t: Tensor) -> Tensor:
    """The rows with junk in columns past the vocabulary and at the current token: both must be ignored."""
    junk = torch.tensor(JUNK, dtype=score.dtype).repeat(len(score), 2)[:, :5]
    at_k = torch.tensor(JUNK, dtype=score.dtype).repeat(len(score))[: len(score)]
    return torch.cat([score.scatter(-1, x_t.unsqueeze(-1), at_k.unsqueeze(-1)), junk], -1)


def kernel(rows: Tensor, x_t: Tensor, site: SiteCoefficients, process: m2s.Process, log: bool = False) -> Tensor:
    """mu by the kernel."""
    with use_backend("fused"):
        moved = SiteCoefficients(*(value.to(DEVICE) for value in site))
        return nearest_posterior(rows.to(DEVICE), x_t.to(DEVICE), moved, process.states, process.mask, log).cpu()


def assert_equals_reference(rows: Tensor, x_t: Tensor, site: SiteCoefficients, process: m2s.Process, log: bool) -> None:
    """The kernel agrees with torch in float64."""
    mu = kernel(padded(rows, x_t), x_t, site, process, log)
    expected = reference(rows.double(), x_t, site, process.states, process.mask, log)
    bound = 1e-12 if rows.dtype == torch.float64 else 1e-6
    tolerance = torch.full((len(rows), 1), bound)
    if log:
        largest = rows.double()[:, : process.vocab].scatter(-1, x_t.clamp(max=process.vocab - 1).unsqueeze(-1), -torch.inf)
        tolerance = tolerance * torch.clamp(largest.amax(-1, keepdim=True).exp() * (site.m_k / site.alpha).unsqueeze(-1), min=1)
    assert mu.dtype == rows.dtype and (mu >= 0).all()
    assert ((mu.double() - expected).abs() <= tolerance).all(), float(((mu.double() - expected).abs() / tolerance).max())
    assert ((mu.double().sum(-1) - 1).abs() <= bound).all()


@pytest.mark.parametrize("vocab", [2, 3, 257])
@pytest.mark.parametrize("name", RANK_ONE)
def test_kernel_equals_torch(name: str, vocab: int) -> None:
    """All kinds of scores, times and current tokens in one batch, some of them as log-scores."""
    process = RANK_ONE[name](vocab)
    for log, kinds in ((False, KINDS), (True, ["peaked", "log-normal", "far below the box"])):
        parts = []
        for i, (kind, t) in enumerate(itertools.product(kinds, (1e-3, 0.5, 0.95, 0.999))):
            x_t, times, site = sites(process, 3, t)
            at = slice(i % 3, i % 3 + 1)
            parts.append((scores(kind, process, x_t, times)[at], x_t[at], *(value[at] for value in site)))
        score, x_t, *scalars = (torch.cat(values) for values in zip(*parts, strict=True))
        assert_equals_reference(
            (score.clamp(min=1e-30).log() if log else score).float(), x_t, SiteCoefficients(*scalars), process, log
        )


@pytest.mark.parametrize("name", RANK_ONE)
def test_kernel_equals_torch_in_float64(name: str) -> None:
    process = RANK_ONE[name](1001)
    for kind in ("peaked", "realizable", "log-normal", "inactive", "active"):
        x_t, times, site = sites(process, 3, 0.7)
        score = scores(kind, process, x_t, times)
        assert_equals_reference(score, x_t, site, process, log=False)
        assert_equals_reference(score[:1].log(), x_t[:1], SiteCoefficients(*(value[:1] for value in site)), process, log=True)


@pytest.mark.parametrize("name", RANK_ONE)
def test_many_candidates_per_lane(name: str) -> None:
    """Blocks far shorter than the row: the start is only near, and Newton's method has to climb."""
    process = RANK_ONE[name](1001)
    most = 0
    for kind in KINDS:
        x_t, times, site = sites(process, 2, 0.8)
        score = scores(kind, process, x_t, times).float()
        on_device = SiteCoefficients(*(value.to(DEVICE) for value in site))
        expected = reference(score.double(), x_t, site, process.states, process.mask, False)
        for held, rest in ((1, 1), (4, 2)):  # little of the row in registers, and some of it
            shape = {"block": 64, "held": held, "rest": rest, "warps": 4}
            given = (score.to(DEVICE), x_t.to(DEVICE), on_device, process.states, process.mask, False)
            mu, passes = with_passes(*given, **shape)
            assert ((mu.cpu() - expected).abs() < 1e-6).all() and ((mu.double().sum(-1) - 1).abs() < 1e-6).all()
            most = max(most, int(passes.max()))
    assert 1 <= most <= 6


@pytest.mark.parametrize("kind", ["peaked", "flat", "inactive", "log-normal", "far above the box"])
@pytest.mark.parametrize("t", [0.1, 0.9])
def test_optimality_and_passes_for_gpt2_vocabulary(t: float, kind: str) -> None:
    """Optimality conditions, and the number of passes of Newton's method, with several candidates per lane."""
    process = m2s.Uniform(GPT2, m2s.Linear())
    x_t = torch.tensor([12_345])
    times = torch.full((1,), t, dtype=torch.float64)
    score = scores(kind, process, x_t, times).float()
    site = SiteCoefficients(*(value.to(DEVICE) for value in process.at(x_t, times)))
    mu, passes = with_passes(score.to(DEVICE), x_t.to(DEVICE), site, GPT2, None, False)
    assert kkt_residual(mu.cpu(), score, x_t, times, GPT2) < 1e-6
    assert int(passes.max()) <= 5
    alone, _ = with_passes(score.log().to(DEVICE), x_t.to(DEVICE), site, GPT2, None, True, block=1024, held=4, warps=4)
    torch.testing.assert_close(alone, mu, rtol=0, atol=1e-6)


def test_non_finite_scores_give_nan() -> None:
    """A row with NaN or infinity among its candidates has no projection; its neighbors keep theirs."""
    process = m2s.Uniform(70, m2s.Linear())
    x_t, times, site = sites(process, 3, 0.5)
    score = scores("log-normal", process, x_t, times).float()
    plain = kernel(score, x_t, site, process)
    for value in (float("nan"), float("inf")):
        for log in (False, True):
            broken = score.log() if log else score.clone()
            broken[1, 30] = value
            mu = kernel(broken, x_t, site, process, log)
            assert mu[1, 30].isnan() and not mu[[0, 2]].isnan().any()
            torch.testing.assert_close(mu[[0, 2]], plain[[0, 2]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RANK_ONE)
def test_log_scores_above_the_range_of_the_dtype(name: str) -> None:
    """The greatest one has all of the posterior."""
    process = RANK_ONE[name](70)
    x_t, _, site = sites(process, 3, 0.5)
    rows = torch.randn(3, process.states)
    rows[:, 5] = torch.tensor([90.0, 800.0, 1e30])
    for dtype in (torch.float32, torch.float64):
        found = kernel(rows.to(dtype), x_t, site, process, True)
        expected = reference(rows.to(dtype), x_t, site, process.states, process.mask, True)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert ((found[:, 5] == 1) | (found.gather(-1, x_t.unsqueeze(-1)).squeeze(-1) == 1)).all()


def test_ties_huge_scores_and_zero_scores() -> None:
    process = m2s.Uniform(6, m2s.Linear())
    x_t, times = torch.tensor([0, 0, 3]), torch.full((3,), 0.5, dtype=torch.float64)
    score = torch.tensor([[1.0, 1e30, 1e30, 2.0, 0.0, 1.0], [2.0] * 6, [0.0] * 6])
    mu = kernel(score, x_t, process.at(x_t, times), process)
    torch.testing.assert_close(mu[0], torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0, 0.0]))
    assert (mu[1, 1:] == mu[1, 1]).all() and abs(float(mu[1].sum()) - 1) < 1e-6
    assert torch.equal(mu[2], torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]))


def test_rows_are_independent() -> None:
    """A row has the same bits alone, among others, and with other strides."""
    process = m2s.Hybrid(300, p_uniform=0.2)
    x_t, times, site = sites(process, 7, 0.6)
    rows = scores("log-normal", process, x_t, times).float()
    together = kernel(rows, x_t, site, process)
    for i in range(7):
        at = slice(i, i + 1)
        assert torch.equal(kernel(rows[at], x_t[at], SiteCoefficients(*(value[at] for value in site)), process), together[at])
    strided = rows.t().contiguous().t()
    assert torch.equal(kernel(strided, x_t, site, process), together)
    assert kernel(rows[:0], x_t[:0], SiteCoefficients(*(value[:0] for value in site)), process).shape == (0, 301)


@pytest.mark.parametrize("make_head", [m2s.LogScore, m2s.FactorizedRate])
def test_project_and_projected_use_the_kernel(make_head: type[m2s.Head]) -> None:
    """m2s.project and m2s.Projected agree on both backends."""
    process = m2s.Hybrid(90, p_uniform=0.3)
    head = make_head(process)
    x_t, t = torch.tensor([[0, 90], [89, 4]], device=DEVICE), torch.tensor([0.3, 0.8], device=DEVICE)
    output = torch.randn(2, 2, process.states + 4).to(DEVICE)
    score = head.log_score(output, x_t, t).exp()
    results = {}
    for which in ("fused", "reference"):
        with use_backend(which):
            asked = (
                getattr(m2s.Projected(head), method)(output, x_t, t).exp() for method in ("posterior", "log_score", "last_step")
            )
            results[which] = [m2s.project(score, x_t, t, process), *asked]
    for ours, theirs in zip(results["fused"], results["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_hidden_states_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projected computes the logits of hidden states in chunks, with the same result."""
    from m2s.ops import last_layer_chunks
    from m2s.realizability import head as module

    process = m2s.Hybrid(40, p_uniform=0.3)
    x_t, t = torch.arange(35).reshape(5, 7).to(DEVICE), torch.linspace(0.1, 0.9, 5).to(DEVICE)
    output = m2s.Unprojected(*(torch.randn(shape).to(DEVICE).requires_grad_() for shape in ((5, 7, 8), (46, 8), (46,))))
    largest = []
    multiply = last_layer_chunks.Layer.logits
    monkeypatch.setattr(
        last_layer_chunks.Layer, "logits", lambda self, at: largest.append(len(multiply(self, at))) or multiply(self, at)
    )
    for head in (m2s.LogScore(process), m2s.FactorizedRate(process)):
        projected = m2s.Projected(head)
        for method in ("posterior", "posterior_logits", "log_score", "last_step"):
            at_once = getattr(projected, method)(output, x_t, t)
            assert not largest  # so few logits need no chunks
            with monkeypatch.context() as patch, torch.no_grad():  # chunks have no gradient
                patch.setattr(last_layer_chunks, "CHUNK", 46 * 4)
                patch.setattr(module, "CHUNK", 46 * 4)
                in_chunks = getattr(projected, method)(output, x_t, t)
            assert in_chunks.shape == at_once.shape and max(largest) == 4 and sum(largest) == 35
            torch.testing.assert_close(in_chunks.exp(), at_once.exp(), rtol=1e-4, atol=1e-5)
            largest.clear()


@pytest.mark.parametrize("vocab", [2, 3, 17, 300])
@pytest.mark.parametrize("name", RANK_ONE)
def test_naive_equals_newton(name: str, vocab: int) -> None:
    """The definition by sorting and Newton's method agree in float64."""
    process = RANK_ONE[name](vocab)
    for kind, t in itertools.product(KINDS, (1e-3, 0.5, 0.95)):
        x_t, times, site = sites(process, 4, t)
        score = scores(kind, process, x_t, times)
        expected = naive.nearest_posterior(score, x_t, site, process.mask)
        found = reference(score, x_t, site, process.states, process.mask, False)
        # mu is a difference of scores divided by b: rounding of the scores counts in units of b
        size = 1 + score.abs().amax(-1, keepdim=True) * (site.m_k / site.alpha).unsqueeze(-1)
        assert ((found - expected).abs() <= 1e-12 * size).all(), (kind, t)


@pytest.mark.parametrize("name", RANK_ONE)
def test_threshold_determines_the_projection(name: str) -> None:
    """mu_y = [s_y - sigma]_+ / b of the definition, from scores and log-scores of both precisions."""
    process = RANK_ONE[name](1001)
    for kind in ("peaked", "log-normal", "inactive", "active"):
        x_t, times, site = sites(process, 4, 0.6)
        score = scores(kind, process, x_t, times).clamp(min=1e-30)
        clean = torch.arange(process.vocab) != x_t.unsqueeze(-1)
        at, b = site.m_k > 0, (site.alpha / site.m_k).unsqueeze(-1)
        for dtype, log in itertools.product((torch.float32, torch.float64), (False, True)):
            rows = (score.log() if log else score).to(dtype)
            exact = rows.double().exp() if log else rows.double()
            moved = SiteCoefficients(*(value.to(DEVICE) for value in site))
            given = (padded(rows, x_t).to(DEVICE), x_t.to(DEVICE), moved, process.states, process.mask, log)
            sigma = threshold(*given).cpu()
            mu = (exact[:, : process.vocab] - sigma.unsqueeze(-1)).relu() / b * clean
            expected = naive.nearest_posterior(exact, x_t, site, process.mask)[:, : process.vocab] * clean
            bound = (1e-12 if dtype == torch.float64 else 1e-6) * (1 + exact.amax(-1, keepdim=True) / b)
            assert sigma.dtype == torch.float64 and ((mu - expected).abs() <= bound)[at].all()
            assert sigma[~at].isposinf().all()
