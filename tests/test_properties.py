"""Properties over processes, schedules, vocabularies, times and logits, in float64 to 1e-10."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import m2s

settings.register_profile("m2s", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("m2s")

SITES = (2, 3)


@st.composite
def schedules(draw: st.DrawFn, ends_at_zero: bool = False) -> m2s.Schedule:
    options: list[st.SearchStrategy[m2s.Schedule]] = [
        st.just(m2s.Linear()),
        st.just(m2s.Cosine()),
        st.floats(0.5, 12).map(lambda horizon: m2s.Exponential(horizon=horizon)),
        st.floats(1e-4, 0.1).map(lambda eps: m2s.LogLinear(eps=eps)),
        st.tuples(st.floats(1e-5, 0.1), st.floats(1, 20)).map(lambda s: m2s.Geometric(sigma_min=s[0], sigma_max=s[1])),
    ]
    return draw(st.one_of(options[:2] if ends_at_zero else options))


@st.composite
def rank_one(draw: st.DrawFn) -> m2s.Process:
    vocab = draw(st.integers(2, 12))
    kind = draw(st.sampled_from(["uniform", "absorbing", "hybrid"]))
    if kind == "hybrid":
        return m2s.Hybrid(vocab, p_uniform=draw(st.one_of(st.just(0.0), st.floats(0.01, 0.9))))
    return (m2s.Uniform if kind == "uniform" else m2s.Absorbing)(vocab, draw(schedules()))


@st.composite
def tabulated(draw: st.DrawFn) -> m2s.Process:
    vocab = draw(st.integers(2, 7))
    schedule = draw(schedules())
    kind = draw(st.sampled_from(["random", "gaussian", "birth-death", "uniform", "absorbing"]))
    if kind == "gaussian":
        return m2s.RateMatrix.gaussian(
            vocab, schedule, jump_width=draw(st.floats(1, 6)), stationary_width=draw(st.floats(1, 50))
        )
    if kind == "uniform":
        return m2s.RateMatrix.uniform(vocab, schedule)
    if kind == "absorbing":
        return m2s.RateMatrix.absorbing(vocab, schedule)
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    if kind == "birth-death":
        birth, death = torch.from_numpy(rng.uniform(0.2, 2, (2, vocab - 1)))
        return m2s.RateMatrix.birth_death(birth, death, schedule)
    rates = torch.from_numpy(rng.uniform(0.05, 2, (vocab, vocab)))
    rates.fill_diagonal_(0)
    return m2s.RateMatrix(rates - torch.diag(rates.sum(-1)), schedule)


anything = st.one_of(rank_one(), tabulated())


@st.composite
def situations(draw: st.DrawFn, process: st.SearchStrategy[m2s.Process] = anything, edge: float = 1e-3) -> tuple:
    """(process, x_0, x_t, t, output): x_t really drawn from x_0, logits from flat to peaked."""
    chosen = draw(process)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x_0 = torch.randint(chosen.vocab, SITES, generator=rng)
    t = torch.tensor([draw(st.floats(edge, 1 - edge)) for _ in range(SITES[0])], dtype=torch.float64)
    x_t = chosen.corrupt(x_0, t, rng)
    scale = draw(st.sampled_from([0.0, 0.5, 3.0, 15.0]))
    output = scale * torch.randn(*SITES, chosen.states, generator=rng, dtype=torch.float64)
    return chosen, x_0, x_t, t, output


def close(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | float = 1.0, tolerance: float = 1e-10) -> None:
    if not a.numel():  # a selection of sites can be empty
        return
    error = ((a - b).abs() / torch.as_tensor(scale).clamp(min=1e-300)).nan_to_num(nan=torch.inf).max()
    assert error <= tolerance, f"{float(error):.2e}"


@given(schedules(), st.floats(1e-6, 1 - 1e-6), st.floats(0, 1))
def test_schedule_functions_agree(schedule: m2s.Schedule, end: float, fraction: float) -> None:
    """alpha + beta = 1, sigma = -log alpha, the derivatives of both, and 1 - alpha_t/alpha_s."""
    t = torch.tensor(end, dtype=torch.float64)
    s = t * fraction
    alpha, beta = schedule.alpha(t), schedule.beta(t)
    close(alpha + beta, torch.ones_like(t))
    close(torch.exp(-schedule.sigma(t)), alpha, alpha)
    close(-torch.expm1(-schedule.sigma(t)), beta, beta)
    close(schedule.alpha_prime(t), -schedule.sigma_prime(t) * alpha, schedule.alpha_prime(t).abs())
    close(1 - schedule.one_minus_alpha_ratio(s, t), alpha / schedule.alpha(s))
    moved = t.clone().requires_grad_()
    (slope,) = torch.autograd.grad(schedule.sigma(moved), moved)
    close(schedule.sigma_prime(t), slope, slope.abs())
    (slope,) = torch.autograd.grad(schedule.alpha(moved), moved)
    close(schedule.alpha_prime(t), slope, slope.abs())


@given(schedules(), st.floats(1e-7, 0.01))
def test_schedules_keep_their_digits_in_float32_near_both_ends(schedule: m2s.Schedule, small: float) -> None:
    """beta and sigma at small t, alpha at t near one: a few units in the last place, against float64 at the same time."""
    for t in (torch.tensor(small, dtype=torch.float32), 1 - torch.tensor(small, dtype=torch.float32)):
        wide = t.double()
        for name in ("alpha", "beta", "sigma", "sigma_prime", "alpha_prime"):
            value, exact = getattr(schedule, name)(t).double(), getattr(schedule, name)(wide)
            amplified = 1 + schedule.sigma(wide) if name in ("alpha", "alpha_prime") else 2.0
            close(value, exact, exact.abs() * amplified, tolerance=1e-6)


@given(anything, st.floats(1e-5, 1 - 1e-5), st.floats(0, 1))
def test_transition_matrices_are_stochastic_and_compose(process: m2s.Process, end: float, fraction: float) -> None:
    t = torch.tensor([end], dtype=torch.float64)
    s = t * fraction
    early, step, late = process.transition_matrix(s), process.step_transition_matrix(s, t), process.transition_matrix(t)
    for transition in (early, step, late):
        assert (transition >= 0).all()
        close(transition.sum(-1), torch.ones(1, process.states, dtype=torch.float64))
    close(early @ step, late)
    close(process.rates(t).sum(-1) / process.rates(t).abs().max(), torch.zeros(1, process.states, dtype=torch.float64))
    off_diagonal = process.rates(t) - torch.diag_embed(process.rates(t).diagonal(dim1=-2, dim2=-1))
    assert (off_diagonal >= 0).all()
    distribution = process.reference()
    assert (distribution >= 0).all()
    close(distribution.sum(), torch.ones((), dtype=torch.float64))


@given(situations())
def test_rows_columns_and_rates_are_those_of_the_matrices(situation: tuple) -> None:
    process, x_0, x_t, t, _ = situation
    transition, rates = process.transition_matrix(t), process.rates(t)
    for b in range(SITES[0]):
        for i in range(SITES[1]):
            start, end = int(x_0[b, i]), int(x_t[b, i])
            close(process.rows(x_0, t)[b, i], transition[b, start])
            close(process.columns(x_t, t)[b, i], transition[b, :, end])
            into = rates[b, :, end].clone()
            into[end] = 0
            close(process.rates_into(x_t, t)[b, i], into, into.abs().max().clamp(min=1))
    kl = process.prior_kl(x_0, t)
    rows = process.rows(x_0, t)
    expected = torch.where(rows > 0, rows * (rows.log() - process.reference().log()), 0).sum(-1)
    assert torch.equal(kl.isinf(), expected.isinf())
    close(kl.where(kl.isfinite(), 0), expected.where(kl.isfinite(), 0), kl.where(kl.isfinite(), 1).clamp(min=1))


@given(situations())
def test_conversions_agree(situation: tuple) -> None:
    """Posterior, leave-one-out distribution and score convert into each other, and the head's logarithms agree."""
    process, _, x_t, t, output = situation
    head = m2s.Posterior(process)
    mu = head.posterior(output, x_t, t)
    close(mu.sum(-1), torch.ones(SITES, dtype=torch.float64))
    if process.mask is not None:
        assert (mu[..., process.mask] == 0).all()
    score = m2s.score_from_posterior(mu, x_t, t, process)
    nu = m2s.leave_one_out_from_posterior(mu, x_t, t, process)
    close(m2s.posterior_from_leave_one_out(nu, x_t, t, process), mu)
    close(m2s.score_from_leave_one_out(nu, x_t, t, process), score, score.clamp(min=1e-12))
    close(head.log_score(output, x_t, t).exp(), score, score.clamp(min=1e-12))
    assert (score.gather(-1, x_t.unsqueeze(-1)) == 1).all()
    rate = m2s.rate_from_score(score, x_t, t, process)
    counted = process.rates_into(x_t, t) > 0
    again = m2s.score_from_rate(rate, x_t, t, process)
    close(torch.where(counted, again, 0), torch.where(counted, score, 0), score.clamp(min=1))


