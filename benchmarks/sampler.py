"""One reverse step on top of the network: the library's Bayes step, which draws one token and keeps no K-vector, against the
analytic step in the form in which SEDD released it, on K-vectors for every site. The network stands still: its output is fixed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import common

import m2s
from m2s.samplers import Bayes, CounterNoise, Move, Prediction

LEAST_SPEED, LEAST_MEMORY = 4.0, 4.0
NAMES = ["vectors", "m2s"]
T, S = 0.5, 0.49


def vectors(log_score: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Positive part of (e^D score - (e^D - 1) mean(score)) P_{t|s}(k|.), D = sigma_t - sigma_s, drawn from by exponential
    noise, one number for each token of the vocabulary; uniform, linear schedule.
    """
    vocab = log_score.shape[-1]
    k = x_t.unsqueeze(-1)
    d = (torch.log1p(-s) - torch.log1p(-t))[:, None, None]
    score = log_score.exp().scatter(-1, k, 1.0)
    staggered = d.exp() * score - torch.expm1(d) * score.mean(-1, keepdim=True)
    row = (-torch.expm1(-d) / vocab).expand(score.shape).scatter_add(-1, k, torch.exp(-d).expand(k.shape))
    weights = (staggered * row).clamp(min=0)
    noise = 1e-10 - torch.log(torch.rand_like(weights) + 1e-10)
    return (weights / noise).argmax(-1)


def streaming(logits: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """The library's step: routes and one draw, some rows at a time."""
    prediction = Prediction(m2s.Posterior(m2s.Uniform(logits.shape[-1], m2s.Linear())), logits, x_t, t)
    return Bayes().step(prediction, Move(t.double(), s.double()), CounterNoise(0, torch.arange(len(x_t)), x_t.shape[1], 1))


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {"vectors": vectors, "m2s": streaming}


def inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(options.seed)
    batch = min(8, options.rows)
    shape = (batch, options.rows // batch)
    return (
        torch.randn(*shape, options.vocab),
        torch.randint(options.vocab, shape),
        torch.full((batch,), T),
        torch.full((batch,), S),
    )


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    form = FORMS[options.measure]
    form(*inputs(argparse.Namespace(**{**vars(options), "rows": 8, "vocab": 64})))  # warm up
    given = inputs(options)
    return common.memory_and_times(lambda: form(*given), options.repeats)


def main() -> int:
    parser = common.parser(__doc__ or "")
    parser.set_defaults(rows=1024, vocab=50_257, repeats=5)
    parser.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3, help="processes started for each form, in turns")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        print(json.dumps(measure(options)))
        return 0
    what = f"one step beyond the network, Uniform + Linear, Posterior, {options.rows} x {options.vocab} float32"
    runs = common.in_turns(__file__, NAMES, options.rounds)
    faster, less = common.compare("sampler", options, runs, "vectors", what)
    return common.verdict(
        [
            ("times faster than the step on K-vectors (median of all calls)", faster["m2s"], LEAST_SPEED),
            ("times less peak memory than the step on K-vectors", less["m2s"], LEAST_MEMORY),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
