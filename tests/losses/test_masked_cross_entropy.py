"""The masked cross entropy of every process that only masks, against formulas that share no code with the library."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import beta, betainc

import m2s
from m2s.evaluation.likelihood import ESTIMATORS, World, supported
from m2s.losses import any_order
from m2s.process import Mixing, RankOne

K, LENGTH = 5, 3
EPS = 1e-3


class Masks(RankOne):
    """A process of a plugin that only masks, with alpha_t = 1 - t."""

    vocab, states, mask = K, K + 1, K
    masking_schedule = m2s.Linear()

    def alpha(self, t):
        return 1 - t

    def mixing(self, t):
        return Mixing(torch.zeros_like(t), t)

    def mixing_rate(self, t):
        return Mixing(torch.zeros_like(t), 1 / (1 - t))

    def step(self, s, t):
        return (1 - t) / (1 - s), Mixing(torch.zeros_like(t), (t - s) / (1 - s))


# -alpha' and 1 - alpha by hand
RATES: dict[str, tuple[m2s.Process, Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "absorbing-linear": (m2s.Absorbing(K, m2s.Linear()), np.ones_like, lambda t: t),
    "absorbing-log-linear": (m2s.Absorbing(K, m2s.LogLinear(EPS)), lambda t: np.full_like(t, 1 - EPS), lambda t: (1 - EPS) * t),
    "absorbing-cosine": (
        m2s.Absorbing(K, m2s.Cosine()),
        lambda t: math.pi / 2 * np.sin(math.pi / 2 * (1 - t)),
        lambda t: np.sin(math.pi / 2 * t),
    ),
    "hybrid-0": (m2s.Hybrid(K, p_uniform=0.0), np.ones_like, lambda t: t),
    "plugin": (Masks(), np.ones_like, lambda t: t),
}


def situation(seed: int = 3) -> tuple[torch.Tensor, ...]:
    """Clean tokens, tokens with masks at half of the positions, times of (0, 1), and an output of [8, L, K + 1]."""
    rng = np.random.default_rng(seed)
    x_0 = rng.integers(K, size=(8, LENGTH))
    x_t = np.where(rng.random((8, LENGTH)) < 0.5, K, x_0)
    t = np.array([1e-6, 1e-3, 0.1, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9])
    return tuple(torch.as_tensor(part) for part in (x_0, x_t, t, 2 * rng.standard_normal((8, LENGTH, K + 1))))


def nll_by_hand(output: np.ndarray, x_0: np.ndarray) -> np.ndarray:
    """-log mu_{x_0} with mu the softmax over clean tokens."""
    weights = np.exp(output[..., :K])
    return -np.log(np.take_along_axis(weights, x_0[..., None], -1)[..., 0] / weights.sum(-1))


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values(name: str, dtype: torch.dtype) -> None:
    """(-alpha' / (1 - alpha)) (-log mu_{x_0}) at masks, exactly 0 elsewhere."""
    process, speed, share = RATES[name]
    x_0, x_t, t, output = situation()
    found = m2s.masked_cross_entropy(m2s.Posterior(process), output.to(dtype), x_0, x_t, t)
    each = t.numpy()[:, None]
    wanted = np.where(x_t == K, speed(each) / share(each) * nll_by_hand(output.numpy(), x_0.numpy()), 0)
    assert found.dtype == dtype and found[x_t != K].eq(0).all()
    near = 1e-12 if dtype == torch.float64 else 2e-6
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=near)


@pytest.mark.parametrize("name", RATES)
def test_values_of_the_any_order_loss(name: str) -> None:
    """-alpha' (L + 1)/n (-log mu_{x_0}) at the n masks of an example."""
    process, speed, _ = RATES[name]
    x_0, x_t, t, output = situation()
    masked = (x_t == K).numpy()
    weight = speed(t.numpy()[:, None]) * (LENGTH + 1) / np.maximum(masked.sum(-1, keepdims=True), 1)
    found = any_order(m2s.Posterior(process), output, x_0, x_t, t)
    np.testing.assert_allclose(
        found.numpy(), np.where(masked, weight * nll_by_hand(output.numpy(), x_0.numpy()), 0), rtol=1e-12
    )


