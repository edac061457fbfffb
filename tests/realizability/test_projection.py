"""m2s.project against the optimality conditions of the paper's appendix, an active-set solver, and the geometry of a
projection.
"""

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import m2s
from m2s.benchmark.projection import scores as noisy_scores
from m2s.benchmark.setting import Setting

GPT2 = 50_257


def bridge(process: m2s.Process, k: int, t: float) -> tuple[np.ndarray, np.ndarray]:
    """(B over the counted candidates, which candidates are counted) from the kernel and the rates, float64."""
    time = torch.tensor(t, dtype=torch.float64)
    kernel = process.transition_matrix(time).numpy()[: process.vocab]
    counted = process.rates(time).numpy()[:, k] > 0
    counted[k] = False
    with np.errstate(divide="ignore", invalid="ignore"):
        return (kernel / kernel[:, k : k + 1]).T[counted], counted


def active_set(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """argmin |matrix mu - target| over the simplex by Lawson and Hanson's NNLS.

    With C = matrix - target 1^T, the minimizer of |C y|^2 + (sum(y) - 1)^2 over y >= 0 is a multiple of the one of |C mu| over
    the simplex.
    """
    residual = matrix - target[:, None]
    residual = residual / np.abs(residual).max()
    stacked = np.vstack([residual, np.ones(residual.shape[1])])
    right = np.zeros(len(stacked))
    right[-1] = 1.0
    solution, _ = scipy.optimize.nnls(stacked, right, maxiter=100 * stacked.shape[1])
    return solution / solution.sum()


def kkt_residual(mu: Tensor, score: Tensor, x_t: Tensor, t: Tensor, vocab: int) -> float:
    """The worst violation of the appendix's conditions, in units of u, for the uniform process; everything in float64.

    u = [g - theta]_+ / c for one theta, with sum(u) = theta/h <= 1, or sum(u) = 1 and theta >= h.
    """
    mu, score, t = mu.double(), score.double(), t.double().unsqueeze(-1)
    rho = (t / vocab) / ((1 - t) + t / vocab)
    d, n = 1 - rho, vocab - 1
    b = d / rho
    current = x_t.unsqueeze(-1)
    z = (score - rho).scatter(-1, current, 0.0)
    g = b * z + d * z.sum(-1, keepdim=True)
    c, h = b**2, d**2 * (n + 2 / rho)
    worst = 0.0
    for row in range(len(mu)):
        others = torch.arange(vocab) != x_t[row]
        u, gain = mu[row, others], g[row, others] / c[row]
        level = float(h[row] / c[row])
        assert (mu[row] >= 0).all()
        total = float(u.sum())
        support = u > 0
        inside = float(mu[row, x_t[row]]) > 0

        def violation(theta: float, u=u, gain=gain, level=level, total=total, inside=inside) -> float:  # theta in units of c
            mass = max(abs(total - theta / level), total - 1) if inside else max(abs(total - 1), 1 - theta / level)
            return max(mass, float((u - (gain - theta).clamp(min=0)).abs().max()))

        # a theta that fits: the mean over the support, or, where curvature is so small that u's rounding hides it, the one the
        # mass asks for
        fits = [level * total]
        if support.any():
            fits.append(float((gain - u)[support].mean()))
        worst = max(worst, min(map(violation, fits)), abs(float(mu[row].sum()) - 1))
    return worst


def scores(kind: str, process: m2s.Process, x_t: Tensor, t: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*x_t.shape, process.states, generator=generator, dtype=torch.float64)

    def realizable(scale: float) -> Tensor:
        logits = scale * normal
        if process.mask is not None:
            logits[..., process.mask] = -torch.inf
        return m2s.score_from_posterior(torch.softmax(logits, -1), x_t, t.double(), process)

    wobble = torch.exp(0.3 * torch.randn(normal.shape, generator=generator, dtype=torch.float64))
    return {
        "peaked": lambda: realizable(5.0) * wobble,
        "flat": lambda: realizable(0.1) * wobble,
        "realizable": lambda: realizable(2.0),
        "inactive": lambda: 0.3 * realizable(1.0) * wobble,
        "active": lambda: 3 * realizable(3.0) * wobble,
        "log-normal": lambda: torch.exp(normal),
        "wide log-normal": lambda: torch.exp(3 * normal - 4.5),
        "far above the box": lambda: 1e6 * torch.exp(normal),
        "far below the box": lambda: 1e-9 * torch.exp(normal),
    }[kind]()


KINDS = [
    "peaked",
    "flat",
    "realizable",
    "inactive",
    "active",
    "log-normal",
    "wide log-normal",
    "far above the box",
    "far below the box",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [1e-3, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_optimality_in_float32_at_the_size_of_gpt2(t: float, kind: str) -> None:
    process = m2s.Uniform(GPT2, m2s.Linear())
    x_t = torch.tensor([0, 12_345])
    times = torch.full((2,), t)
    score = scores(kind, process, x_t, times).float()
    mu = m2s.project(score, x_t, times, process)
    assert mu.dtype == torch.float32
    assert kkt_residual(mu, score, x_t, times, GPT2) < 1e-6


def test_optimality_residual_detects_a_wrong_posterior() -> None:
    process = m2s.Uniform(64, m2s.Linear())
    x_t, t = torch.tensor([3]), torch.tensor([0.5])
    score = scores("log-normal", process, x_t, t)
    mu = m2s.project(score, x_t, t.double(), process)
    assert kkt_residual(mu, score, x_t, t, 64) < 1e-12
    wrong = mu.clone()
    wrong[0, int(mu.argmax())] -= 1e-5
    wrong[0, 3] += 1e-5
    assert kkt_residual(wrong, score, x_t, t, 64) > 1e-6


def test_active_and_inactive_branches_both_occur() -> None:
    process = m2s.Uniform(GPT2, m2s.Linear())
    x_t = torch.tensor([5])
    seen = set()
    for kind in ("inactive", "active"):
        for t in (0.1, 0.5, 0.9):
            times = torch.tensor([t])
            mu = m2s.project(scores(kind, process, x_t, times).float(), x_t, times, process)
            seen.add((kind, bool(mu[0, 5] > 0)))
    assert ("inactive", True) in seen and ("active", False) in seen


RANK_ONE = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, p_uniform=0.4),
}


def every_token(process: m2s.Process, t: float) -> tuple[Tensor, Tensor]:
    tokens = sorted({0, 1, process.vocab - 1, process.states - 1})
    return torch.tensor(tokens), torch.full((len(tokens),), t, dtype=torch.float64)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("far")] + ["far below the box"])
