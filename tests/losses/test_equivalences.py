"""Losses of the literature equal score entropy: each in the form of its paper, in float64."""

import math

import pytest
import torch

import m2s
from m2s.losses import any_order, gidd, gidd_clipped, path_kl, udlm

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


@pytest.mark.parametrize("schedule", [m2s.Linear(), m2s.Cosine(), m2s.LogLinear(), m2s.Rescaled(m2s.Cosine())], ids=str)
def test_losses_for_absorbing_processes_are_equal(schedule):
    """Score entropy of M2S = MD4 = MDLM = RADD = SEDD with the score from the bridge."""
    process = m2s.Absorbing(VOCAB, schedule)
    head = m2s.Posterior(process)
    x_0, x_t, t, output = situation(process)
    masked = m2s.masked_cross_entropy(head, output, x_0, x_t, t)
    same(m2s.score_entropy(head, output, x_0, x_t, t), masked)
    same(m2s.score_entropy(m2s.LogScore(process), head.log_score(output, x_t, t), x_0, x_t, t), masked)
    # MDLM: no logit for the mask, and unmasked tokens are kept. RADD: d lambda / lambda.
    log_mu = torch.log_softmax(output[..., :VOCAB], -1).gather(-1, x_0.unsqueeze(-1)).squeeze(-1)
    share = 1 - schedule.alpha(t)
    speed = torch.autograd.functional.jvp(lambda s: 1 - schedule.alpha(s), t, torch.ones_like(t))[1]
    same(torch.where(x_t == VOCAB, -log_mu * (speed / share).unsqueeze(-1), 0), masked)
    same(gidd(head, output, x_0, x_t, t), masked)


@pytest.mark.parametrize("schedule", [m2s.Linear(), m2s.Cosine(), m2s.LogLinear()], ids=str)
@pytest.mark.parametrize("offset", ["none", "exact"])
def test_losses_for_absorbing_processes_with_an_ordinal_head(schedule, offset):
    """The masked losses are weighted sums of -log mu_{x_0} over masked sites, and score entropy is one of them."""
    process = m2s.Absorbing(VOCAB, schedule)
    head = m2s.Ordinal(process, offset)
    x_0, x_t, t, output = situation(process)
    output = output / 4 + 1  # a scale at which the difference of two sigmoids is accurate
    mean, scale = output[..., 0], torch.exp(-2 + 7 * torch.tanh(output[..., 1] / 7))
    below, above = (2.0 * (x_0.double() + side) - 1 for side in (0, 1))  # the ends of the bin times K - 1, plus K - 1
    low, high = ((end / (VOCAB - 1) - 1 - mean) / scale for end in (below, above))
    mu = torch.where(x_0 == VOCAB - 1, 1.0, torch.sigmoid(high)) - torch.where(x_0 == 0, 0.0, torch.sigmoid(low))
    masked = x_t == VOCAB
    assert masked.any() and (~masked).any() and (x_0[masked] == 0).any() and (x_0[masked] == VOCAB - 1).any()
    alpha = schedule.alpha(t).unsqueeze(-1)
    speed = torch.autograd.functional.jvp(lambda s: -schedule.alpha(s), t, torch.ones_like(t))[1].unsqueeze(-1)

    def hand(weight: torch.Tensor) -> torch.Tensor:
        return torch.where(masked, -weight * torch.log(mu), 0)

    found = m2s.masked_cross_entropy(head, output, x_0, x_t, t)
    same(found, hand(speed / (1 - alpha)))
    same(m2s.score_entropy(head, output, x_0, x_t, t), found)
    count = masked.sum(-1, keepdim=True).clamp(min=1)
    same(any_order(head, output, x_0, x_t, t), hand(speed * (x_0.shape[1] + 1) / count))


@pytest.mark.parametrize("schedule", [m2s.Linear(), m2s.Cosine(), m2s.LogLinear()], ids=str)
@pytest.mark.parametrize("offset", ["none", "exact"])
def test_losses_for_uniform_noise_are_equal(schedule, offset):
    """Score entropy of M2S = UDLM's loss = GIDD's loss without clipping, for the same posterior."""
    head = m2s.Posterior(m2s.Uniform(VOCAB, schedule), offset)
    x_0, x_t, t, output = situation(head.process)
    wanted = m2s.score_entropy(head, output, x_0, x_t, t)
    same(udlm(head, output, x_0, x_t, t), wanted)
    same(gidd(head, output, x_0, x_t, t), wanted)


@pytest.mark.parametrize("p_uniform", [0.0, 0.1, 0.2, 0.9])
def test_losses_for_hybrid_noise_are_equal(p_uniform):
    head = m2s.Posterior(m2s.Hybrid(VOCAB, p_uniform), "exact")
    x_0, x_t, t, output = situation(head.process)
    wanted = m2s.score_entropy(head, output, x_0, x_t, t)
    same(gidd(head, output, x_0, x_t, t), wanted)
    if p_uniform == 0:  # MDLM with alpha = 1 - t
        same(m2s.masked_cross_entropy(m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear())), output, x_0, x_t, t), wanted)
        same(m2s.masked_cross_entropy(head, output, x_0, x_t, t), wanted)


