"""Score entropy through the bridge, forward and backward: the library, as it is and under torch.compile, against the form that
builds s, r and h and leaves the rest to autograd. (Compiled, that form no longer builds them; its time is shown beside.)
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

LEAST_SPEED, LEAST_MEMORY = 3.0, 3.0
NAMES = ["direct", "m2s", "direct, compiled", "m2s, compiled"]


def direct(logits: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """n sum_{y != k} (s - r log s + r log r - r), s = off + rho mu_k + b mu, r = P_t(y|x_0) / P_t(k|x_0); uniform, linear
    schedule.
    """
    vocab = logits.shape[-1]
    alpha, beta = (1 - t)[:, None, None], t[:, None, None]
    rho = (beta / vocab) / (alpha + beta / vocab)
    k = x_t.unsqueeze(-1)
    mu = torch.softmax(logits, -1)
    mu_k = mu.gather(-1, k)
    s = (1 - mu_k) + rho * mu_k + (1 / rho - 1) * mu
    row = (beta / vocab).expand_as(mu).scatter(-1, x_0.unsqueeze(-1), (alpha + beta / vocab).expand_as(k))
    r = row / row.gather(-1, k)
    h = s - r * torch.log(s) + r * torch.log(r) - r
    return h.scatter(-1, k, 0.0).sum(-1) / (vocab * alpha.squeeze(-1))


def inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(options.seed)
    batch = min(8, options.rows)
    shape = (batch, options.rows // batch)
    x_0 = torch.randint(options.vocab, shape)
    t = torch.rand(batch) * 0.9 + 0.05
    x_t = m2s.Uniform(options.vocab, m2s.Linear()).corrupt(x_0, t)
    return 2 * torch.randn(*shape, options.vocab), x_0, x_t, t


def contenders(x_0: Tensor, x_t: Tensor, t: Tensor, vocab: int) -> dict[str, Callable[[Tensor], Tensor]]:
    head = m2s.Posterior(m2s.Uniform(vocab, m2s.Linear()))
    forms = {
        "direct": lambda logits: direct(logits, x_0, x_t, t),
        "m2s": lambda logits: m2s.score_entropy(head, logits, x_0, x_t, t),
    }
    return forms | {f"{name}, compiled": torch.compile(form, fullgraph=True) for name, form in forms.items()}


def forward_backward(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    leaf = logits.detach().requires_grad_()
    loss(leaf).mean().backward()
    assert leaf.grad is not None
    return leaf.grad


def measure(options: argparse.Namespace) -> dict[str, Any]:
    small = argparse.Namespace(**{**vars(options), "rows": 8, "vocab": 64})
    logits, *rest = inputs(small)
    forward_backward(contenders(*rest, small.vocab)[options.measure], logits)  # warm up
    logits, *rest = inputs(options)
    call = contenders(*rest, options.vocab)[options.measure]
    if "compiled" in options.measure:
        forward_backward(call, logits)
    return common.memory_and_times(lambda: forward_backward(call, logits), options.repeats)


def main() -> int:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3, help="processes started for each form, in turns")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        print(json.dumps(measure(options)))
        return 0
    what = f"score_entropy, Uniform + Linear, Posterior, forward + backward, {options.rows} x {options.vocab} float32"
    runs = common.in_turns(__file__, NAMES, options.rounds)
    faster, less = common.compare("loss", options, runs, "direct", what)
    print(f"        times faster than the direct form, eager: {faster['m2s']:.2f}")
    return common.verdict(
        [
            ("times faster than the direct form (compiled, median of all calls)", faster["m2s, compiled"], LEAST_SPEED),
            ("times less peak memory than the direct form, eager", less["m2s"], LEAST_MEMORY),
            ("times less peak memory than the direct form, compiled", less["m2s, compiled"], LEAST_MEMORY),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