@pytest.mark.parametrize("t", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("vocab", [2, 3, 17, 64])
@pytest.mark.parametrize("name", RANK_ONE)
def test_equals_an_active_set_solver(name: str, vocab: int, t: float, kind: str) -> None:
    process = RANK_ONE[name](vocab)
    x_t, times = every_token(process, t)
    score = scores(kind, process, x_t, times)
    mu = m2s.project(score, x_t, times, process)
    for i, k in enumerate(x_t.tolist()):
        if name == "absorbing" and k < vocab:
            assert mu[i, k] == 1 and mu[i].sum() == 1  # the token itself is certainly clean
            continue
        matrix, counted = bridge(process, k, t)
        expected = active_set(matrix, score[i].numpy()[counted])
        np.testing.assert_allclose(mu[i, :vocab].numpy(), expected, rtol=0, atol=1e-8)
        assert (mu[i, vocab:] == 0).all()


TABULATED = {
    "gaussian": lambda vocab: m2s.RateMatrix.gaussian(vocab, m2s.Exponential(horizon=3.0), 2.0, 5.0),
    "birth-death": lambda vocab: m2s.RateMatrix.birth_death(
        torch.linspace(1, 2, vocab - 1), torch.linspace(2, 1, vocab - 1), m2s.Exponential(horizon=4.0)
    ),
    "uniform": lambda vocab: m2s.RateMatrix.uniform(vocab, m2s.Linear()),
    "absorbing": lambda vocab: m2s.RateMatrix.absorbing(vocab, m2s.Linear()),
}


def simplex_conditions(matrix: np.ndarray, target: np.ndarray, mu: np.ndarray) -> float:
    """First-order optimality: max_z <B mu - s, B mu - B_z>, scaled, is 0 at the optimum and positive elsewhere."""
    gap = matrix @ mu - target
    slope = matrix.T @ gap
    length = np.linalg.norm(matrix, axis=0)
    return float(((slope @ mu - slope) / np.maximum(length * np.linalg.norm(gap), 1e-300)).max())


@pytest.mark.parametrize("kind", ["peaked", "realizable", "log-normal", "inactive", "active"])
@pytest.mark.parametrize("t", [0.3, 0.9])
@pytest.mark.parametrize("vocab", [3, 12, 32])
@pytest.mark.parametrize("name", TABULATED)
def test_tabulated_equals_an_active_set_solver(name: str, vocab: int, t: float, kind: str) -> None:
    process = TABULATED[name](vocab)
    x_t, times = every_token(process, t)
    score = scores(kind, process, x_t, times)
    mu = m2s.project(score, x_t, times, process)
    for i, k in enumerate(x_t.tolist()):
        matrix, counted = bridge(process, k, t)
        reachable = np.isfinite(matrix).all(0)
        found = mu[i, :vocab].numpy()
        assert (found >= 0).all() and abs(found.sum() - 1) < 1e-12 and (found[~reachable] == 0).all()
        matrix, target = matrix[:, reachable], score[i].numpy()[counted]
        if not len(target) or (name == "absorbing" and k < vocab):
            continue
        expected = active_set(matrix, target)
        size = np.linalg.norm(target)
        distance, best = (np.linalg.norm(matrix @ v - target) for v in (found[reachable], expected))
        assert distance <= best + 1e-8 * size
        np.testing.assert_allclose(matrix @ found[reachable], matrix @ expected, rtol=0, atol=1e-6 * size)
        system = np.vstack([matrix, np.ones(matrix.shape[1])])
        if len(system) >= system.shape[1] and np.linalg.cond(system) < 1e4:  # otherwise mu is not unique, or not to 1e-8
            np.testing.assert_allclose(found[reachable], expected, rtol=0, atol=1e-8)
        if distance > 1e-6 * size:
            assert simplex_conditions(matrix, target, found[reachable]) < 1e-6


@pytest.mark.parametrize("name", ["gaussian", "uniform"])
def test_tabulated_at_256_tokens(name: str) -> None:
    process = {"gaussian": m2s.RateMatrix.gaussian, "uniform": m2s.RateMatrix.uniform}[name](256, m2s.Exponential(horizon=3.0))
    x_t, t = torch.tensor([0, 100]), torch.full((2,), 0.7, dtype=torch.float64)
    score = scores("log-normal", process, x_t, t)
    mu = m2s.project(score, x_t, t, process)
    for i, k in enumerate(x_t.tolist()):
        matrix, counted = bridge(process, k, 0.7)
        assert simplex_conditions(matrix, score[i].numpy()[counted], mu[i].numpy()) < 1e-7
    if name == "uniform":  # the same process, solved by the threshold
        twin = m2s.project(score, x_t, t, m2s.Uniform(256, m2s.Exponential(horizon=3.0)))
        torch.testing.assert_close(mu, twin, rtol=0, atol=1e-9)
    # from a leave-one-out distribution: a posterior on tokens that can hardly have led to k would have scores of 1e15
    distribution = torch.softmax(torch.randn(2, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), -1)
    true = m2s.score_from_leave_one_out(distribution, x_t, t, process)
    back = m2s.score_from_posterior(m2s.project(true, x_t, t, process), x_t, t, process)
    counted = process.rates_into(x_t, t) > 0  # far levels have no rate into k, and the distance does not see them
    assert ((back - true).where(counted, 0).norm(dim=-1) < 1e-6 * true.where(counted, 0).norm(dim=-1)).all()


@pytest.mark.parametrize("vocab", [2, 17, 256, GPT2])
@pytest.mark.parametrize("t", [0.01, 0.5, 0.99])
def test_realizable_score_gives_back_its_posterior(vocab: int, t: float) -> None:
    process = m2s.Uniform(vocab, m2s.Linear())
    x_t, times = torch.tensor([0, vocab - 1]), torch.full((2,), t, dtype=torch.float64)
    mu = torch.softmax(3 * torch.randn(2, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(vocab)), -1)
    back = m2s.project(m2s.score_from_posterior(mu, x_t, times, process), x_t, times, process)
    assert (back - mu).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["uniform", "hybrid"])
