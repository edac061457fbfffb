"""The bridge, consistency, recovery and the reduction to MD4, against the enumeration of `oracle.py` in float64."""

import numpy as np
import pytest
import torch

import m2s
from oracle import Network, h
from theorem_tools import EVERY, TIMES, UNIFORM, bridge_rows, case, conditional_risk, log, site_losses, tensor


@EVERY
@pytest.mark.parametrize("t", TIMES)
def test_bridge_theorem(name: str, t: float) -> None:
    """Theorem 4.1: the exact posterior gives the exact score, through the map and through the heads' logits."""
    process, oracle = case(name)
    x, time = oracle.noisy, torch.tensor(t, dtype=torch.float64)
    weighted = oracle.weights(x, t) > 0
    exact, posterior = oracle.score(x, t), oracle.posterior(x, t)
    score = m2s.score_from_posterior(tensor(posterior), tensor(x), time, process).numpy()
    assert weighted.any()
    np.testing.assert_allclose(score[weighted], exact[weighted], rtol=1e-11)
    head = m2s.Posterior(process)
    np.testing.assert_allclose(head.posterior(log(posterior), tensor(x), time), posterior, rtol=1e-11, atol=1e-300)
    log_score = head.log_score(log(posterior), tensor(x), time).numpy()
    np.testing.assert_allclose(np.exp(log_score[weighted]), exact[weighted], rtol=1e-11)
    assert (np.take_along_axis(score, x[..., None], -1) == 1).all()


@pytest.mark.parametrize("name", ["absorbing-linear", "tabulated-absorbing"])
def test_bridge_theorem_needs_its_support_condition(name: str) -> None:
    """Assumption A.1: at an unmasked site the ratio to the mask is no function of the posterior, and it carries no weight."""
    process, oracle = case(name)
    x, t = oracle.noisy, 0.4
    posterior, exact = oracle.posterior(x, t), oracle.score(x, t)
    score = m2s.score_from_posterior(tensor(posterior), tensor(x), torch.tensor(t, dtype=torch.float64), process).numpy()
    unmasked = x != process.mask
    assert (oracle.weights(x, t)[unmasked] == 0).all()
    assert (exact[unmasked][:, -1] > 1.01 * score[unmasked][:, -1]).any()


@EVERY
def test_bridge_theorem_for_a_distribution_with_zeros(name: str) -> None:
    """Theorem 4.1 where most sequences have probability zero, and so some tokens at some sites."""
    process, oracle = case(name)
    oracle.distribution = np.where(np.random.default_rng(1).random(len(oracle.distribution)) < 0.1, oracle.distribution, 0.0)
    oracle.distribution[oracle.clean[:, 0] == 0] = 0.0
    oracle.distribution /= oracle.distribution.sum()
    t = 0.3
    x = oracle.noisy[oracle.marginal(t) > 0]
    weighted = oracle.weights(x, t) > 0
    posterior = oracle.posterior(x, t)
    score = m2s.score_from_posterior(tensor(posterior), tensor(x), torch.tensor(t, dtype=torch.float64), process).numpy()
    assert (posterior[:, 0, 0] == 0).all()
    np.testing.assert_allclose(score[weighted], oracle.score(x, t)[weighted], rtol=1e-11, atol=1e-300)


@EVERY
@pytest.mark.parametrize("t", [0.02, 0.5, 0.98])
def test_consistency(name: str, t: float) -> None:
    """Proposition 4.3: the excess conditional risk of a score is sum_y Q h(s_y, s*_y), at every site of every sequence."""
    process, oracle = case(name)
    x = oracle.noisy
    weight, exact, posterior = oracle.weights(x, t), oracle.score(x, t), oracle.posterior(x, t)
    log_score = np.log(exact) + Network(oracle, 2).logits(x, t)
    head = m2s.LogScore(process)
    risk = conditional_risk(site_losses(head, log_score, oracle, x, t).numpy(), posterior)
    least = conditional_risk(site_losses(head, np.log(exact), oracle, x, t).numpy(), posterior)
    counted = weight > 0
    excess = np.where(counted, weight * h(np.where(counted, np.exp(log_score), 1), np.where(counted, exact, 1)), 0.0).sum(-1)
    np.testing.assert_allclose(risk - least, excess, rtol=1e-9, atol=1e-11 * max(1, np.abs(risk).max()))
    assert (excess[counted.any(-1)] > 0).all()


@EVERY
@pytest.mark.parametrize("head", ["m2s", "unconstrained"])
@pytest.mark.parametrize("t", TIMES)
def test_score_entropy_is_its_definition(name: str, head: str, t: float) -> None:
    """The integrand of Eq. 8, weight and constant included, for every clean token, sequence and site."""
    process, oracle = case(name)
    x, network = oracle.noisy, Network(oracle, 4)
    score = np.exp(network.logits(x, t)) if head == "unconstrained" else oracle.bridge(network.posterior(x, t), x, t)
    chosen = m2s.LogScore(process) if head == "unconstrained" else m2s.Posterior(process)
    expected = oracle.losses(score, x, t)
    found = site_losses(chosen, network.logits(x, t), oracle, x, t).numpy()
    possible = oracle.noise.transition_matrix(t)[: oracle.noise.vocab, x].transpose(1, 2, 0) > 0
    np.testing.assert_allclose(found[possible], expected[possible], rtol=1e-9, atol=1e-13)
    assert (found[possible & (oracle.weights(x, t).sum(-1)[..., None] == 0)] == 0).all()


