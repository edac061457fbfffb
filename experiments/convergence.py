"""The error of every sampler over its number of steps, without a network's error and without sampling noise.

    python experiments/convergence.py    # one minute on one core; writes experiments/results/convergence.json

The data are a random distribution over all sequences of three tokens of length three. The network is exact: its posterior is
computed by enumeration. One step of a sampler is a transition matrix over all sequences, so the distribution of its samples is
a product of matrices. Its distance from the data is the total variation. The order is minus the slope of log error over log
steps.

The times of the steps come from `Sampler.plan`. The steps of `bayes`, `ancestral`, `analytic`, `psi` and `absorbing_uniform`
come from `StepSampler.weights`. Other samplers have their closed form here. `tests/experiments/test_convergence.py` compares
samples of `m2s.sample` with each of the distributions.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.evaluation.likelihood import exact_network
from m2s.evaluation.likelihood.world import enumerate_sequences
from m2s.io import output_file, write_json
from m2s.provenance import provenance
from m2s.samplers import (
    AbsorbingUniform,
    Analytic,
    Ancestral,
    Bayes,
    Confidence,
    CounterNoise,
    Euler,
    FirstHitting,
    ForwardBackward,
    Informed,
    Move,
    OrdinalTauLeaping,
    Prediction,
    PredictorCorrector,
    Psi,
    Remasking,
    Sampler,
    StepSampler,
    TauLeaping,
)

RESULTS = Path(__file__).parent / "results" / "convergence.json"
VOCAB, LENGTH, SEED, SPREAD = 3, 3, 0, 1.5
T_MIN = 1e-6  # so small that the ends of time do not show in the errors
STEPS = (4, 8, 16, 32, 64, 128, 256, 512)
FITTED = 64  # the order is fitted from this number of steps on
DISPLACEMENTS = 512  # values of the sum of ordered jumps, of which those beyond 256 in absolute value wrap around

PROCESSES = {
    "uniform": m2s.Uniform(VOCAB, m2s.Linear()),
    "absorbing": m2s.Absorbing(VOCAB, m2s.Linear()),
    "gaussian": m2s.RateMatrix.gaussian(VOCAB, m2s.GeometricRate(8.0), 2.0, 1.5),
}
CASES: dict[str, tuple[str, Sampler]] = {
    "bayes": ("uniform", Bayes()),
    "euler": ("uniform", Euler()),
    "analytic": ("uniform", Analytic()),
    "tau_leaping": ("uniform", TauLeaping()),
    "absorbing_uniform": ("uniform", AbsorbingUniform()),
    "predictor_corrector": ("uniform", PredictorCorrector()),
    "informed": ("uniform", Informed()),
    "psi": ("uniform", Psi()),
    "ancestral": ("absorbing", Ancestral()),
    "euler, masks": ("absorbing", Euler()),
    "tau_leaping, masks": ("absorbing", TauLeaping()),
    "remasking": ("absorbing", Remasking()),
    "remasking, strength 1": ("absorbing", Remasking(strength=1.0)),
    "first_hitting": ("absorbing", FirstHitting()),
    "confidence": ("absorbing", Confidence()),
    "bayes, Gaussian rates": ("gaussian", Bayes()),
    "ordinal_tau_leaping": ("gaussian", OrdinalTauLeaping()),
    "forward_backward": ("gaussian", ForwardBackward()),
}
"""The process and the sampler of each row, with default options unless the name says otherwise."""


def data_distribution() -> Tensor:
    """Return the probabilities of all clean sequences, [VOCAB ** LENGTH], that `exact_network` knows."""
    normal = torch.randn(VOCAB**LENGTH, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return torch.softmax(SPREAD * normal, 0)


def joint_matrix(sites: Tensor) -> Tensor:
    """Return the transition matrix of sites that move independently, [N, S ** L].

    Args:
        sites: Distributions of the next token at each site of each sequence, [N, L, S].
    """
    product = sites[:, 0]
    for site in range(1, sites.shape[1]):
        product = (product[:, :, None] * sites[:, site][:, None, :]).flatten(1)
    return product


def neighbors(x: Tensor, states: int) -> Tensor:
    """Return the place of each sequence with site i replaced by y, [N, L, S].

    Args:
        x: All sequences, [N, L].
        states: S.
    """
    power = states ** torch.arange(x.shape[1] - 1, -1, -1)
    return ((x * power).sum(-1, keepdim=True) - x * power)[..., None] + power[:, None] * torch.arange(states)


def current(prediction: Prediction) -> Tensor:
    """Return the current tokens as unit vectors, [N, L, S].

    Args:
        prediction: The prediction at all sequences.
    """
    return torch.nn.functional.one_hot(prediction.x_t, prediction.process.states).double()


def reverse_rates(prediction: Prediction) -> Tensor:
    """Return Q_t(y -> k) s_y, [N, L, S].

    Args:
        prediction: The prediction at all sequences.
    """
    return m2s.rate_from_score(prediction.score(), prediction.x_t, prediction.t, prediction.process)


def weights_step(sampler: StepSampler, prediction: Prediction, move: Move) -> Tensor:
    """Return the matrix of a step whose sites are drawn from `StepSampler.weights`.

    Args:
        sampler: The sampler.
        prediction: The prediction at all sequences.
        move: The times of the step.
    """
    weights = sampler.weights(prediction, torch.minimum(move.s, prediction.t)).clamp(min=0)
    total = weights.sum(-1, keepdim=True)
    # A sequence that has probability 0, such as a token at t = 1 under masks, stays as it is.
    return joint_matrix(torch.where(total > 0, weights / total.where(total > 0, 1), current(prediction)))


def euler_step(sampler: Euler, prediction: Prediction, move: Move) -> Tensor:
    """Return the matrix of an Euler step: a site leaves with probability min(E, 1).

    Args:
        sampler: The sampler.
        prediction: The prediction at all sequences.
        move: The times of the step.
    """
    moved = (move.t - move.s)[:, None, None] * reverse_rates(prediction)
    moved = moved / moved.sum(-1, keepdim=True).clamp(min=1)
    return joint_matrix(moved + current(prediction) * (1 - moved.sum(-1, keepdim=True)))


def tau_leaping_step(sampler: TauLeaping, prediction: Prediction, move: Move) -> Tensor:
    """Return the matrix of a tau-leap: a site moves if it has exactly one jump; with an order, jumps add up.

    Args:
        sampler: The sampler.
        prediction: The prediction at all sequences.
        move: The times of the step.
    """
    rates = reverse_rates(prediction)
    return joint_matrix(leap(rates, (move.t - move.s)[:, None, None], prediction, sampler.ordinal))


def leap(rates: Tensor, duration: Tensor | float, prediction: Prediction, ordinal: bool) -> Tensor:
    """Return the distribution of every site after Poisson jumps at constant rates, [N, L, S].

    Args:
        rates: Rates k -> y, [N, L, S].
        duration: How long.
        prediction: The prediction at all sequences.
        ordinal: Displacements add up, and the sum is clipped to the vocabulary.
    """
    mean = duration * rates
    if not ordinal:
        moved = mean * torch.exp(-mean.sum(-1, keepdim=True))
        return moved + current(prediction) * (1 - moved.sum(-1, keepdim=True))
    k, states = prediction.x_t[..., None], rates.shape[-1]
    # The sum of a Poisson number of displacements has the characteristic function exp(phi - phi(0)).
    jumps = torch.zeros(*rates.shape[:-1], DISPLACEMENTS, dtype=torch.float64)
    jumps.scatter_add_(-1, (torch.arange(states) - k) % DISPLACEMENTS, mean)
    total = torch.fft.ifft(torch.exp(torch.fft.fft(jumps) - mean.sum(-1, keepdim=True))).real.clamp(min=0)
    place = torch.arange(DISPLACEMENTS)
    place = torch.where(place < DISPLACEMENTS // 2, place, place - DISPLACEMENTS)
    end = (k + place).clamp(0, states - 1)
    return torch.zeros_like(rates).scatter_add_(-1, end, total)


def gibbs_matrix(prediction: Prediction, chosen: Tensor) -> Tensor:
    """Return the matrix that draws one site from its distribution given all others.

    Args:
        prediction: The prediction at all sequences.
        chosen: The probability of each site to be drawn, [N, L].
    """
    score, x = prediction.score(), prediction.x_t
    moved = chosen[..., None] * score / score.sum(-1, keepdim=True)
    matrix = torch.zeros(len(x), len(x), dtype=torch.float64)
    return matrix.scatter_add_(1, neighbors(x, score.shape[-1]).flatten(1), moved.flatten(1))


def predictor_corrector_step(sampler: PredictorCorrector, prediction: Prediction, move: Move) -> Tensor:
    """Return the matrix of a Bayes step, or of a Gibbs move at a site that is chosen uniformly, or by the margin.

    Args:
        sampler: `PredictorCorrector` or `Informed`.
        prediction: The prediction at all sequences.
        move: The times of the step; a corrector has s = t.
    """
    if bool((move.s < move.t).any()):
        return weights_step(Bayes(), prediction, move)
    x = prediction.x_t
    if not isinstance(sampler, Informed):
        return gibbs_matrix(prediction, torch.full(x.shape, 1 / x.shape[1], dtype=torch.float64))
    log_score = prediction.score().log()
    other = log_score.masked_fill(current(prediction) > 0, -torch.inf).amax(-1)
    return gibbs_matrix(prediction, torch.softmax(other / sampler.selection_temperature, -1))  # log s_k = 0


def forward_backward_step(sampler: ForwardBackward, prediction: Prediction, move: Move) -> Tensor:
    """Return the matrix of an ordered tau-leap, or of a corrector's leap by forward plus reverse rates.

    Args:
        sampler: The sampler.
        prediction: The prediction at all sequences.
        move: The times of the step; a corrector has s = t.
    """
    if bool((move.s < move.t).any()):
        return tau_leaping_step(OrdinalTauLeaping(), prediction, move)
    forward = prediction.process.rates(prediction.t[:1])[0][prediction.x_t]
    rates = reverse_rates(prediction) + forward * (1 - current(prediction))
    return joint_matrix(leap(rates, sampler.leap, prediction, ordinal=True))


def remasking_step(sampler: Remasking, prediction: Prediction, move: Move) -> Tensor:
    """Return the matrix of a ReMDM step.

    Args:
        sampler: The sampler.
        prediction: The prediction at all sequences.
        move: The times of the step.
    """
    process = prediction.process
    assert isinstance(process, m2s.Absorbing)
    alpha_s, alpha_t = float(process.alpha(move.s[0])), float(process.alpha(move.t[0]))
    again = sampler.strength * (min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0)
    reveal = (alpha_s - (1 - again) * alpha_t) / (1 - alpha_t)
    mask = torch.nn.functional.one_hot(torch.tensor(process.mask), process.states).double()
    masked = prediction.masked.unsqueeze(-1)
    hidden, seen = (reveal * prediction.posterior() + (1 - reveal) * mask, again * mask + (1 - again) * current(prediction))
    return joint_matrix(torch.where(masked, hidden, seen))


def reveal_step(sampler: FirstHitting | Confidence, prediction: Prediction, move: Move) -> Tensor:
    """Return the matrix of a step that draws some masked sites: random ones, or those whose draws are most likely.

    Args:
        sampler: The sampler.
        prediction: The prediction at all sequences.
        move: The times of the step, and how many sites it fills.
    """
    x, mu, vocab = prediction.x_t, prediction.posterior(), prediction.process.vocab
    assert move.reveal is not None
    matrix = torch.zeros(len(x), len(x), dtype=torch.float64)
    power = prediction.process.states ** torch.arange(x.shape[1] - 1, -1, -1)
    for row, sequence in enumerate(x):
        masked = torch.nonzero(prediction.masked[row]).flatten()
        count = min(int(move.reveal[0]), len(masked))
        for tokens in itertools.product(range(vocab), repeat=len(masked)):
            each = mu[row, masked, torch.tensor(tokens, dtype=torch.long)]
            subsets = list(itertools.combinations(range(len(masked)), count))
            if isinstance(sampler, Confidence):
                subsets = [tuple(each.argsort(descending=True)[:count].tolist())]
            for subset in subsets:
                new = sequence.clone()
                new[masked[list(subset)]] = torch.tensor([tokens[place] for place in subset], dtype=torch.long)
                matrix[row, int((new * power).sum())] += each.prod() / len(subsets)
    return matrix


FORMS: dict[type[Sampler], Callable[..., Tensor]] = {
    Euler: euler_step,
    TauLeaping: tau_leaping_step,
    OrdinalTauLeaping: tau_leaping_step,
    PredictorCorrector: predictor_corrector_step,
    Informed: predictor_corrector_step,
    ForwardBackward: forward_backward_step,
    Remasking: remasking_step,
    FirstHitting: reveal_step,
    Confidence: reveal_step,
}


def step_matrix(sampler: Sampler, prediction: Prediction, move: Move) -> Tensor:
    """Return the transition matrix of one step over all sequences, [N, N].

    Args:
        sampler: The sampler.
        prediction: The prediction at all sequences.
        move: The times of the step.
    """
    distribution_of = weights_step if isinstance(sampler, StepSampler) else FORMS[type(sampler)]
    return distribution_of(sampler, prediction, move)


def generated(sampler: Sampler, process: m2s.Process, steps: int, grid: str, t_min: float = T_MIN) -> tuple[Tensor, int]:
    """Return the exact distribution of samples over clean sequences, and the number of network calls.

    Args:
        sampler: The sampler.
        process: The forward process.
        steps: Steps, as of `m2s.sample`.
        grid: A name in `m2s.samplers.GRIDS`.
        t_min: The network sees times in [t_min, 1 - t_min].
    """
    head, length = m2s.Posterior(process), LENGTH
    network, x = exact_network(head, length, SEED, SPREAD), enumerate_sequences(process.states, length)
    noise = CounterNoise(seed=0, samples=torch.zeros(1, dtype=torch.long), length=length, step=0)
    plan = sampler.plan(steps, grid, torch.tensor([length]), head, noise)
    p = joint_matrix(process.reference().expand(1, length, -1))[0]
    for number in range(len(plan.t)):
        t, s = plan.t[number].expand(len(x)), plan.s[number].expand(len(x))
        reveal = None if plan.reveal is None else plan.reveal[number]
        time = t.clamp(max=1 - t_min) if sampler.excludes_t_one else t
        prediction = Prediction(head, network(x, t.clamp(t_min, 1 - t_min)), x, time)
        # Samplers that count sites have random times, and reveal the last site in a step to a time above 0.
        last = bool((s <= 0).all()) and not isinstance(sampler, FirstHitting)
        p = p @ (joint_matrix(prediction.posterior()) if last else step_matrix(sampler, prediction, Move(t, s, reveal)))
    return p[(x < process.vocab).all(-1)], len(plan.t)


def total_variation(p: Tensor, q: Tensor) -> float:
    """Return half the sum of |p - q|.

    Args:
        p: Probabilities.
        q: Probabilities.
    """
    return float((p - q).abs().sum() / 2)


def order(steps: list[int], errors: list[float]) -> float | None:
    """Return minus the slope of log error over log steps, from `FITTED` steps on.

    It is None where the error is 0 up to rounding, and where no number of steps is so large.

    Args:
        steps: Numbers of steps.
        errors: The error after each of them.
    """
    points = [(step, error) for step, error in zip(steps, errors, strict=True) if step >= FITTED]
    if not points or min(error for _, error in points) < 1e-10:
        return None
    log_steps, log_errors = torch.tensor(points, dtype=torch.float64).log().unbind(-1)
    centered = log_steps - log_steps.mean()
    return -float((centered * log_errors).sum() / centered.square().sum())


def measure(name: str, grid: str, steps: tuple[int, ...] = STEPS) -> dict[str, Any]:
    """Return the errors of one sampler on one grid, and their order.

    Args:
        name: A name in `CASES`.
        grid: A name in `m2s.samplers.GRIDS`.
        steps: Numbers of steps.
    """
    process, sampler = CASES[name]
    distribution = data_distribution()
    found = [generated(sampler, PROCESSES[process], count, grid) for count in steps]
    errors = [total_variation(p, distribution) for p, _ in found]
    return {
        "name": name,
        "sampler": str(sampler),
        "process": str(PROCESSES[process]),
        "grid": grid,
        "steps": list(steps),
        "calls": [calls for _, calls in found],
        "total_variation": errors,
        "order": order(list(steps), errors),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure all rows and write the result file; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="the result file")
    options = parser.parse_args(arguments)
    output_file(options.results, (".json",))
    torch.set_num_threads(1)
    rows = []
    for name, grid in itertools.product(CASES, ("cosine", "linear")):
        rows.append(measure(name, grid))
        fitted = "exact" if rows[-1]["order"] is None else f"order {rows[-1]['order']:.2f}"
        print(
            f"{name:24s} {grid:7s} {fitted:12s}", " ".join(f"{error:.2e}" for error in rows[-1]["total_variation"]), flush=True
        )
    world = {"vocab": VOCAB, "length": LENGTH, "seed": SEED, "spread": SPREAD, "t_min": T_MIN, "fitted_from": FITTED}
    write_json(options.results, {"world": world, "rows": rows, **provenance(torch.device("cpu"))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
