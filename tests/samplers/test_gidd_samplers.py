"""GIDD's adaptive and self-correcting samplers: steps against enumeration, distributions of samples, and errors."""

import itertools

import numpy as np
import pytest
import torch

import closed_forms as forms
import exact_steps
import m2s
from closed_forms import log
from exact_steps import GivenNoise, tensor
from m2s.cli import main
from m2s.samplers import Adaptive, Bayes, Euler, Move, Prediction, SelfCorrecting, Trajectory
from oracle import CASES, Oracle

EXACT = 1e-12
TOKENS = ["uniform-linear", "hybrid-0.2", "hybrid-0.6"]


def small(name: str) -> Oracle:
    return Oracle(CASES[name].noise, 3)


def predictions(oracle: Oracle, name: str, t: float, x: np.ndarray) -> tuple[m2s.Head, np.ndarray]:
    """The exact output at every sequence, for a head with the offset."""
    return m2s.Posterior(CASES[name].process, "exact"), log(oracle.leave_one_out(x, t))


def stepped(
    sampler: m2s.samplers.Sampler, head: m2s.Head, output: np.ndarray, x: np.ndarray, t: float, s: float, u: np.ndarray, **more
) -> np.ndarray:
    """One step of sequences x with the uniforms u."""
    count, free = more.get("reveal", 1), more.get("free")
    prediction = Prediction(
        head, tensor(output), tensor(x), tensor(np.full(len(x), t)), free=None if free is None else tensor(free)
    )
    move = Move(*(tensor(np.full(len(x), value)) for value in (t, s, count)))
    noise = GivenNoise({"token": tensor(u), "site": torch.zeros(x.shape)})  # ties: the first site
    return sampler.step(prediction, move, noise).numpy()


def gains(oracle: Oracle, x: np.ndarray, t: float) -> np.ndarray:
    """(max_z nu_z - nu_k) pi_t(k), where pi_t is P_t(.|z) without alpha_t at z, normalized."""
    nu, kernel = oracle.leave_one_out(x, t), oracle.noise.transition_matrix(t)
    noise = np.array([kernel[(y + 1) % oracle.noise.vocab if y < oracle.noise.vocab else 0, y] for y in range(len(kernel))])
    at_current = np.take_along_axis(nu, x[..., None], -1).squeeze(-1)
    return (nu.max(-1) - at_current) * (noise / noise.sum())[x]


