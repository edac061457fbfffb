"""The losses of the literature are one loss: each as its authors write it, against score entropy, in float64."""

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
def test_masks_over_ordered_levels(schedule, offset):
    """A posterior from a mean and a scale: the masked losses are its -log mu_{x_0} at masked sites by their weights, and score
    entropy is one of them."""
    process = m2s.Absorbing(VOCAB, schedule)
    head = m2s.Ordinal(process, offset)
    x_0, x_t, t, output = situation(process)
    output = output / 4 + 1  # wide enough that a difference of two sigmoids keeps its digits
    mean, scale = output[..., 0], torch.exp(-2 + 7 * torch.tanh(output[..., 1] / 7))
    below, above = (2.0 * (x_0.double() + side) - 1 for side in (0, 1))  # the ends of the bin, in units of 1/(K - 1), from -1
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


def test_a_clipped_weight_is_at_most_one_or_what_is_given():
    """Against the weight by hand: n_t(k) / P_t(k|x_0), and 1 where that is more; it happens on both sides here."""
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


def test_leaving_and_jumping_between_256_levels():
    """Rates from 1 down to nothing: the two losses agree there too, in float32 as well, and their gradients are numbers."""
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
def test_leaving_and_jumping(process):
    """Neural CTMC's loss = score entropy in other coordinates."""
    head = m2s.FactorizedRate(process)
    x_0, x_t, t, output = situation(process)
    same(path_kl(head, output, x_0, x_t, t), m2s.score_entropy(head, output, x_0, x_t, t))


def per_log_alpha(loss, process: m2s.Process, output: torch.Tensor, tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A loss of M2S with the exact offset for each unit by which log alpha falls."""
    speed = -torch.autograd.functional.jvp(lambda s: torch.log(process.alpha(s)), t, torch.ones_like(t))[1]
    return loss(m2s.Posterior(process, "exact"), output[..., : process.states], *tokens, t) / speed.unsqueeze(-1)


def share_kept(process: m2s.Hybrid, alpha: torch.Tensor) -> torch.Tensor:
    """The time at which so much is kept under GIDD's process: with u^2 = t/(1 - t), 1/alpha = 1 + B u + u^2."""
    slope, rest = 2 * process.p_uniform / (1 - process.p_uniform), 1 / alpha - 1
    u = 2 * rest / (slope + torch.sqrt(slope**2 + 4 * rest))
    return u**2 / (1 + u**2)


@pytest.mark.parametrize("loss", [m2s.score_entropy, gidd], ids=["score entropy", "gidd"])
def test_p_uniform_towards_one_is_uniform_noise(loss):
    """GIDD's process at p -> 1: given the share of tokens kept, the same law and the same loss per unit of log alpha as uniform
    noise. What is left between them falls as (1 - p)^2, as the mask's share does, down to rounding."""
    uniform, alpha = m2s.Uniform(VOCAB, m2s.Linear()), torch.tensor([0.05, 0.3, 0.5, 0.7, 0.95], dtype=torch.float64)
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (2, 5, 30), generator=rng)
    output = torch.randn(5, 30, VOCAB + 1, generator=rng, dtype=torch.float64)
    wanted = per_log_alpha(loss, uniform, output, tokens, 1 - alpha)
    away = []
    for distance in (1e-2, 1e-3, 1e-4, 1e-9):
        hybrid = m2s.Hybrid(VOCAB, 1 - distance)
        t = share_kept(hybrid, alpha)
        torch.testing.assert_close(hybrid.alpha(t), alpha, rtol=1e-13, atol=0)
        found = per_log_alpha(loss, hybrid, output, tokens, t)
        away.append((found / wanted - 1).abs().amax(-1) / distance**2)
    same(found, wanted)
    same(hybrid.transition_matrix(t)[:, :VOCAB, :VOCAB], uniform.transition_matrix(1 - alpha))
    assert float(hybrid.mixing(t).mask.max()) < 1e-15
    assert (away[1] > 1e-3).all()
    torch.testing.assert_close(away[0], away[1], rtol=0.05, atol=0)
    torch.testing.assert_close(away[1], away[2], rtol=0.005, atol=0)


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
