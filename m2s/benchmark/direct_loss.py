"""Part "direct-loss": score entropy of logits, forward and backward, against the formula written down directly.

The direct form builds s, r and h as tensors over the vocabulary and leaves the gradient to autograd. Compiled, it no longer
builds them; its compiled time is shown beside. On a CPU at the default sizes, the compiled loss must be 3 times as fast as the
direct form in eager mode, and take a third of its memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting

ROWS, VOCAB = 512, 8192  # of the bars
DIRECT, OURS = "direct", "m2s"
MIN_SPEEDUP, MIN_MEMORY = 3.0, 3.0

Loss = Callable[[Tensor], Tensor]


def direct_score_entropy(logits: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """Compute score entropy by its formula. Uniform process, linear schedule.

    n sum_{y != k} (s_y - r_y log s_y + r_y log r_y - r_y), with s = 1 - mu_k + rho mu_k + (1/rho - 1) mu and
    r_y = P_t(y|x_0) / P_t(k|x_0).

    Args:
        logits: [B, L, K] logits of the posterior mu.
        x_0: [B, L] clean tokens.
        x_t: [B, L] noisy tokens, k.
        t: [B] times.

    Returns:
        [B, L] losses in nats.
    """
    vocab = logits.shape[-1]
    alpha, beta = (1 - t)[:, None, None], t[:, None, None]
    rho = (beta / vocab) / (alpha + beta / vocab)
    k = x_t.unsqueeze(-1)
    mu = torch.softmax(logits, -1)
    mu_k = mu.gather(-1, k)
    s = (1 - mu_k) + rho * mu_k + (1 / rho - 1) * mu
    transition = (beta / vocab).expand_as(mu).scatter(-1, x_0.unsqueeze(-1), (alpha + beta / vocab).expand_as(k))
    r = transition / transition.gather(-1, k)
    h = s - r * torch.log(s) + r * torch.log(r) - r
    return h.scatter(-1, k, 0.0).sum(-1) / (vocab * alpha.squeeze(-1))


@PARTS.register("direct-loss")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare `m2s.score_entropy` with the direct formula, eager and compiled, forward and backward.

    Args:
        setting: Sizes and device; at most 512 rows are used.

    Returns:
        Times, memory, ratios and bars.
    """
    comparison, rows = Comparison(setting), min(ROWS, setting.rows)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    head = m2s.Posterior(process)
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    shape = (min(8, rows), rows // min(8, rows))
    x_0 = torch.randint(setting.vocab, shape, generator=generator, device=setting.device)
    t = torch.rand(shape[0], generator=generator, device=setting.device) * 0.9 + 0.05
    x_t = process.corrupt(x_0, t, generator)
    logits = 2 * torch.randn(*shape, setting.vocab, generator=generator, device=setting.device)
    losses: dict[str, Loss] = {
        DIRECT: lambda logits: direct_score_entropy(logits, x_0, x_t, t),
        OURS: lambda logits: m2s.score_entropy(head, logits, x_0, x_t, t),
    }
    for name, loss in losses.items():
        comparison.add(name, partial(_forward_backward, loss, logits))
        compiled = torch.compile(loss, fullgraph=True)
        comparison.add(f"{name}, compiled", partial(_forward_backward, compiled, logits), "compiled")
    comparison.run()
    judged, fast = setting.is_cpu_of(ROWS, VOCAB), f"{OURS}, compiled"
    ratios = {f"{DIRECT} / {name}": comparison.ratio(DIRECT, name) for name in comparison.results if name != DIRECT}
    memory = {name: comparison.memory_ratio(DIRECT, name) for name in (OURS, fast)}
    speed_bar = comparison.bar(
        "times faster than the direct form, compiled", ratios.get(f"{DIRECT} / {fast}"), at_least=MIN_SPEEDUP, judged=judged
    )
    memory_bars = [
        comparison.bar(
            f"times less peak memory than the direct form, {variant}", memory[name], at_least=MIN_MEMORY, judged=judged
        )
        for name, variant in ((OURS, "eager"), (fast, "compiled"))
    ]
    return comparison.result(
        f"score entropy of {rows} x {setting.vocab:,} logits, Uniform, posterior, forward and backward, float32",
        ratios,
        [speed_bar, *memory_bars],
    )


def _forward_backward(loss: Loss, logits: Tensor) -> Tensor:
    """Return the gradient of the mean loss in the logits."""
    leaf = logits.detach().requires_grad_()
    loss(leaf).mean().backward()
    assert leaf.grad is not None
    return leaf.grad
