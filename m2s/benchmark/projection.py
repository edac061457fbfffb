"""The nearest posterior to a score: the library against fifty bisection passes, and against reading and writing the scores."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Call, Comparison, under
from m2s.benchmark.setting import Setting
from m2s.ops import use_backend

PASSES = 50
FUSED, BISECTION, COPY = "m2s, fused", "fifty bisection passes, eager", "one read and one write"


def measure(setting: Setting) -> dict[str, Any]:
    score, x_t, t, process = scores(setting)
    contest, out = Comparison(setting), torch.empty_like(score)

    def project() -> Tensor:
        return m2s.project(score, x_t, t, process)

    contest.enter(COPY, lambda: out.copy_(score))
    contest.enter(FUSED, under("fused", project), "fused")
    contest.enter("m2s, reference", under("reference", project))
    contest.enter(BISECTION, lambda: bisection(score, x_t, t))
    contest.run()
    to_copy, faster = contest.ratio(FUSED, COPY), contest.ratio(BISECTION, FUSED)
    return contest.result(
        f"projection of {len(score):,} scores over {setting.vocab:,} tokens, float32",
        {f"{name} / {COPY}": contest.ratio(name, COPY) for name in contest.found if name != COPY}
        | {f"{BISECTION} / {name}": contest.ratio(BISECTION, name) for name in contest.found if name.startswith("m2s")},
        [
            contest.bar("fused projection over one read and one write", to_copy, at_most=4.0),
            contest.bar("fifty bisection passes over the fused projection", faster, at_least=10.0),
        ],
        greatest_error=_errors(contest, score, x_t, t, process),
    )


def scores(setting: Setting) -> tuple[Tensor, Tensor, Tensor, m2s.Process]:
    """Scores of a quarter of the rows: those of beliefs from flat to peaked, at all times, each off by some 30%."""
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
    """The paper's solver (Appendix D.4) on all rows at once: u = [g - theta]_+ / c, theta by bisection in [0, h] where the mass
    constraint is inactive, in [h, max g] where it is active. Uniform, linear schedule."""
    vocab = score.shape[-1]
    own = x_t.unsqueeze(-1)
    rho = ((t / vocab) / ((1 - t) + t / vocab)).unsqueeze(-1)
    d, n = 1 - rho, vocab - 1
    b = d / rho
    z = (score - rho).scatter_(-1, own, 0.0)
    g = (b * z).add_(d * z.sum(-1, keepdim=True)).scatter_(-1, own, -torch.inf)
    c, h = b * b, d * d * (n + 2 / rho)
    active = (g - h).relu_().sum(-1, keepdim=True) > c
    low, high = torch.where(active, h, 0), torch.where(active, g.amax(-1, keepdim=True), h)
    for _ in range(PASSES):
        theta = (low + high) / 2
        above = torch.sub(g, theta, out=z).relu_().sum(-1, keepdim=True) > c * torch.where(active, 1, theta / h)
        low, high = torch.where(above, theta, low), torch.where(above, high, theta)
    u = torch.sub(g, (low + high) / 2, out=z).relu_().div_(c)
    return u.scatter_(-1, own, (1 - u.sum(-1, keepdim=True)).relu_())


def _errors(contest: Comparison, score: Tensor, x_t: Tensor, t: Tensor, process: m2s.Process) -> dict[str, float]:
    """The greatest difference of any entry from the projection in float64, over some rows."""
    some = torch.arange(0, len(score), max(1, len(score) // 64), device=score.device)
    given = score[some], x_t[some], t[some]
    with use_backend("reference"):
        truth = m2s.project(given[0].double(), *given[1:], process)
    solvers: dict[str, Call] = {
        FUSED: under("fused", partial(m2s.project, *given, process)),
        "m2s, reference": under("reference", partial(m2s.project, *given, process)),
        BISECTION: partial(bisection, *given),
    }
    found = {name: contest.attempt(name, solver) for name, solver in solvers.items() if name in contest.found}
    return {name: float((mu.double() - truth).abs().amax()) for name, mu in found.items() if mu is not None}