def test_vertices_and_faces_give_back_their_posterior(name: str) -> None:
    """Posteriors with zeros, e_k among them: projection is the identity on all of the polytope, not only inside."""
    process = RANK_ONE[name](9)
    x_t, t = torch.arange(9).repeat_interleave(9), torch.full((81,), 0.6, dtype=torch.float64)
    mu = torch.eye(9, dtype=torch.float64).repeat(9, 1)
    mu = torch.nn.functional.pad(0.7 * mu + 0.3 * mu.roll(1, -1), (0, process.states - 9))
    for prediction in (mu, torch.nn.functional.pad(torch.eye(9, dtype=torch.float64).repeat(9, 1), (0, process.states - 9))):
        back = m2s.project(m2s.score_from_posterior(prediction, x_t, t, process), x_t, t, process)
        assert (back - prediction).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["peaked", "log-normal", "wide log-normal", "inactive", "active"])
@pytest.mark.parametrize("name", RANK_ONE)
def test_idempotent_and_non_expansive(name: str, kind: str) -> None:
    process = RANK_ONE[name](50)
    k = process.states - 1
    x_t, t = torch.full((20,), k), torch.linspace(0.05, 0.95, 20, dtype=torch.float64)

    def nearest(score: Tensor) -> Tensor:
        mu = m2s.project(score, x_t, t, process)
        return m2s.score_from_posterior(mu, x_t, t, process)

    one, two = scores(kind, process, x_t, t, seed=1), scores(kind, process, x_t, t, seed=2)
    once = nearest(one)
    torch.testing.assert_close(nearest(once), once, rtol=1e-11, atol=1e-11)
    off = torch.arange(process.states) != k
    apart = torch.linalg.vector_norm((one - two)[:, off], dim=-1)
    assert (torch.linalg.vector_norm((once - nearest(two))[:, off], dim=-1) <= apart * (1 + 1e-12)).all()


