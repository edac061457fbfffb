"""The nearest posterior to a score: m2s.project against the paper's solver, fifty bisection steps on a scalar threshold for
every position.

Both take the same scores and return the same posteriors. The bisection is run on all positions at once, as the paper says, and
once more on blocks of rows that fit the cache. Eager m2s is held to twice the speed of the faster of these two; compiled m2s to
five times that of the batched bisection in eager mode, and compared with the other two as well. Exactness is the residual of
the optimality conditions.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import common

import m2s
from m2s.benchmark.projection import PASSES, bisection

BLOCK = 16
LEAST_EAGER, LEAST_COMPILED = 2.0, 5.0


def blocked(score: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """The same on blocks of rows."""
    mu = torch.empty_like(score)
    for start in range(0, len(score), BLOCK):
        at = slice(start, start + BLOCK)
        mu[at] = bisection(score[at], x_t[at], t[at])
    return mu


def residual(mu: Tensor, score: Tensor, x_t: Tensor, t: Tensor) -> float:
    """Worst |u - [g - theta]_+ / c| in float64, theta the mean over each row's support of g - c u, and worst |sum(mu) - 1|."""
    mu, score, t = mu.double(), score.double(), t.double().unsqueeze(-1)
    vocab, own = score.shape[-1], x_t.unsqueeze(-1)
    rho = (t / vocab) / ((1 - t) + t / vocab)
    d = 1 - rho
    b = d / rho
    z = (score - rho).scatter(-1, own, 0.0)
    g = ((b * z + d * z.sum(-1, keepdim=True)) / b**2).scatter(-1, own, -torch.inf)
    u = mu.scatter(-1, own, 0.0)
    support = u > 0
    theta = torch.where(support, g - u, 0).sum(-1, keepdim=True) / support.sum(-1, keepdim=True).clamp(min=1)
    return float(torch.maximum((u - (g - theta).relu()).abs().amax(), (mu.sum(-1) - 1).abs().amax()))


def cases(rows: int, vocab: int, seed: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Scores as a sampler meets them: peaked, flat and realizable beliefs, and each branch of the mass constraint."""
    process = m2s.Uniform(vocab, m2s.Linear())
    generator = torch.Generator().manual_seed(seed)
    x_t = torch.randint(vocab, (rows,), generator=generator)

    def normal() -> Tensor:
        return torch.randn(rows, vocab, generator=generator)

    def bridged(scale: float, t: Tensor) -> Tensor:
        return m2s.score_from_posterior(torch.softmax(scale * normal(), -1), x_t, t, process)

    def at(time: float) -> Tensor:
        return torch.full((rows,), time)

    return {
        "peaked": (bridged(5.0, at(0.3)) * torch.exp(0.3 * normal()), x_t, at(0.3)),
        "flat": (bridged(0.1, at(0.3)) * torch.exp(0.3 * normal()), x_t, at(0.3)),
        "realizable": (bridged(2.0, at(0.3)), x_t, at(0.3)),
        "inactive": (0.3 * torch.exp(normal() - 3), x_t, at(0.9)),
        "active": (torch.exp(normal()), x_t, at(0.9)),
    }


def main() -> int:
    parser = common.parser(__doc__ or "")
    parser.add_argument(
        "--skip-compiled", action="store_true", help="leave torch.compile out (its fifty unrolled steps take a minute to build)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    process = m2s.Uniform(options.vocab, m2s.Linear())

    def library(score: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return m2s.project(score, x_t, t, process)

    solvers: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "m2s": library,
        "bisection": bisection,
        "bisection, blocked": blocked,
    }
    if not options.skip_compiled:
        solvers |= {"m2s, compiled": torch.compile(library), "bisection, compiled": torch.compile(bisection)}
    inputs = cases(options.rows, options.vocab, options.seed)
    times, exactness = {}, {}
    for case, arguments in inputs.items():
        calls = {name: lambda solver=solver, arguments=arguments: solver(*arguments) for name, solver in solvers.items()}
        exactness[case] = {name: residual(call(), *arguments) for name, call in calls.items()}
        times[case] = common.take_turns(calls, options.repeats)

    mean = {name: sum(times[case][name]["best_ms"] for case in inputs) / len(inputs) for name in solvers}
    worst = {name: max(exactness[case][name] for case in inputs) for name in solvers}
    print(f"projection, {options.rows} x {options.vocab}, float32, {options.threads} threads, best of {options.repeats}, ms")
    rows = [
        [name, *(f"{times[case][name]['best_ms']:.1f}" for case in inputs), f"{mean[name]:.1f}", f"{worst[name]:.1e}"]
        for name in solvers
    ]
    common.table(["", *inputs, "mean", "residual"], rows)
    eager = min(mean["bisection"], mean["bisection, blocked"]) / mean["m2s"]
    bars = [("eager m2s, times faster than the faster eager bisection", eager, LEAST_EAGER)]
    ratios = {
        "eager m2s against the faster eager bisection": eager,
        "eager m2s against bisection": mean["bisection"] / mean["m2s"],
    }
    if not options.skip_compiled:
        for name in ("bisection", "bisection, blocked", "bisection, compiled"):
            ratios[f"compiled m2s against {name}"] = mean[name] / mean["m2s, compiled"]
            print(f"        compiled m2s, times faster than {name}: {mean[name] / mean['m2s, compiled']:.2f}")
        bars.append(
            (
                "compiled m2s, times faster than the paper's batched bisection, eager",
                mean["bisection"] / mean["m2s, compiled"],
                LEAST_COMPILED,
            )
        )
    bisected = min(value for name, value in worst.items() if "bisection" in name)
    ours = max(value for name, value in worst.items() if "m2s" in name)
    bars.append(("times smaller residual than the best bisection", bisected / ours, 1.0))
    common.save(
        "projection",
        options,
        {"times": times, "mean_best_ms": mean, "residual": exactness, "times_faster": ratios, "steps": PASSES},
    )
    return common.verdict(bars)


if __name__ == "__main__":
    sys.exit(main())
