"""Part "dense-step": the Bayes step on logits, which draws one token and keeps no K-vector, against a step on K-vectors.

The other form is the analytic step as SEDD released it: it builds vectors over the vocabulary for every site. The output of the
network is given. On a CPU at 1024 x 50257, the Bayes step must be four times as fast and take a quarter of the memory.
"""

from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.samplers import Bayes, CounterNoise, Move, Prediction

ROWS, VOCAB = 1024, 50_257  # of the bars
DENSE, OURS = "vectors", "m2s"
MIN_SPEEDUP, MIN_MEMORY = 4.0, 4.0
T, S = 0.5, 0.49


def dense_step(log_score: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Take SEDD's analytic step on vectors over the vocabulary. Uniform process, linear schedule.

    Draws from the positive part of (e^D score - (e^D - 1) mean(score)) P_{t|s}(k|.), with D = sigma_t - sigma_s, by exponential
    noise: one random number for each token of the vocabulary.

    Args:
        log_score: [B, L, K] log-scores.
        x_t: [B, L] tokens, k.
        t: [B] times.
        s: [B] times after the step.

    Returns:
        [B, L] tokens at time s.
    """
    vocab = log_score.shape[-1]
    k = x_t.unsqueeze(-1)
    d = (torch.log1p(-s) - torch.log1p(-t))[:, None, None]
    score = log_score.exp().scatter(-1, k, 1.0)
    staggered = d.exp() * score - torch.expm1(d) * score.mean(-1, keepdim=True)
    transition = (-torch.expm1(-d) / vocab).expand(score.shape).scatter_add(-1, k, torch.exp(-d).expand(k.shape))
    weights = (staggered * transition).clamp(min=0)
    noise = 1e-10 - torch.log(torch.rand_like(weights) + 1e-10)
    return (weights / noise).argmax(-1)


@PARTS.register("dense-step")
@torch.no_grad()
def measure(setting: Setting) -> dict[str, Any]:
    """Compare the Bayes step on logits with a step on K-vectors.

    Args:
        setting: Sizes and device; at most 1,024 rows are used.

    Returns:
        Times, memory, ratios and bars.
    """
    comparison, rows, device = Comparison(setting), min(ROWS, setting.rows), setting.device
    head = m2s.Posterior(m2s.Uniform(setting.vocab, m2s.Linear()))
    generator = torch.Generator(device).manual_seed(setting.seed)
    batch = min(8, rows)
    shape = (batch, rows // batch)
    logits = torch.randn(*shape, setting.vocab, generator=generator, device=device)
    x_t = torch.randint(setting.vocab, shape, generator=generator, device=device)
    t, s = (torch.full((batch,), time, device=device) for time in (T, S))
    noise = CounterNoise(0, torch.arange(batch, device=device), shape[1], 1)
    move = Move(t.double(), s.double())
    comparison.add(DENSE, lambda: dense_step(logits, x_t, t, s))
    comparison.add(OURS, lambda: Bayes().step(Prediction(head, logits, x_t, t), move, noise))
    comparison.run()
    speedup, memory = comparison.ratio(DENSE, OURS), comparison.memory_ratio(DENSE, OURS)
    judged = setting.is_cpu_of(ROWS, VOCAB)
    return comparison.result(
        f"one reverse step from logits, Uniform, posterior, {rows} x {setting.vocab:,} float32",
        {f"{DENSE} / {OURS}": speedup},
        [
            comparison.bar("times faster than the step on K-vectors", speedup, at_least=MIN_SPEEDUP, judged=judged),
            comparison.bar("times less peak memory than the step on K-vectors", memory, at_least=MIN_MEMORY, judged=judged),
        ],
    )