def test_zero_scores_give_the_current_token() -> None:
    """All g <= 0: u = 0 exactly, and the posterior is e_k."""
    process = m2s.Uniform(100, m2s.Linear())
    x_t, t = torch.tensor([7, 8]), torch.tensor([0.3, 0.9])
    mu = m2s.project(torch.zeros(2, 100), x_t, t, process)
    assert torch.equal(mu, torch.nn.functional.one_hot(x_t, 100).float())


def test_the_entry_at_the_current_token_is_ignored() -> None:
    for make in RANK_ONE.values():
        process = make(30)
        x_t, t = torch.tensor([4, process.states - 1]), torch.tensor([0.3, 0.8])
        score = scores("log-normal", process, x_t, t).float()
        plain = m2s.project(score, x_t, t, process)
        for value in (0.0, 1e30, float("inf"), float("nan")):
            garbled = score.scatter(-1, x_t.unsqueeze(-1), value)
            assert torch.equal(m2s.project(garbled, x_t, t, process), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("process", [m2s.Uniform(40, m2s.Linear()), m2s.RateMatrix.uniform(12, m2s.Linear())], ids=repr)
def test_half_precision_is_projected_in_float32(process: m2s.Process, dtype: torch.dtype) -> None:
    x_t, t = torch.arange(10).reshape(2, 5), torch.tensor([0.3, 0.7])
    score = torch.exp(0.5 * torch.randn(2, 5, process.states)).to(dtype)
    mu = m2s.project(score, x_t, t, process)
    assert mu.dtype == torch.float32 and torch.equal(mu, m2s.project(score.float(), x_t, t, process))
    assert (m2s.classify(m2s.score_from_posterior(mu, x_t, t, process), x_t, t, process) >= 2).all()
    assert m2s.project(score.double(), x_t, t, process).dtype == torch.float64


def test_any_leading_shape() -> None:
    process = m2s.Uniform(40, m2s.Linear())
    x_t = torch.arange(24).reshape(2, 3, 4)
    t = torch.tensor([0.2, 0.7])
    score = scores("log-normal", process, x_t, t).float()
    mu = m2s.project(score, x_t, t, process)
    for b in range(2):
        for i in range(3):
            row = m2s.project(score[b, i], x_t[b, i], t[b].expand(4), process)
            torch.testing.assert_close(mu[b, i], row, rtol=0, atol=1e-7)
    strided = score.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(m2s.project(strided, x_t, t, process), mu)
    assert m2s.project(score[0, 0, 0], x_t[0, 0, 0], t[0], process).shape == (40,)


def test_blocks_of_rows_agree_with_single_rows() -> None:
    """More rows than one block on a CPU, with both branches side by side."""
    process = m2s.Uniform(3_000, m2s.Linear())
    x_t = torch.arange(150)
    t = torch.linspace(0.01, 0.99, 150)
    score = scores("log-normal", process, x_t, t).float()
    mu = m2s.project(score, x_t, t, process)
    for row in (0, 50, 100, 149):
        at = slice(row, row + 1)
        torch.testing.assert_close(mu[at], m2s.project(score[at], x_t[at], t[at], process), rtol=0, atol=1e-7)


def test_ties_and_huge_scores() -> None:
    process = m2s.Uniform(6, m2s.Linear())
    x_t, t = torch.tensor([0]), torch.tensor([0.5])
    mu = m2s.project(torch.tensor([[1.0, 1e30, 1e30, 2.0, 0.0, 1.0]]), x_t, t, process)
    torch.testing.assert_close(mu, torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0, 0.0]]))
    mu = m2s.project(torch.full((1, 6), 2.0), x_t, t, process)
    torch.testing.assert_close(mu[0, 1:], mu[0, 1].expand(5))