@given(situations())
def test_offset_moves_between_the_two_heads(situation: tuple) -> None:
    """Posterior(offset="exact") on logits l is Posterior(offset="none") on l + log P_t(k|.), to the loss."""
    process, x_0, x_t, t, output = situation
    exact, plain = m2s.Posterior(process, offset="exact"), m2s.Posterior(process)
    shifted = output + process.columns(x_t, t).clamp(min=1e-300).log()
    close(exact.posterior(output, x_t, t), plain.posterior(shifted, x_t, t))
    loss = m2s.score_entropy(exact, output, x_0, x_t, t)
    close(loss, m2s.score_entropy(plain, shifted, x_0, x_t, t), loss.clamp(min=1))


def direct(process: m2s.Process, score: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> tuple:
    """sum_y Q (s - r log s + r log r - r) as the paper writes it, and the size of its terms."""
    rows = process.rows(x_0, t)
    r = rows / rows.gather(-1, x_t.unsqueeze(-1))
    weight = process.rates_into(x_t, t)
    log_s = torch.where(score > 0, score.where(score > 0, 1).log(), 0)
    terms = torch.stack([score, -r * log_s, torch.special.xlogy(r, r), -r])
    terms = torch.where(weight > 0, weight * terms, 0)
    return terms.sum((0, -1)), terms.abs().sum((0, -1))


@given(situations(), st.sampled_from(["m2s", "offset", "unconstrained", "rate"]))
def test_loss_and_gradient_are_the_definition(situation: tuple, name: str) -> None:
    process, x_0, x_t, t, output = situation
    head = {
        "m2s": m2s.Posterior(process),
        "offset": m2s.Posterior(process, offset="exact"),
        "unconstrained": m2s.LogScore(process),
        "rate": m2s.FactorizedRate(process),
    }[name]
    a, b = output.clone().requires_grad_(), output.clone().requires_grad_()
    loss = m2s.score_entropy(head, a, x_0, x_t, t)
    expected, size = direct(process, head.log_score(b, x_t, t).exp(), x_0, x_t, t)
    close(loss, expected, size.clamp(min=1))
    assert (loss >= 0).all()
    loss.sum().backward()
    expected.sum().backward()
    steep = size.unsqueeze(-1).clamp(min=1) if process.rank_one is not None else size.unsqueeze(-1).clamp(min=1) * 10
    assert a.grad is not None and b.grad is not None
    close(a.grad, b.grad, steep.detach())


@given(situations())
def test_loss_vanishes_at_certainty_and_nowhere_else(situation: tuple) -> None:
    """mu = e_{x_0} gives s = r: no loss. Any other posterior loses at every site into which a rate leads."""
    process, x_0, x_t, t, output = situation
    head = m2s.Posterior(process)
    certain = torch.full_like(output, -80.0).scatter(-1, x_0.unsqueeze(-1), 80.0)
    sure = m2s.score_entropy(head, certain, x_0, x_t, t)
    unsure = m2s.score_entropy(head, torch.zeros_like(output), x_0, x_t, t)
    weighed = process.rates_into(x_t, t).sum(-1) > 0
    close(sure, torch.zeros_like(sure), process.rates_into(x_t, t).sum(-1).clamp(min=1))
    several = (process.columns(x_t, t)[..., : process.vocab] > 0).sum(-1) > 1
    assert (unsure[weighed & several] > sure[weighed & several]).all()
    assert (unsure[~weighed] == 0).all()


@given(situations())
def test_bayes_step_is_a_distribution_and_the_analytic_step_agrees(situation: tuple) -> None:
    process, _, x_t, t, output = situation
    mu = m2s.Posterior(process).posterior(output, x_t, t)
    for fraction in (0.0, 0.3, 0.99):
        distribution = m2s.bayes_probabilities(mu, x_t, t * fraction, t, process)
        assert (distribution >= 0).all()
        close(distribution.sum(-1), torch.ones(SITES, dtype=torch.float64))
        known = (process.columns(x_t, t)[..., : process.vocab] > 0).sum(-1) == 1
        if process.rank_one is not None:
            score = m2s.score_from_posterior(mu, x_t, t, process)
            weights = m2s.analytic_weights(score, x_t, t * fraction, t, process)
            size = score.sum(-1, keepdim=True) / (process.alpha(t) / process.alpha(t * fraction))[:, None, None]
            close(weights[~known], distribution[~known], size[~known].clamp(min=1))


@given(situations(edge=0.02))
def test_bridge_has_an_affine_inverse(situation: tuple) -> None:
    """affine_inverse and project return the posterior of its score, and classify calls it realizable."""
    process, _, x_t, t, output = situation
    head = m2s.Posterior(process)
    mu = head.posterior(output, x_t, t)
    score = head.log_score(output, x_t, t).exp()
    diagnosis = m2s.diagnose(score, x_t, t, process)
    if process.rank_one is not None:
        noise = 1 + score.sum(-1, keepdim=True)
        close(m2s.affine_inverse(score, x_t, t, process), mu, noise)
        close(m2s.project(score, x_t, t, process), mu, noise)
        assert (diagnosis.classes >= 2).all()
    # a tabulated bridge may be close to singular: then only the score is determined
    again = m2s.score_from_posterior(m2s.project(score, x_t, t, process), x_t, t, process)
    counted = process.rates_into(x_t, t) > 0
    close(
        torch.where(counted, again, 0), torch.where(counted, score, 0), score.sum(-1, keepdim=True).clamp(min=1), tolerance=1e-7
    )


@given(situations(rank_one(), edge=0.01), st.floats(0.1, 4))
def test_projection_lands_in_the_simplex_and_stays(situation: tuple, spread: float) -> None:
    """For any positive score: a posterior comes back, its score is realizable, and projecting again changes nothing."""
    process, _, x_t, t, output = situation
    score = torch.exp(spread * torch.tanh(output)).scatter(-1, x_t.unsqueeze(-1), 1.0)
    mu = m2s.project(score, x_t, t, process)
    assert (mu >= 0).all()
    close(mu.sum(-1), torch.ones(SITES, dtype=torch.float64))
    repaired = m2s.score_from_posterior(mu, x_t, t, process)
    close(m2s.project(repaired, x_t, t, process), mu, 1 + repaired.sum(-1, keepdim=True))
    assert (m2s.classify(repaired, x_t, t, process) >= 2).all()
    diagnosis = m2s.diagnose(repaired, x_t, t, process, s=t * 0.9)
    assert (diagnosis.negative_mass <= 1e-10 * repaired.sum(-1).clamp(min=1)).all()