@pytest.mark.parametrize("name", [*UNIFORM, "hybrid-0.2", "gaussian"])
@pytest.mark.parametrize("t", TIMES)
def test_rank_condition(name: str, t: float) -> None:
    """Theorem 4.4: rank [B_+; 1] = K, and the library's bridge is that matrix, column by column."""
    process, oracle = case(name)
    vocab = oracle.noise.vocab
    for k in range(oracle.noise.states):
        rows = bridge_rows(oracle, k, t)
        augmented = np.vstack([rows / np.abs(rows).max(1, keepdims=True), np.ones(vocab)])
        assert np.linalg.matrix_rank(augmented, tol=1e-9) == vocab
        eye = torch.eye(oracle.noise.states, dtype=torch.float64)[:vocab]
        score = m2s.score_from_posterior(eye, torch.full((vocab,), k), torch.tensor(t, dtype=torch.float64), process).numpy()
        counted = [y for y in range(oracle.noise.states) if y != k and oracle.noise.rates(t)[y, k] > 0]
        np.testing.assert_allclose(score[:, counted].T, rows, rtol=1e-11)


@pytest.mark.parametrize(
    ("name", "k"), [("uniform-linear", 1), ("hybrid-0.2", 0), ("hybrid-0.2", 3), ("absorbing-linear", 3), ("gaussian", 2)]
)
def test_posterior_recovery_by_risk(name: str, k: int) -> None:
    """Theorem 4.4: the conditional M2S risk has one minimum, the true posterior: no gradient there, and descent finds it."""
    process, oracle = case(name)
    t, head = 0.4, m2s.Posterior(process)
    x = oracle.noisy[oracle.noisy[:, 0] == k][7:8]
    target = tensor(oracle.posterior(x, t)[0, :1, : oracle.noise.vocab])

    def risk(logits: torch.Tensor) -> torch.Tensor:
        return (target * site_losses(head, logits[None], oracle, x[:, :1], t)[0]).sum()

    padding = torch.zeros(1, oracle.noise.states - oracle.noise.vocab, dtype=torch.float64)
    at_truth = torch.log(target).requires_grad_()
    least = risk(torch.cat([at_truth, padding], -1))
    (gradient,) = torch.autograd.grad(least, at_truth)
    assert gradient.abs().max() < 1e-13 * max(1.0, least.item())
    for seed in range(3):
        logits = torch.tensor(np.random.default_rng(seed).normal(size=target.shape), requires_grad=True)
        assert float(risk(torch.cat([logits.detach(), padding], -1))) > least.item()
        solver = torch.optim.LBFGS(
            [logits], max_iter=300, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure(solver=solver, logits=logits) -> torch.Tensor:
            solver.zero_grad()
            loss = risk(torch.cat([logits, padding], -1))
            loss.backward()
            return loss

        solver.step(closure)
        assert (torch.softmax(logits, -1) - target).abs().max() < 1e-6


def test_posterior_recovery_fails_without_the_rank_condition() -> None:
    """Theorem 4.4, converse: one candidate leads into the end of a birth-death chain, and two posteriors have least risk."""
    process, oracle = case("birth-death")
    t, k = 0.3, 0
    rows = bridge_rows(oracle, k, t)
    augmented = np.vstack([rows, np.ones(4)])
    assert np.linalg.matrix_rank(augmented) == 2
    x = oracle.noisy[oracle.noisy[:, 0] == k][5:6]
    truth = oracle.posterior(x, t)[0, 0]
    null = np.linalg.svd(augmented)[2][-1]
    other = truth + 0.9 * null * np.min(truth / np.abs(null))
    risks = []
    for mu in (truth, other, np.full(4, 0.25)):
        losses = site_losses(m2s.Posterior(process), log(mu[None, None]), oracle, x[:, :1], t).numpy()
        risks.append(float(conditional_risk(losses, truth[None, None])[0, 0]))
    assert np.abs(truth - other).max() > 1e-2
    assert other.min() > 0
    assert risks[1] == pytest.approx(risks[0], rel=1e-12)
    assert risks[2] > risks[0] * (1 + 1e-3)


@pytest.mark.parametrize("name", ["absorbing-linear", "absorbing-cosine", "tabulated-absorbing"])
@pytest.mark.parametrize("t", TIMES)
def test_md4_reduction(name: str, t: float) -> None:
    """Theorem 4.6: under a mask the objective is (-alpha'/(1-alpha)) (-log mu_{x_0}) at masked sites and 0 elsewhere."""
    process, oracle = case(name)
    x, network = oracle.noisy, Network(oracle, 6)
    alpha = oracle.noise.transition_matrix(t)[0, 0]
    slope = oracle.noise.rates(t)[0, oracle.noise.states - 1] * alpha
    expected = np.where(
        (x == oracle.noise.vocab)[..., None],
        slope / (1 - alpha) * -np.log(network.posterior(x, t)[..., : oracle.noise.vocab]),
        0,
    )
    head, output = m2s.Posterior(process), network.logits(x, t)
    found = site_losses(head, output, oracle, x, t).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    assert (found[x != oracle.noise.vocab] == 0).all()
    if process.rank_one is not None:
        x_0 = torch.arange(process.vocab).expand(*x.shape, process.vocab)
        x_t, wide = tensor(x).unsqueeze(-1).expand_as(x_0), tensor(output).unsqueeze(-2).expand(*x_0.shape, process.states)
        masked = m2s.masked_cross_entropy(head, wide, x_0, x_t, torch.tensor(t, dtype=torch.float64))
        np.testing.assert_allclose(masked, expected, rtol=1e-11)
        exact = m2s.masked_cross_entropy(
            m2s.Posterior(process, offset="exact"), wide, x_0, x_t, torch.tensor(t, dtype=torch.float64)
        )
        np.testing.assert_allclose(exact, expected, rtol=1e-11)
