"""Part "projection": the nearest posterior to a score (`m2s.project`), against bisection and against one read and write."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Call, Comparison, with_backend
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.ops import use_backend

PASSES = 50
FUSED, BISECTION, COPY = "m2s, fused", "fifty bisection passes, eager", "one read and one write"


@PARTS.register("projection")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare the projection with fifty bisection passes and with one read and write of the scores.

    Args:
        setting: Sizes and device; a quarter of the rows is projected.

    Returns:
        Times, ratios, bars, and errors against float64.
    """
    score, x_t, t, process = scores(setting)
    comparison, out = Comparison(setting), torch.empty_like(score)

    def project() -> Tensor:
        return m2s.project(score, x_t, t, process)

    comparison.add(COPY, lambda: out.copy_(score))
    comparison.add(FUSED, with_backend("fused", project), "fused")
    comparison.add("m2s, reference", with_backend("reference", project))
    comparison.add(BISECTION, lambda: bisection(score, x_t, t))
    comparison.run()
    to_copy, faster = comparison.ratio(FUSED, COPY), comparison.ratio(BISECTION, FUSED)
    return comparison.result(
        f"projection of {len(score):,} scores over {setting.vocab:,} tokens, float32",
        {f"{name} / {COPY}": comparison.ratio(name, COPY) for name in comparison.results if name != COPY}
        | {f"{BISECTION} / {name}": comparison.ratio(BISECTION, name) for name in comparison.results if name.startswith("m2s")},
        [
            comparison.bar("fused projection over one read and one write", to_copy, at_most=4.0),
            comparison.bar("fifty bisection passes over the fused projection", faster, at_least=10.0),
        ],
        greatest_error=_errors(comparison, score, x_t, t, process),
    )


def scores(setting: Setting) -> tuple[Tensor, Tensor, Tensor, m2s.Uniform]:
    """Draw noisy scores: those of random posteriors from flat to peaked, at all times, with 30 % log-normal noise.

    Args:
        setting: Sizes, device and seed; the number of scores N is a quarter of the rows.

    Returns:
        [N, K] scores, [N] tokens x_t, [N] times, and the process.
    """
    device, count = setting.device, max(1, setting.rows // 4)
    generator = torch.Generator(device).manual_seed(setting.seed)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    x_t = torch.randint(setting.vocab, (count,), generator=generator, device=device)
    t = m2s.stratified_times(count, 1e-3, 1 - 1e-3, generator, device)
    score = torch.empty(count, setting.vocab, device=device)
    for start in range(0, count, 256):
        at = slice(start, min(start + 256, count))
        normal, noise = (torch.randn(score[at].shape, generator=generator, device=device) for _ in range(2))
        sharpness = 5 * torch.rand(len(normal), 1, generator=generator, device=device)
        mu = torch.softmax(sharpness * normal, -1)
        score[at] = m2s.score_from_posterior(mu, x_t[at], t[at], process) * torch.exp(0.3 * noise)
    return score, x_t, t.float(), process


def bisection(score: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """Project scores by the paper's solver (Appendix D.4), on all rows at once. Uniform process, linear schedule.

    u = [g - theta]_+ / c, where fifty bisection passes find theta in [0, h] if the mass constraint is inactive, and in
    [h, max g] if it is active.

    Args:
        score: [N, K] scores.
        x_t: [N] tokens.
        t: [N] times.

    Returns:
        [N, K] posteriors.
    """
    vocab = score.shape[-1]
    k = x_t.unsqueeze(-1)
    rho = ((t / vocab) / ((1 - t) + t / vocab)).unsqueeze(-1)
    d, n = 1 - rho, vocab - 1
    b = d / rho
    z = (score - rho).scatter_(-1, k, 0.0)
    g = (b * z).add_(d * z.sum(-1, keepdim=True)).scatter_(-1, k, -torch.inf)
    c, h = b * b, d * d * (n + 2 / rho)
    active = (g - h).relu_().sum(-1, keepdim=True) > c
    low, high = torch.where(active, h, 0), torch.where(active, g.amax(-1, keepdim=True), h)
    for _ in range(PASSES):
        theta = (low + high) / 2
        above = torch.sub(g, theta, out=z).relu_().sum(-1, keepdim=True) > c * torch.where(active, 1, theta / h)
        low, high = torch.where(above, theta, low), torch.where(above, high, theta)
    u = torch.sub(g, (low + high) / 2, out=z).relu_().div_(c)
    return u.scatter_(-1, k, (1 - u.sum(-1, keepdim=True)).relu_())


def _errors(comparison: Comparison, score: Tensor, x_t: Tensor, t: Tensor, process: m2s.Process) -> dict[str, float]:
    """Return the largest difference of any entry from the projection in float64, over up to 64 rows."""
    some = torch.arange(0, len(score), max(1, len(score) // 64), device=score.device)
    inputs = score[some], x_t[some], t[some]
    with use_backend("reference"):
        truth = m2s.project(inputs[0].double(), *inputs[1:], process)
    solvers: dict[str, Call] = {
        FUSED: with_backend("fused", partial(m2s.project, *inputs, process)),
        "m2s, reference": with_backend("reference", partial(m2s.project, *inputs, process)),
        BISECTION: partial(bisection, *inputs),
    }
    posteriors = {name: comparison.attempt(name, solver) for name, solver in solvers.items() if name in comparison.results}
    return {name: float((mu.double() - truth).abs().amax()) for name, mu in posteriors.items() if mu is not None}