@pytest.mark.parametrize("name", RATES)
def test_gradient_by_hand(name: str) -> None:
    """The gradient at logit z of a mask is weight (mu_z - [z = x_0]), and 0 at the logit of the mask."""
    process, speed, share = RATES[name]
    x_0, x_t, t, output = situation()
    output.requires_grad_()
    m2s.masked_cross_entropy(m2s.Posterior(process), output, x_0, x_t, t).sum().backward()
    weights = np.exp(output.detach().numpy()[..., :K])
    each = (speed(t.numpy()) / share(t.numpy()))[:, None, None] * (x_t == K).numpy()[..., None]
    wanted = each * (weights / weights.sum(-1, keepdims=True) - np.eye(K)[x_0.numpy()])
    np.testing.assert_allclose(output.grad[..., :K].numpy(), wanted, rtol=1e-11, atol=1e-12)
    assert output.grad[..., K].eq(0).all()


@pytest.mark.parametrize(
    "process", [m2s.Absorbing(2, m2s.Linear()), m2s.Hybrid(2, p_uniform=0.0)], ids=["absorbing", "hybrid-0"]
)
@pytest.mark.parametrize(("estimator", "low"), [("mdlm", 1e-3), ("md4", 0.0)])
def test_estimators_are_incomplete_beta_functions(process: m2s.Process, estimator: str, low: float) -> None:
    """For a network without time, each set of n masks counts with the integral of t^(n-1) (1-t)^(L-n) over [low, 1].

    MDLM takes the mean over [1e-3, 1) in place of the integral. MD4 has no last step here, since nothing is masked at t = 0.
    """
    table = torch.randn(3, 3, 3, LENGTH, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    world = World(lambda x_t, t: table[tuple(x_t.long().unbind(-1))], m2s.Posterior(process), LENGTH)
    found = world.nats(ESTIMATORS[estimator]).numpy()
    length = 1 - low if estimator == "mdlm" else 1.0
    wanted = []
    for x_0 in itertools.product(range(2), repeat=LENGTH):
        total = 0.0
        for masked in itertools.product([False, True], repeat=LENGTH):
            n = sum(masked)
            if n == 0:
                continue
            x_t = tuple(2 if hidden else token for hidden, token in zip(masked, x_0, strict=True))
            logits = table[x_t].numpy()
            nll = sum(np.logaddexp(logits[i, 0], logits[i, 1]) - logits[i, x_0[i]] for i in range(LENGTH) if masked[i])
            sizes = n, LENGTH - n + 1
            total += nll * beta(*sizes) * (1 - betainc(*sizes, low)) / length
        wanted.append(total)
    np.testing.assert_allclose(found, wanted, rtol=1e-8)


@pytest.mark.parametrize(
    "head",
    [
        m2s.LogScore(m2s.Absorbing(K, m2s.Linear())),
        m2s.Posterior(m2s.Uniform(K, m2s.Linear())),
        m2s.Posterior(m2s.Hybrid(K, p_uniform=0.1)),
        m2s.Posterior(m2s.Chain.absorbing(K, torch.full((4,), 0.5))),
    ],
    ids=["score", "uniform", "hybrid", "chain"],
)
@pytest.mark.parametrize("loss", [m2s.masked_cross_entropy, any_order])
def test_other_heads_and_processes_raise(loss: Callable[..., torch.Tensor], head: m2s.Head) -> None:
    x = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(TypeError, match=r"the masked objective is for m2s\.Posterior over m2s\.Absorbing"):
        loss(head, torch.zeros(1, 2, head.process.states), x, x, torch.tensor([0.5]))


def test_a_plugin_declares_that_it_only_masks() -> None:
    """Samplers for masks and estimators ask for the same capability as the loss."""
    head = m2s.Posterior(Masks())
    assert Masks().is_pure_mask and "md4" in supported(head)
    drawn = m2s.sample(lambda x_t, t, condition=None: torch.zeros(*x_t.shape, K + 1), head, (4, LENGTH), 4, "first_hitting")
    assert drawn.shape == (4, LENGTH) and int(drawn.max()) < K