def test_gidd_clips_its_weight():
    """The weight is min(n_t(k) / P_t(k|x_0), max_weight). The test has weights above and below 1."""
    head = m2s.Posterior(m2s.Hybrid(VOCAB, 0.2), "exact")
    x_0, x_t, t, output = situation(head.process)
    kernel, rates = head.process.transition_matrix(t), head.process.rates(t)
    other = (x_t + 1) % VOCAB
    batch = torch.arange(9).unsqueeze(-1)
    weight = rates[batch, other, x_t] / kernel[batch, x_0, x_t]
    assert (weight > 1).any() and (weight < 1).any()
    same(gidd_clipped(head, output, x_0, x_t, t), gidd(head, output, x_0, x_t, t) * weight.clamp(max=1) / weight)
    for most in (0.3, 2.0):
        found = gidd_clipped(head, output, x_0, x_t, t, max_weight=most)
        same(found, gidd(head, output, x_0, x_t, t) * weight.clamp(max=most) / weight)
    same(gidd_clipped(head, output, x_0, x_t, t, max_weight=math.inf), gidd(head, output, x_0, x_t, t))


def test_path_kl_equals_score_entropy_for_256_levels():
    """With rates from 1 down to underflow, in float64 and float32. Gradients are finite."""
    head = m2s.FactorizedRate(m2s.RateMatrix.gaussian(256, m2s.Exponential(1.0)))
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randint(256, (4, 9), generator=generator)
    t = torch.tensor([1e-3, 0.1, 0.5, 0.99], dtype=torch.float64)
    x_t = torch.multinomial(head.process.rows(x_0, t).flatten(0, 1), 1, generator=generator).view(4, 9)
    for dtype, near in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        output = torch.randn(4, 9, 256, dtype=dtype, generator=generator).requires_grad_()
        found, wanted = (loss(head, output, x_0, x_t, t) for loss in (m2s.score_entropy, path_kl))
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
        found.sum().backward()
        assert output.grad.isfinite().all()
        assert not head.last_step(output, x_t, t).isnan().any()


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
def test_path_kl_equals_score_entropy(process):
    """The loss of Neural CTMC is score entropy of the rate that the head factorizes."""
    head = m2s.FactorizedRate(process)
    x_0, x_t, t, output = situation(process)
    same(path_kl(head, output, x_0, x_t, t), m2s.score_entropy(head, output, x_0, x_t, t))


def per_log_alpha(loss, process: m2s.Process, output: torch.Tensor, tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A loss of M2S with the exact offset, divided by -d log alpha / dt."""
    speed = -torch.autograd.functional.jvp(lambda s: torch.log(process.alpha(s)), t, torch.ones_like(t))[1]
    return loss(m2s.Posterior(process, "exact"), output[..., : process.states], *tokens, t) / speed.unsqueeze(-1)


def time_of_alpha(process: m2s.Hybrid, alpha: torch.Tensor) -> torch.Tensor:
    """The time at which GIDD's process has this alpha: with u^2 = t/(1 - t), 1/alpha = 1 + B u + u^2."""
    slope, rest = 2 * process.p_uniform / (1 - process.p_uniform), 1 / alpha - 1
    u = 2 * rest / (slope + torch.sqrt(slope**2 + 4 * rest))
    return u**2 / (1 + u**2)


@pytest.mark.parametrize("loss", [m2s.score_entropy, gidd], ids=["score entropy", "gidd"])
def test_hybrid_noise_converges_to_uniform_noise(loss):
    """For p_uniform -> 1 and the same alpha, transition matrix and loss per unit of log alpha converge to those of uniform
    noise. The difference decreases as (1 - p)^2, like the probability of the mask."""
    uniform, alpha = m2s.Uniform(VOCAB, m2s.Linear()), torch.tensor([0.05, 0.3, 0.5, 0.7, 0.95], dtype=torch.float64)
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (2, 5, 30), generator=rng)
    output = torch.randn(5, 30, VOCAB + 1, generator=rng, dtype=torch.float64)
    wanted = per_log_alpha(loss, uniform, output, tokens, 1 - alpha)
    differences = []
    for distance in (1e-2, 1e-3, 1e-4, 1e-9):
        hybrid = m2s.Hybrid(VOCAB, 1 - distance)
        t = time_of_alpha(hybrid, alpha)
        torch.testing.assert_close(hybrid.alpha(t), alpha, rtol=1e-13, atol=0)
        found = per_log_alpha(loss, hybrid, output, tokens, t)
        differences.append((found / wanted - 1).abs().amax(-1) / distance**2)
    same(found, wanted)
    same(hybrid.transition_matrix(t)[:, :VOCAB, :VOCAB], uniform.transition_matrix(1 - alpha))
    assert float(hybrid.mixing(t).mask.max()) < 1e-15
    assert (differences[1] > 1e-3).all()
    torch.testing.assert_close(differences[0], differences[1], rtol=0.05, atol=0)
    torch.testing.assert_close(differences[1], differences[2], rtol=0.005, atol=0)


@pytest.mark.parametrize(
    ("loss", "head"),
    [
        (gidd, m2s.LogScore(m2s.Uniform(VOCAB, m2s.Linear()))),
        (gidd_clipped, m2s.Posterior(m2s.RateMatrix.gaussian(VOCAB, m2s.Linear()))),
        (udlm, m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear()))),
        (path_kl, m2s.Posterior(m2s.Uniform(VOCAB, m2s.Linear()))),
    ],
)
def test_unsupported_heads_raise(loss, head):
    x_0, x_t, t, output = situation(head.process)
    with pytest.raises(TypeError, match=r"is for m2s\."):
        loss(head, output, x_0, x_t, t)
