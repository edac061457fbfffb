"""Part "bisection": `m2s.project` against the paper's solver on five kinds of scores, eager and compiled.

The bisection runs on all positions at once, as the paper says, and once more on blocks of rows that fit the cache. Exactness is
the residual of the optimality conditions. On a CPU at the default sizes, eager m2s must be twice as fast as the faster eager
bisection, and compiled m2s five times as fast as the batched eager one.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison
from m2s.benchmark.projection import bisection
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting

ROWS, VOCAB = 512, 8192  # of the bars
BLOCK = 16
OURS, BATCHED, BLOCKED = "m2s", "bisection", "bisection, blocked"
MIN_SPEEDUP, MIN_SPEEDUP_COMPILED = 2.0, 5.0

Solver = Callable[[Tensor, Tensor, Tensor], Tensor]
Scores = tuple[Tensor, Tensor, Tensor]  # [N, K] scores, [N] tokens x_t, [N] times


def blocked_bisection(score: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """Run `bisection` on blocks of rows that fit the cache.

    Args:
        score: [N, K] scores.
        x_t: [N] tokens.
        t: [N] times.

    Returns:
        [N, K] posteriors.
    """
    mu = torch.empty_like(score)
    for start in range(0, len(score), BLOCK):
        rows = slice(start, start + BLOCK)
        mu[rows] = bisection(score[rows], x_t[rows], t[rows])
    return mu


def residual(mu: Tensor, score: Tensor, x_t: Tensor, t: Tensor) -> float:
    """Return the residual of the optimality conditions of the projection, in float64.

    The largest |u - [g - theta]_+ / c|, with theta the mean of g - c u over the support of each row, and the largest
    |sum(mu) - 1|.

    Args:
        mu: [N, K] posteriors.
        score: [N, K] scores that were projected.
        x_t: [N] tokens.
        t: [N] times.

    Returns:
        The larger of the two.
    """
    mu, score, t = mu.double(), score.double(), t.double().unsqueeze(-1)
    vocab, k = score.shape[-1], x_t.unsqueeze(-1)
    rho = (t / vocab) / ((1 - t) + t / vocab)
    d = 1 - rho
    b = d / rho
    z = (score - rho).scatter(-1, k, 0.0)
    g = ((b * z + d * z.sum(-1, keepdim=True)) / b**2).scatter(-1, k, -torch.inf)
    u = mu.scatter(-1, k, 0.0)
    support = u > 0
    theta = torch.where(support, g - u, 0).sum(-1, keepdim=True) / support.sum(-1, keepdim=True).clamp(min=1)
    return float(torch.maximum((u - (g - theta).relu()).abs().amax(), (mu.sum(-1) - 1).abs().amax()))


def score_cases(rows: int, vocab: int, seed: int, device: torch.device) -> dict[str, Scores]:
    """Draw scores as a sampler meets them.

    Args:
        rows: Number of scores, N.
        vocab: Number of tokens, K.
        seed: Seed.
        device: Device of the tensors.

    Returns:
        Noisy scores of peaked and flat posteriors, realizable scores, and one case for each branch of the mass constraint.
    """
    process = m2s.Uniform(vocab, m2s.Linear())
    generator = torch.Generator(device).manual_seed(seed)
    x_t = torch.randint(vocab, (rows,), generator=generator, device=device)
    early, late = (torch.full((rows,), time, device=device) for time in (0.3, 0.9))

    def normal() -> Tensor:
        return torch.randn(rows, vocab, generator=generator, device=device)

    def realizable(sharpness: float) -> Tensor:
        return m2s.score_from_posterior(torch.softmax(sharpness * normal(), -1), x_t, early, process)

    return {
        "peaked": (realizable(5.0) * torch.exp(0.3 * normal()), x_t, early),
        "flat": (realizable(0.1) * torch.exp(0.3 * normal()), x_t, early),
        "realizable": (realizable(2.0), x_t, early),
        "inactive": (0.3 * torch.exp(normal() - 3), x_t, late),
        "active": (torch.exp(normal()), x_t, late),
    }


@PARTS.register("bisection")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare the projection with the paper's solver on five kinds of scores.

    Args:
        setting: Sizes and device; at most 512 rows are used.

    Returns:
        Times and residuals of each solver on each case, means over cases, ratios and bars.
    """
    comparison, rows = Comparison(setting), min(ROWS, setting.rows)
    cases = score_cases(rows, setting.vocab, setting.seed, setting.device)
    solvers = _solvers(comparison)
    for case, inputs in cases.items():
        for name, solver in solvers.items():
            needs = "compiled" if name.endswith("compiled") else None
            comparison.add(f"{name}, {case}", lambda solver=solver, inputs=inputs: solver(*inputs), needs)  # type: ignore[misc]
    comparison.run()
    mean, worst = {}, {}
    for name in solvers:
        calls = {case: f"{name}, {case}" for case in cases}
        if all(call in comparison.results for call in calls.values()):
            mean[name] = statistics.fmean(comparison.results[call]["best_ms"] for call in calls.values())
            worst[name] = max(residual(comparison.calls[call](), *cases[case]) for case, call in calls.items())
    return comparison.result(
        f"projection of {rows} scores over {setting.vocab:,} tokens, float32; mean of the best times of five cases",
        {f"{other} / {name}": mean[other] / mean[name] for name in mean if OURS in name for other in mean if OURS not in other},
        _bars(comparison, mean, worst),
        mean_best_ms=mean,
        residual=worst,
    )


def _solvers(comparison: Comparison) -> dict[str, Solver]:
    """Return the solvers by name."""
    setting = comparison.setting
    process = m2s.Uniform(setting.vocab, m2s.Linear())

    def project(score: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return m2s.project(score, x_t, t, process)

    solvers: dict[str, Solver] = {OURS: project, BATCHED: bisection, BLOCKED: blocked_bisection}
    solvers[f"{OURS}, compiled"] = torch.compile(project)
    if setting.rows >= ROWS:
        solvers[f"{BATCHED}, compiled"] = torch.compile(bisection)
    else:
        comparison.skipped.append(
            f"{BATCHED}, compiled: its fifty unrolled passes take a minute to compile; give --rows {ROWS}"
        )
    return solvers


def _bars(comparison: Comparison, mean: dict[str, float], worst: dict[str, float]) -> list[dict[str, Any]]:
    """Judge the speed of the projection, eager and compiled, and its residual."""
    judged = comparison.setting.is_cpu_of(ROWS, VOCAB)
    eager, compiled, batched, blocked = (mean.get(name) for name in (OURS, f"{OURS}, compiled", BATCHED, BLOCKED))
    ours, theirs = ([value for name, value in worst.items() if (OURS in name) == is_ours] for is_ours in (True, False))
    smaller = min(theirs) / max(ours) if ours and theirs else None
    return [
        comparison.bar(
            "eager m2s, times faster than the faster eager bisection",
            min(batched, blocked) / eager if eager and batched and blocked else None,
            at_least=MIN_SPEEDUP,
            judged=judged,
        ),
        comparison.bar(
            "compiled m2s, times faster than the batched eager bisection",
            batched / compiled if batched and compiled else None,
            at_least=MIN_SPEEDUP_COMPILED,
            judged=judged,
        ),
        comparison.bar("times smaller residual than the best bisection", smaller, at_least=1.0, judged=judged),
    ]