@pytest.mark.parametrize("t", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("name", [*TOKENS, "absorbing-linear"])
def test_adaptive_step(name: str, t: float) -> None:
    """The site of greatest gain is drawn from nu. All others, and a site without gain, stay."""
    oracle = small(name)
    x = oracle.noisy
    head, output = predictions(oracle, name, t, x)
    gain = np.round(gains(oracle, x, t), 12)
    chosen = gain.argmax(-1)
    clear = np.sort(gain, -1)[:, -1] - np.sort(gain, -1)[:, -2] > 1e-9
    at = np.arange(len(x))

    def step(rows: np.ndarray, u: dict) -> np.ndarray:
        uniforms = np.repeat(u["token"][:, None], 3, 1)
        new = stepped(Adaptive(), head, output[rows], x[rows], t, t - 0.01, uniforms)
        others = np.arange(3) != chosen[rows][:, None]
        assert (new == x[rows])[others & clear[rows][:, None]].all()
        return new[np.arange(len(rows)), chosen[rows]]

    found = exact_steps.exact_distribution(step, len(x), oracle.noise.states, ["token"])
    nu = oracle.leave_one_out(x, t)[at, chosen]
    wanted = np.where((gain[at, chosen] > 0)[:, None], nu, forms.one_hot(x[at, chosen], oracle.noise.states))
    assert clear.mean() > 0.5
    np.testing.assert_allclose(found[clear], wanted[clear], rtol=0, atol=EXACT)
    for count in (2, 3):  # several sites, by decreasing gain
        new = stepped(Adaptive(), head, output, x, t, t - 0.01, np.full(x.shape, 0.3), reveal=count)
        order = np.argsort(-gain, -1, kind="stable")
        allowed = np.zeros(x.shape, dtype=bool)
        np.put_along_axis(allowed, order[:, :count], True, -1)
        drawn = (np.cumsum(oracle.leave_one_out(x, t), -1) <= 0.3).sum(-1)
        third = np.sort(gain, -1)[:, ::-1]
        sure = (count == 3) | (third[:, 1] - third[:, 2] > 1e-9)
        np.testing.assert_array_equal(new[sure], np.where(allowed & (gain > 0), drawn, x)[sure])


def test_adaptive_order_does_not_change_the_distribution_under_a_mask() -> None:
    """With exact predictions and one site a step, samples have the data distribution, up to rounding."""
    oracle = small("absorbing-linear")
    x, mask = oracle.noisy, 3
    head, output = m2s.Posterior(CASES["absorbing-linear"].process), log(oracle.posterior(oracle.noisy, 0.5))
    half = stepped(Adaptive(), head, output, x, 0.5, 0.4, np.full(x.shape, 0.5))
    left = (x == mask).any(-1)
    assert ((half != x).sum(-1) == left).all()
    chosen = (half != x).argmax(-1)
    assert len(set(chosen[left])) == 3  # not from left to right

    def step(rows: np.ndarray, u: dict) -> np.ndarray:
        uniforms = np.repeat(u["token"][:, None], 3, 1)
        return stepped(Adaptive(), head, output[rows], x[rows], 0.5, 0.4, uniforms)[np.arange(len(rows)), chosen[rows]]

    matrix, at = np.zeros((len(x), len(x))), np.arange(len(x))
    distributions = exact_steps.exact_distribution(step, len(x), 4, ["token"])
    np.add.at(matrix, (at[:, None], oracle.neighbors(x)[at, chosen]), distributions)
    p = (x == mask).all(-1).astype(float) @ np.linalg.matrix_power(matrix, 3)
    np.testing.assert_allclose(p[(x < mask).all(-1)], oracle.distribution, atol=EXACT)


def test_adaptive_fills_all_sites_in_the_given_steps() -> None:
    process = m2s.Absorbing(5, m2s.Linear())

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.arange(x_t.numel() * 6).reshape(*x_t.shape, 6) * 1.7)

    for length, steps in ((7, 1), (7, 2), (7, 3), (7, 7), (7, 20)):
        seen = Trajectory()
        _, log = m2s.sample(
            model,
            m2s.Posterior(process),
            (2, length),
            steps,
            "adaptive",
            callback=seen,
            diagnostics=True,
            micro_batch=2,
            seed=0,
        )
        assert log.masks_left == 0
        each = (seen.states[1:] != seen.states[:-1]).sum(-1)
        assert int(each.max()) == -(-length // steps)
    few = m2s.sample(
        model, m2s.Posterior(process), (2, 7), 3, Adaptive(sites=1), callback=(seen := Trajectory()), micro_batch=2, seed=0
    )
    assert int((seen.states[-2] == 5).sum()) == 2 * 5 and int(few.max()) < 5  # the last step draws all remaining sites


def test_adaptive_draws_from_the_sharpened_prediction() -> None:
    """`top_k=1` on the leave-one-out distribution is the most likely token."""
    oracle = small("hybrid-0.6")
    head, t, x = m2s.Posterior(CASES["hybrid-0.6"].process, "exact"), 0.4, oracle.noisy[::7]
    output = log(oracle.leave_one_out(x, t))
    logits_processor = m2s.samplers.LogitsProcessor(top_k=1, on="leave_one_out")
    prediction = Prediction(head, tensor(output), tensor(x), tensor(np.full(len(x), t)), logits_processor)
    move = Move(*(tensor(np.full(len(x), value)) for value in (t, t, 3)))
    new = (
        Adaptive()
        .step(prediction, move, GivenNoise({"token": tensor(np.full(x.shape, 0.99)), "site": torch.zeros(x.shape)}))
        .numpy()
    )
    np.testing.assert_array_equal(new, oracle.leave_one_out(x, t).argmax(-1))


# ---------------------------------------------------------------------------------------------------------------- correction


@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize("name", TOKENS)
def test_correction_step(name: str, sites: int) -> None:
    """A draw from nu^(1/T) at every site. The most probable of those that are more likely than the current token replace it."""
    oracle, t, temperature = small(name), 0.2, 0.7
    x = oracle.noisy
    head, output = predictions(oracle, name, t, x)
    sampler = SelfCorrecting(temperature=temperature, sites=sites, time=t)
    nu = oracle.leave_one_out(x, t)
    distribution = nu ** (1 / temperature)
    distribution /= distribution.sum(-1, keepdims=True)
    u = np.random.default_rng(0).random(x.shape)
    drawn = (np.cumsum(distribution, -1) <= u[..., None]).sum(-1)
    then, now, sure = (
        np.take_along_axis(p, z[..., None], -1).squeeze(-1) for p, z in ((nu, drawn), (nu, x), (distribution, drawn))
    )
    score = np.where(then > now * (1 + 1e-9), sure, 0.0)
    wanted = x.copy()
    for row in range(len(x)):
        for site in np.argsort(-score[row], kind="stable")[:sites]:
            if score[row, site] > 0:
                wanted[row, site] = drawn[row, site]
    new = stepped(sampler, head, output, x, t, t, u)
    np.testing.assert_array_equal(new, wanted)
    assert (new != x).any() and (new == x).all(-1).any()
    # Neither the likelihood of a changed site nor the fraction of first choices decreases.
    after = np.take_along_axis(nu, new[..., None], -1).squeeze(-1)
    assert (after >= now).all() and (after > now)[new != x].all()
    first = nu.argmax(-1)
    assert ((new == first).sum(-1) >= (x == first).sum(-1)).all()
    # A clamped site does not change.
    free = np.ones(x.shape, dtype=bool)
    free[:, 1] = False
    assert (stepped(sampler, head, output, x, t, t, u, free=free)[:, 1] == x[:, 1]).all()


def corrected(name: str, seed: int, corrections: int, temperature: float = 0.1, count: int = 60) -> tuple[Oracle, torch.Tensor]:
    """All states, [steps + 1, n, L], with exact conditionals Pr(X_0^i | X_0^{-i}) and a poor initial state."""
    oracle, process = small(name), CASES[name].process
    table = log(oracle.leave_one_out(oracle.noisy, 1e-9))

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return tensor(table[oracle.index(x_t.numpy())])

    sampler = SelfCorrecting(Euler(), corrections, temperature)
    m2s.sample(
        model,
        m2s.Posterior(process, "exact"),
        (count, 3),
        2,
        sampler,
        seed=seed,
        callback=(seen := Trajectory()),
        micro_batch=20,
    )
    return oracle, seen.states[2:]


@pytest.mark.parametrize("name", TOKENS)
def test_correction_never_lowers_the_likelihood_and_converges(name: str) -> None:
    """With exact conditionals every change raises the likelihood of the sequence. At the end no change of one token would."""
    oracle, states = corrected(name, 0, 40)
    vocab = oracle.noise.vocab
    full = np.zeros(len(oracle.noisy))
    full[oracle.index(oracle.clean)] = oracle.distribution
    p = full[oracle.index(states.numpy())]
    complete = (states < vocab).all(-1).numpy()
    assert complete[-1].all()
    assert (p[1:] >= p[:-1] - 1e-15)[complete[:-1]].all()
    assert ((states[1:] != states[:-1]).sum(-1) <= 1).all() and (states[0] != states[-1]).any()
    end = states[-1].numpy()
    around = full[oracle.neighbors(end)]
    assert (around.max((1, 2)) <= p[-1] + 1e-15).all()
    assert torch.equal(states[-1], states[-15])  # converged long before


def test_correction_depends_on_the_seed_only() -> None:
    one, two, other = (corrected("uniform-linear", seed, 12, temperature=1.0)[1] for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_any_predictor_and_the_time_of_the_corrections() -> None:
    process, times = m2s.Hybrid(4, 0.2), []

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        times.append(float(t[0]))
        return torch.sin(torch.arange(x_t.numel() * 5.0).reshape(*x_t.shape, 5) * 3.1)

    for predictor, calls in itertools.product((Bayes(), Euler(), Adaptive()), (1, 3)):
        times.clear()
        sampler = SelfCorrecting(predictor, corrections=calls, time=0.25)
        x = m2s.sample(model, m2s.Posterior(process), (3, 6), 4, sampler, "linear", micro_batch=3, seed=0)
        assert int(x.max()) < 4
        assert times[:4] == pytest.approx([0.999, 0.75, 0.5, 0.25]) and times[4 : 4 + calls] == pytest.approx([0.25] * calls)


def test_invalid_options_and_heads_raise() -> None:
    for wrong in ({"sites": 0}, {"sites": 1.5}):
        with pytest.raises((ValueError, TypeError), match="sites"):
            Adaptive(**wrong)
    for name, wrong in (("corrections", 0), ("sites", 0), ("temperature", 0.0), ("temperature", float("nan")), ("time", 0.0)):
        with pytest.raises(ValueError, match=name):
            SelfCorrecting(**{name: wrong})
    with pytest.raises(TypeError, match="predictor"):
        SelfCorrecting("bayes")
    uniform, gaussian = m2s.Uniform(4, m2s.Linear()), m2s.RateMatrix.gaussian(4, m2s.Linear())
    for sampler, name in itertools.product(("adaptive", "self_correcting"), ("score", "gaussian")):
        head = m2s.LogScore(uniform) if name == "score" else m2s.Posterior(gaussian)
        word = "draws from a posterior" if name == "score" else "supports rank-one processes"
        with pytest.raises(TypeError, match=word):
            m2s.sample(lambda x, t: torch.zeros(*x.shape, 4), head, (1, 2), sampler=sampler, seed=0)
    for masks in (m2s.Absorbing(4, m2s.Linear()), m2s.Hybrid(4, 0.0)):
        with pytest.raises(TypeError, match="every unmasked token is clean"):
            m2s.sample(lambda x, t: torch.zeros(*x.shape, 5), m2s.Posterior(masks), (1, 2), sampler="self_correcting", seed=0)


def test_the_command_line_has_them(tmp_path, capsys) -> None:
    run, quick = tmp_path / "run", ["--device", "cpu"]
    small = ["--batch", "8", "--network.width", "8", "--validation-samples", "4", *quick]
    main(["train", "digits", "--method", "gidd", "--steps", "1", "--out", str(run), *small])
    for sampler in ("adaptive", "self_correcting"):
        out = tmp_path / f"{sampler}.npz"
        main(["sample", str(run), "--n", "2", "--steps", "3", "--sampler", sampler, "--out", str(out), *quick])
        tokens = np.load(out)["tokens"]
        assert tokens.shape == (2, 64) and 0 <= tokens.min() <= tokens.max() < 17
    with pytest.raises(SystemExit) as error:
        main(["sample", str(run), "--n", "2", "--sampler", "adaptiv", "--out", str(tmp_path / "x.npz"), *quick])
    assert error.value.code == 2 and "did you mean adaptive?" in capsys.readouterr().err
