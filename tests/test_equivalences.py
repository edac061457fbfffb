"""The losses of the literature are one loss: each as its authors write it, against score entropy, in float64."""

import math

import pytest
import torch

import m2s
from m2s.objective import gidd, gidd_clipped, path_kl, udlm

VOCAB = 7


def situation(process: m2s.Process, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Clean and noisy tokens at times over all of (0, 1), and logits of a random network."""
    rng = torch.Generator().manual_seed(seed)
    x_0 = torch.randint(process.vocab, (9, 5), generator=rng)
    t = torch.linspace(0.004, 0.996, 9, dtype=torch.float64)
    x_t = process.corrupt(x_0, t, rng)
    return x_0, x_t, t, 2 * torch.randn(9, 5, process.states, generator=rng, dtype=torch.float64)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("schedule", [m2s.Linear(), m2s.Cosine(), m2s.LogLinear()], ids=str)
def test_masks(schedule):
    """Score entropy of M2S = MD4 = MDLM = RADD = SEDD fed with the bridge's score."""
    process = m2s.Absorbing(VOCAB, schedule)
    head = m2s.Posterior(process)
    x_0, x_t, t, output = situation(process)
    masked = m2s.masked_cross_entropy(head, output, x_0, x_t, t)
    same(m2s.score_entropy(head, output, x_0, x_t, t), masked)
    same(m2s.score_entropy(m2s.LogScore(process), head.log_score(output, x_t, t), x_0, x_t, t), masked)
    # by hand, MDLM's two rules and RADD's clock: no logit for the mask, what is not masked is carried over, d lambda / lambda
    log_mu = torch.log_softmax(output[..., :VOCAB], -1).gather(-1, x_0.unsqueeze(-1)).squeeze(-1)
    share = 1 - schedule.alpha(t)
    speed = torch.autograd.functional.jvp(lambda s: 1 - schedule.alpha(s), t, torch.ones_like(t))[1]
    same(torch.where(x_t == VOCAB, -log_mu * (speed / share).unsqueeze(-1), 0), masked)
    same(gidd(head, output, x_0, x_t, t), masked)


@pytest.mark.parametrize("schedule", [m2s.Linear(), m2s.Cosine(), m2s.LogLinear()], ids=str)
@pytest.mark.parametrize("offset", ["none", "exact"])
def test_uniform_noise(schedule, offset):
    """Score entropy of M2S, with and without the offset = UDLM's bound = GIDD's unclipped bound of the same belief."""
    head = m2s.Posterior(m2s.Uniform(VOCAB, schedule), offset)
    x_0, x_t, t, output = situation(head.process)
    wanted = m2s.score_entropy(head, output, x_0, x_t, t)
    same(udlm(head, output, x_0, x_t, t), wanted)
    same(gidd(head, output, x_0, x_t, t), wanted)


@pytest.mark.parametrize("p_uniform", [0.0, 0.1, 0.2, 0.9])
def test_masks_and_other_tokens(p_uniform):
    head = m2s.Posterior(m2s.Hybrid(VOCAB, p_uniform), "exact")
    x_0, x_t, t, output = situation(head.process)
    wanted = m2s.score_entropy(head, output, x_0, x_t, t)
    same(gidd(head, output, x_0, x_t, t), wanted)
    if p_uniform == 0:  # a mask and alpha = 1 - t: MDLM's
        same(m2s.masked_cross_entropy(m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear())), output, x_0, x_t, t), wanted)


def test_a_clipped_weight_is_at_most_one():
    """Against the weight by hand: n_t(k) / P_t(k|x_0), and 1 where that is more; it happens on both sides here."""
    head = m2s.Posterior(m2s.Hybrid(VOCAB, 0.2), "exact")
    x_0, x_t, t, output = situation(head.process)
    kernel, rates = head.process.kernel(t), head.process.rates(t)
    other = (x_t + 1) % VOCAB
    batch = torch.arange(9).unsqueeze(-1)
    weight = rates[batch, other, x_t] / kernel[batch, x_0, x_t]
    assert (weight > 1).any() and (weight < 1).any()
    same(gidd_clipped(head, output, x_0, x_t, t), gidd(head, output, x_0, x_t, t) * weight.clamp(max=1) / weight)


@pytest.mark.parametrize(
    "process",
    [
        m2s.Uniform(VOCAB, m2s.Linear()),
        m2s.Absorbing(VOCAB, m2s.Cosine()),
        m2s.Hybrid(VOCAB, 0.1),
        m2s.RateMatrix.gaussian(VOCAB, m2s.Exponential(1.0)),
    ],
    ids=lambda process: type(process).__name__,
)
def test_leaving_and_jumping(process):
    """Neural CTMC's loss = score entropy in other coordinates."""
    head = m2s.FactorizedRate(process)
    x_0, x_t, t, output = situation(process)
    same(path_kl(head, output, x_0, x_t, t), m2s.score_entropy(head, output, x_0, x_t, t))


def test_p_uniform_towards_one_is_uniform_noise():
    """GIDD's process at p -> 1: given the share of tokens kept, the same law and the same loss per unit of log alpha as uniform
    noise; the mask is all but gone."""
    hybrid, uniform = m2s.Hybrid(VOCAB, 1 - 1e-9), m2s.Uniform(VOCAB, m2s.Linear())
    t = torch.tensor([2.5e-19], dtype=torch.float64)
    alpha = hybrid.alpha(t)
    other = 1 - alpha
    assert 0.05 < float(alpha) < 0.95 and float(hybrid.mixing(t).mask) < 1e-9
    rng = torch.Generator().manual_seed(3)
    x_0, x_t = torch.randint(VOCAB, (2, 1, 30), generator=rng)
    output = torch.randn(1, 30, VOCAB + 1, generator=rng, dtype=torch.float64)
    one = m2s.score_entropy(m2s.Posterior(hybrid, "exact"), output, x_0, x_t, t)
    two = m2s.score_entropy(m2s.Posterior(uniform, "exact"), output[..., :VOCAB], x_0, x_t, other)
    scale = hybrid.at(x_t, t).rate / uniform.at(x_t, other).rate
    torch.testing.assert_close(one / scale, two, rtol=1e-6, atol=1e-9)
    assert math.isfinite(float(scale.max()))


@pytest.mark.parametrize(
    ("loss", "head"),
    [
        (gidd, m2s.LogScore(m2s.Uniform(VOCAB, m2s.Linear()))),
        (gidd_clipped, m2s.Posterior(m2s.RateMatrix.gaussian(VOCAB, m2s.Linear()))),
        (udlm, m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear()))),
        (path_kl, m2s.Posterior(m2s.Uniform(VOCAB, m2s.Linear()))),
    ],
)
def test_a_loss_says_what_it_is_for(loss, head):
    x_0, x_t, t, output = situation(head.process)
    with pytest.raises(TypeError, match=r"is for m2s\."):
        loss(head, output, x_0, x_t, t)