@pytest.mark.parametrize(("seed", "row"), [(22, 3), (81, 1)])
def test_rounding_does_not_send_a_row_in_circles(seed: int, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 50,257 scores on which Newton's method alternated between two supports until the last pass that it is allowed."""
    setting = Setting(torch.device("cpu"), rows=32, vocab=50_257, width=16, repeats=1, depth=1, seed=seed)
    score, x_t, t, process = noisy_scores(setting)
    score, x_t, t = (value[row : row + 1] for value in (score, x_t, t))
    passes, compare = [], torch.ge
    monkeypatch.setattr(torch, "ge", lambda *given, **more: passes.append(1) or compare(*given, **more))
    found = m2s.project(score, x_t, t, process)
    assert 3 < len(passes) < 12
    expected = m2s.project(score.double(), x_t, t, process)
    assert float((found.double() - expected).abs().sum()) < 1e-5 and abs(float(found.double().sum()) - 1) < 1e-5


@pytest.mark.parametrize(
    "head",
    [
        m2s.LogScore(m2s.Uniform(7, m2s.Linear())),
        m2s.LogScore(m2s.Absorbing(7, m2s.LogLinear())),
        m2s.LogScore(m2s.Absorbing(7, m2s.LogLinear()), scale="sigma"),
        m2s.LogScore(m2s.Hybrid(7, 0.3)),
        m2s.FactorizedRate(m2s.Uniform(7, m2s.Linear())),
    ],
    ids=str,
)
@pytest.mark.parametrize("unprojected", [False, True], ids=["logits", "hidden"])
def test_a_projected_head_projects_the_score_of_the_head(head: m2s.heads.Head, unprojected: bool) -> None:
    """Whatever the output means, its scale included: the posterior, its logarithm and the score."""
    torch.manual_seed(0)
    process = head.process
    x_t, t = torch.randint(process.states, (3, 5)), torch.tensor([0.1, 0.5, 0.9])
    x_t[:, 0] = process.states - 1
    hidden, weight = torch.randn(3, 5, 4), torch.randn(process.states, 4)
    logits = hidden @ weight.T
    output = m2s.Unprojected(hidden, weight) if unprojected else logits
    expected = m2s.project(head.log_score(logits, x_t, t).exp(), x_t, t, process)
    found = m2s.Projected(head)
    torch.testing.assert_close(found.posterior(output, x_t, t), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found.posterior_logits(output, x_t, t).exp(), expected[..., : process.vocab], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        found.log_score(output, x_t, t).exp(), m2s.score_from_posterior(expected, x_t, t, process), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "process", [m2s.Uniform(7, m2s.Linear()), m2s.Absorbing(7, m2s.LogLinear()), m2s.Hybrid(7, 0.3)], ids=str
)
def test_a_projected_head_asks_a_subclass_for_its_score(process: m2s.Process) -> None:
    class Halved(m2s.LogScore):
        def log_score(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
            return super().log_score(output, x_t, t) / 2

    x_t, t = torch.randint(process.states, (3, 5)), torch.tensor([0.1, 0.5, 0.9])
    x_t[:, 0] = process.states - 1
    output = 2 * torch.randn(3, 5, process.states)
    expected = m2s.project(Halved(process).log_score(output, x_t, t).exp(), x_t, t, process)
    torch.testing.assert_close(m2s.Projected(Halved(process)).posterior(output, x_t, t), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "process", [m2s.Uniform(7, m2s.Linear()), m2s.Absorbing(7, m2s.LogLinear()), m2s.Hybrid(7, 0.3)], ids=str
)
def test_log_scores_do_not_overflow_in_float32(process: m2s.Process) -> None:
    """Of scores that exceed float32 the greatest has all of the posterior, as in float64. Infinity and NaN give NaN."""
    x_t, t = torch.full((4,), process.states - 1), torch.full((4,), 0.5)
    output = torch.randn(4, process.states)
    output[:, 3] = torch.tensor([90.0, 700.0, torch.inf, torch.nan])
    found = m2s.Projected(m2s.LogScore(process)).posterior(output, x_t, t)
    exact = m2s.Projected(m2s.LogScore(process)).posterior(output.double(), x_t, t)
    torch.testing.assert_close(found[:2], exact[:2].float(), rtol=0, atol=1e-6)
    assert (found[:2, 3] == 1).all() and found[2:, 3].isnan().all()
