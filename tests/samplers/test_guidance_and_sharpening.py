"""The exact distribution of one step under guidance, temperature, top-k and top-p."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import closed_forms as forms
import m2s
from closed_forms import log, transition
from exact_steps import Sites
from m2s.process import RankOne
from m2s.samplers import (
    Analytic,
    Bayes,
    Euler,
    LogitsProcessor,
    Sampler,
)
from step_cases import HEADS, PLACES, RANK_ONE, SHARP, expected, rates_of, routes, same, sharpened, sites

pytestmark = pytest.mark.usefixtures("small_blocks")


def guided(c: np.ndarray, u: np.ndarray, g: float) -> np.ndarray:
    """c^g u^(1-g); 0 where c or u is 0."""
    inside = (c > 0) & (u > 0)
    c, u = np.where(inside, c, 1.0), np.where(inside, u, 1.0)
    return np.where(inside, np.exp(g * np.log(c) + (1 - g) * np.log(u)), 0.0)


@pytest.mark.parametrize("g", [0.0, 0.5, 2.0, 3.0])
@pytest.mark.parametrize(
    ("name", "kind"), [("uniform-linear", "posterior"), ("hybrid-0.2", "offset"), ("absorbing-linear", "posterior")]
)
def test_guidance(name: str, kind: str, g: float) -> None:
    """mu ∝ mu_c^g mu_u^(1-g) in Bayes and Euler steps, or R = R_c^g R_u^(1-g) in Euler steps of a posterior and of a score."""
    process = PLACES[name].process
    head, steps = HEADS[kind](process), [(0.9, 0.7), (0.5, 0.0)]
    offset = kind == "offset"
    problem = sites(name, head, steps, kinds=(0, 2))
    problem.unconditional = sites(name, head, steps, kinds=(1, 3)).output
    problem.logits_processor = LogitsProcessor(guidance=g)
    with_without = replace(problem, output=np.stack([problem.output, problem.unconditional], 1))

    def both(output: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
        mu = guided(*(forms.posterior(process, output[:, i], k, t, offset) for i in (0, 1)), g)
        return mu / mu.sum(-1, keepdims=True)

    def bayes(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.bayes(process, both(output, k, t), k, t, s)

    def euler(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        score = forms.score_from_posterior(process, both(output, k, t), k, t)
        return forms.euler(forms.reverse_rates(process, score, k, t), k, t - s)

    def on_rates(head: m2s.Head, output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.euler(guided(*(rates_of(head, output[:, i], k, t) for i in (0, 1)), g), k, t - s)

    hints = {"route": routes_of(process, both, with_without)}
    same(problem.distribution(Bayes(), ["route", "token", "jump"], hints), expected(bayes, with_without), problem)
    same(problem.distribution(Euler(), ["route", "token", "jump"]), expected(euler, with_without), problem)
    problem.logits_processor = LogitsProcessor(guidance=g, guide="rates")
    same(problem.distribution(Euler(), ["route", "token"]), expected(partial(on_rates, head), with_without), problem)
    free = m2s.LogScore(process)
    problem = replace(sites(name, free, steps, kinds=(0, 2)), logits_processor=LogitsProcessor(guidance=g, guide="rates"))
    problem.unconditional = sites(name, free, steps, kinds=(1, 3)).output
    with_without = replace(problem, output=np.stack([problem.output, problem.unconditional], 1))
    same(problem.distribution(Euler(), ["route", "token"]), expected(partial(on_rates, free), with_without), problem)


@pytest.mark.parametrize("g", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("uniform-linear", "posterior"), ("hybrid-0.2", "offset"), ("absorbing-linear", "posterior"), ("gaussian", "posterior")],
)
def test_guidance_of_steps(name: str, kind: str, g: float) -> None:
    """p(x_s) ∝ p_c(x_s)^g p_u(x_s)^(1-g) of the one-step distributions (UDLM's D-CFG), for Bayes and for analytic steps."""
    process = PLACES[name].process
    steps = [(0.9, 0.7), (0.5, 0.1)]

    def expected_of(closed_form: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def both(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
            conditional, unconditional = (closed_form(output[:, i], k, t, s) for i in (0, 1))
            combined = unconditional if g == 0 else guided(conditional, unconditional, g)
            combined = np.where(combined.sum(-1, keepdims=True) > 0, combined, conditional)  # no token has weight in both
            return combined / combined.sum(-1, keepdims=True)

        return both

    def check(head: m2s.Head, sampler: Sampler, closed_form: Callable[..., np.ndarray]) -> None:
        problem = replace(sites(name, head, steps, kinds=(0, 2)), logits_processor=LogitsProcessor(guidance=g, guide="step"))
        problem.unconditional = sites(name, head, steps, kinds=(1, 0)).output
        with_without = replace(problem, output=np.stack([problem.output, problem.unconditional], 1))
        same(problem.distribution(sampler, ["token"]), expected(expected_of(closed_form), with_without), problem)

    def bayes(output: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
        return forms.bayes(process, forms.posterior(process, output, k, t, kind == "offset"), k, t, s)

    def analytic(output: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
        score = np.exp(output)
        score[np.arange(len(k)), k] = 1.0
        return forms.analytic(process, score, k, t, s).clip(0)

    check(HEADS[kind](process), Bayes(), bayes)
    if isinstance(process, RankOne):
        check(m2s.LogScore(process), Analytic(), analytic)


def routes_of(process: m2s.Process, prediction: Callable[..., np.ndarray], problem: Sites) -> np.ndarray:
    """`routes` for a posterior that is a function of the output."""
    return expected(lambda output, k, t, s, at: routes(process, False, log(prediction(output, k, t)), k, t, s, at), problem)


@pytest.mark.parametrize("on", ["posterior", "leave_one_out"])
@pytest.mark.parametrize("name", ["uniform-exponential", "absorbing-cosine", "hybrid-0.6", "gaussian"])
def test_sharpening(name: str, on: str) -> None:
    """Temperature, top-k and top-p, on the posterior or the leave-one-out distribution, in a last step and an Euler step."""
    process = PLACES[name].process
    head, streamed = m2s.Posterior(process, offset="exact"), name in RANK_ONE
    problem = sites(name, head, [(0.9, 0.0), (0.3, 0.0)] if streamed else [(0.3, 0.0)], kinds=(0, 1))
    for number, (temperature, top_k, top_p) in enumerate(SHARP):
        problem.logits_processor = LogitsProcessor(temperature, top_k, top_p, on)

        def prediction(output: np.ndarray, k: np.ndarray, t: float, sharp: tuple = SHARP[number]) -> np.ndarray:
            mu = forms.posterior(process, output, k, t, True)
            column = np.moveaxis(transition(process, t)[:, k], 0, -1)
            if on == "posterior":
                return sharpened(mu, *sharp)
            nu = np.divide(mu, column, out=np.zeros_like(mu), where=column > 0)
            mu = sharpened(nu / nu.sum(-1, keepdims=True), *sharp) * column
            return mu / mu.sum(-1, keepdims=True)

        def bayes(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float, mu: Callable = prediction) -> np.ndarray:
            return mu(output, k, t)

        def euler(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float, mu: Callable = prediction) -> np.ndarray:
            rates = forms.reverse_rates(process, forms.score_from_posterior(process, mu(output, k, t), k, t), k, t)
            return forms.euler(rates, k, t - s)

        same(
            problem.distribution(Bayes(), ["route", "token", "jump"] if streamed else ["token"]),
            expected(bayes, problem),
            problem,
        )
        if number in (1, 3):
            found = problem.distribution(Euler(), ["route", "token", "jump"] if streamed else ["route", "token"])
            same(found, expected(euler, problem), problem)
