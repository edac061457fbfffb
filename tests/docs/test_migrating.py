"""What docs/migrating.md says of the code of others, in numbers."""

import math
from pathlib import Path

import torch
from torch import Tensor

import m2s
from m2s.samplers import LogitsProcessor
from m2s.samplers.prediction import Prediction

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()


def test_mdlms_cosine_is_not_md4s() -> None:
    """MDLM's noise_schedule.py: sigma = -log(eps + (1 - eps) cos(pi t / 2))."""
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    theirs, ours = 1e-3 + (1 - 1e-3) * torch.cos(math.pi / 2 * t), m2s.Cosine().alpha(t)
    gap = (theirs - ours).abs()
    assert float(gap.max()) - (math.sqrt(2) - 1) < 1e-3 and abs(float(t[gap.argmax()]) - 0.5) < 1e-2
    said = [f"{float(value):.2f}"[1:] for value in (ours[500], theirs[500], gap.max())]
    assert "it is {} and theirs {}, the largest difference ({})".format(*said) in PAGE


def duos_step(nu: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """q(x_s | x_t, nu) of uniform noise, with nu in the place of x_0 (Eq. 5 of the DUO paper)."""
    vocab = nu.shape[-1]
    here = torch.nn.functional.one_hot(x_t, vocab)
    kept, at_t = (alpha_t / alpha_s)[:, None], alpha_t[:, None]
    weights = (kept * here + (1 - kept) / vocab) * (alpha_s[:, None] * nu + (1 - alpha_s[:, None]) / vocab)
    return weights / (at_t * nu.gather(-1, x_t[:, None]) + (1 - at_t) / vocab)


def nucleus(probability: Tensor, mass: float) -> Tensor:
    """The likeliest tokens up to the one that reaches `mass`, renormalized, one row at a time."""
    kept = torch.zeros_like(probability)
    for row, result in zip(probability, kept, strict=True):
        total = 0.0
        for token in row.argsort(descending=True).tolist():
            result[token] = row[token]
            total += float(row[token])
            if total > mass:
                break
    return kept / kept.sum(-1, keepdim=True)


def test_duos_nucleus_is_that_of_the_leave_one_out_distribution() -> None:
    """Exactly with on="leave_one_out"; by default as far away as the page says."""
    vocab, count, steps = 64, 100, 32
    process = m2s.Uniform(vocab, m2s.LogLinear())
    head, distances = m2s.Posterior(process, "exact"), []
    for time in torch.linspace(1 / steps, 1, 16, dtype=torch.float64):
        t = time.expand(count)
        s = (t - 1 / steps).clamp(min=0)
        logits = 2 * torch.randn(count, vocab, dtype=torch.float64)
        nu = torch.softmax(logits, -1)
        x_t = process.corrupt(torch.multinomial(nu, 1), t).squeeze(-1)
        alpha_s, alpha_t = process.alpha(s), process.alpha(t)
        theirs = duos_step(nucleus(nu, 0.9), x_t, alpha_s, alpha_t)

        def ours(on: str) -> Tensor:
            prediction = Prediction(head, logits, x_t, t, LogitsProcessor(top_p=0.9, on=on))  # noqa: B023
            return m2s.bayes_probabilities(prediction.posterior(), x_t, s, t, process)  # noqa: B023

        torch.testing.assert_close(ours("leave_one_out"), theirs, rtol=1e-9, atol=1e-12)
        distances.append((ours("posterior") - theirs).abs().sum(-1) / 2)
    means = torch.stack([distance.mean() for distance in distances])
    assert 0.01 < float(means.mean()) < 0.03 and 0.07 < float(means.max()) < 0.2 and means.argmax() < 2
    assert float(torch.cat(distances).max()) > 0.99
    assert "variation distance is .02 on average over time, .1 in the last steps, and 1 at single positions" in PAGE
    assert "--top-p P --on leave_one_out" in PAGE
