"""What is recorded of the library: processes, heads, losses, the NELBO, realizability and samplers, on formulas as networks."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import m2s
from snapshot_parts.runs import Runs
from snapshot_parts.values import Entry, attempt, bits, progress, tensor

Network = Callable[..., Tensor]

VOCAB, LENGTH, SAMPLES, STEPS = 11, 6, 16, 6
ROWS = 16  # of every call of the network in sampling
TIMES = (0.001, 0.02, 0.3, 0.6, 0.95, 0.999)
CHAIN = 20  # steps of the finite chains

SCHEDULES: dict[str, Callable[[], Any]] = {
    "linear": m2s.Linear,
    "exponential": lambda: m2s.Exponential(5.0),
    "log-linear": lambda: m2s.LogLinear(1e-3),
    "geometric": lambda: m2s.Geometric(1e-2, 7.0),
    "cosine": m2s.Cosine,
    "geometric-rate": lambda: m2s.GeometricRate(7.0),
    "rescaled": lambda: m2s.Rescaled(m2s.Cosine(), 1e-2),
}
PROCESSES: dict[str, Callable[[int], Any]] = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "uniform-geometric": lambda vocab: m2s.Uniform(vocab, m2s.Geometric(1e-2, 7.0)),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "absorbing-log-linear": lambda vocab: m2s.Absorbing(vocab, m2s.LogLinear(1e-3)),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, p_uniform=0.2),
    "gaussian": lambda vocab: m2s.RateMatrix.gaussian(vocab, m2s.GeometricRate(7.0), 1.5, 2.0 * vocab),
    "birth-death": lambda vocab: m2s.RateMatrix(neighbors(vocab), m2s.Exponential(3.0)),
    "tabulated-absorbing": lambda vocab: m2s.RateMatrix.absorbing(vocab, m2s.Cosine()),
    "chain-uniform": lambda vocab: m2s.Chain(mixing(vocab, vocab)),
    "chain-absorbing": lambda vocab: m2s.Chain(mixing(vocab + 1, 1), mask=True),
}
HEADS: dict[str, Callable[[Any], Any]] = {
    "posterior": lambda process: m2s.Posterior(process, offset="none"),
    "leave-one-out": lambda process: m2s.Posterior(process, offset="exact"),
    "ordinal": m2s.Ordinal,
    "log-score": m2s.LogScore,
    "scaled-log-score": lambda process: m2s.LogScore(process, scale="sigma"),
    "factorized-rate": m2s.FactorizedRate,
    "projected": lambda process: m2s.Projected(m2s.LogScore(process)),
}
SAMPLERS = (
    *("bayes", "euler", "analytic", "tau_leaping", "ordinal_tau_leaping", "forward_backward"),
    *("predictor_corrector", "ancestral", "first_hitting", "confidence", "remasking", "adaptive"),
    "self_correcting",
)


COVERED = {  # heads that are not recorded over every process
    "ordinal": ("uniform", "gaussian", "chain-uniform"),
    "factorized-rate": ("uniform", "absorbing", "hybrid", "gaussian"),
}


def neighbors(vocab: int) -> Tensor:
    """Return the rates of a chain that moves to adjacent levels, up more often than down.

    Args:
        vocab: Number of levels.
    """
    rates = torch.zeros(vocab, vocab, dtype=torch.float64)
    rates.diagonal(1).fill_(1.5)
    rates.diagonal(-1).fill_(1.0)
    return rates - torch.diag(rates.sum(-1))


def mixing(states: int, reached: int) -> Tensor:
    """Return matrices [CHAIN, states, states] that replace a token by one of the last `reached` states.

    Args:
        states: Number of states.
        reached: Number of states that noise leads to.
    """
    beta = 1 / torch.arange(CHAIN, 0, -1, dtype=torch.float64)[:, None, None]
    noise = torch.zeros(states, dtype=torch.float64)
    noise[-reached:] = 1 / reached
    return (1 - beta) * torch.eye(states, dtype=torch.float64) + beta * noise


def seeded(*seeds: object) -> torch.Generator:
    """Return a generator whose seed is a hash of the arguments.

    Args:
        *seeds: Numbers or strings.
    """
    text = " ".join(map(str, seeds))
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


class Formula:
    """A fixed network: each position sees its token, its place, the mean over all positions, the time and a label.

    Args:
        columns: Width of the output.
        dtype: Of the output. Everything before is computed in float64, so that rounding seldom reaches a float32 output.
        unprojected: Return `m2s.Unprojected` in place of logits.
    """

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32, unprojected: bool = False) -> None:
        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=seeded("network", *shape), dtype=torch.float64)

        width = 24
        self.tokens, self.places, self.labels = weights(columns, width), weights(64, width), weights(8, width)
        self.frequencies, self.mix = 3 * weights(width), weights(width, width) / width**0.5
        self.last = weights(columns, width) * (2 / width**0.5)
        self.dtype, self.unprojected = dtype, unprojected

    def __call__(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        hidden = self.tokens[x_t] + self.places[: x_t.shape[1]] + torch.cos(t.double()[:, None, None] * self.frequencies)
        if condition is not None:
            hidden = hidden + self.labels[condition][:, None]
        hidden = torch.tanh(hidden + hidden.mean(1, keepdim=True) @ self.mix)
        if self.unprojected:
            return m2s.Unprojected(hidden.to(self.dtype), self.last.to(self.dtype))
        return (hidden @ self.last.T).to(self.dtype)


def built(vocab: int, heads: Mapping[str, Callable[[Any], Any]] = HEADS, chains: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield every head over every process, with a name. Some pairs do not exist (TypeError).

    Args:
        vocab: Number of tokens.
        heads: Constructors of heads by name.
        chains: Include finite chains.
    """
    for (process_name, process), (name, head) in itertools.product(PROCESSES.items(), heads.items()):
        if process_name not in COVERED.get(name, PROCESSES) or (process_name.startswith("chain") and not chains):
            continue
        try:
            yield f"{process_name}/{name}", head(process(vocab))
        except TypeError:
            continue


def example(process: Any, name: str, dtype: torch.dtype, length: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return clean tokens, noisy tokens, times and a random network output, one row for each of TIMES.

    Args:
        process: The forward process.
        name: Seed of the random numbers.
        dtype: Of times and output.
        length: Sites per row.
    """
    generator = seeded("example", name)
    t = torch.tensor(TIMES, dtype=dtype)
    x_0 = torch.randint(process.vocab, (len(t), length), generator=generator)
    x_t = process.corrupt(x_0, t, generator)
    output = 2 * torch.randn(*x_0.shape, process.states, generator=generator, dtype=torch.float64)
    return x_0, x_t, t, output.to(dtype)


def processes(_: Runs) -> Iterator[Entry]:
    """Yield schedules at several times, and corrupted tokens of every process."""
    t = torch.tensor([0.0, *TIMES, 1.0], dtype=torch.float64)
    for name, schedule in SCHEDULES.items():
        yield f"processes/{name}/alpha", tensor(schedule().alpha(t))
        yield f"processes/{name}/sigma", tensor(schedule().sigma(t))
    for name, process in PROCESSES.items():
        x_0 = torch.arange(len(TIMES) * 12).reshape(len(TIMES), 12) % 17
        x_t = process(17).corrupt(x_0, torch.tensor(TIMES), seeded("corrupt"))
        yield f"processes/{name}/corrupt", tensor(x_t)


def heads(_: Runs) -> Iterator[Entry]:
    """Yield posterior and log-score of every head over every process."""
    for name, head in built(17):
        _, x_t, t, output = example(head.process, name, torch.float32)
        for method in (head.posterior, head.log_score):
            yield f"heads/{name}/{method.__name__}", attempt(method, output, x_t, t)


def losses(_: Runs) -> Iterator[Entry]:
    """Yield score entropy and its gradient for every process and head (K = 17), some at K = 5,000; m2s.Objective."""
    for dtype in (torch.float32, torch.float64):
        for name, head in built(17, chains=False):
            yield from loss_entries(name, head, dtype)
    large = {name: HEADS[name] for name in ("posterior", "leave-one-out", "log-score", "factorized-rate")}
    for kind in ("uniform", "absorbing", "hybrid"):
        for name, head in large.items():
            yield from loss_entries(f"{kind}/{name}/K=5000", head(PROCESSES[kind](5_000)), torch.float32)
    for name, head in built(17, chains=False):
        x_0, _, t, _ = example(head.process, name, torch.float64)
        objective = m2s.Objective(Formula(head.process.states), head, generator=seeded("objective"))
        weight = (torch.arange(x_0.numel()).reshape(x_0.shape) % 3).double()
        yield f"losses/{name}/objective", tensor(objective(x_0, t, weight=weight, condition=torch.arange(len(t))))


def loss_entries(name: str, head: Any, dtype: torch.dtype) -> Iterator[Entry]:
    """Yield score entropy and its gradient in the network's output.

    Args:
        name: Name of the entries.
        head: The head.
        dtype: Of times and output.
    """
    x_0, x_t, t, output = example(head.process, name, dtype)
    output.requires_grad_()
    trained = not isinstance(head, m2s.Projected)
    with torch.set_grad_enabled(trained):
        loss = m2s.score_entropy(head, output, x_0, x_t, t)
    yield f"losses/{name}/{bits(dtype)}/value", tensor(loss)
    if trained:
        (gradient,) = torch.autograd.grad(loss[loss.isfinite()].sum(), output)
        yield f"losses/{name}/{bits(dtype)}/gradient", tensor(gradient)


def elbo(_: Runs) -> Iterator[Entry]:
    """Yield the NELBO of a fixed network, its standard error and its three terms, for every process and head."""
    for name, head in built(VOCAB, chains=False):
        x_0 = torch.randint(VOCAB, (6, LENGTH), generator=seeded("elbo"))
        try:
            found = m2s.elbo(Formula(head.process.states), head, x_0, passes=2, generator=seeded("elbo", name))
        except ValueError as error:  # no projection at t = 1, where tokens survive
            yield f"elbo/{name}", type(error).__name__
            continue
        terms = torch.stack([found.nats, found.standard_error, found.integral, found.prior, found.reconstruction])
        yield f"elbo/{name}", {**tensor(terms), "means": terms.mean(-1).tolist()}


def realizability(_: Runs) -> Iterator[Entry]:
    """Yield `m2s.classify`, `affine_inverse` and `project` on random scores, far from realizable, near it, and realizable."""
    cases = [(name, 17) for name in PROCESSES if not name.startswith("chain")] + [("uniform", 5_000), ("absorbing", 5_000)]
    for (kind, vocab), dtype in itertools.product(cases, (torch.float32, torch.float64)):
        process = PROCESSES[kind](vocab)
        _, x_t, t, output = example(process, kind, dtype)
        posterior = m2s.Posterior(process, offset="exact")
        realizable = posterior.log_score(output, x_t, t)
        scores = {"random": output}
        if dtype == torch.float64:
            scores |= {"near": realizable + 0.01 * output, "realizable": realizable}
        for name, log_score in scores.items():
            for function in (m2s.classify, m2s.affine_inverse, m2s.project):
                label = f"realizability/{kind}/K={vocab}/{bits(dtype)}/{name}/{function.__name__}"
                yield label, attempt(function, log_score.clamp(max=60).exp(), x_t, t, process)


def samplers(_: Runs) -> Iterator[Entry]:
    """Yield 16 samples of every sampler, for every process and head that it serves."""
    for sampler in SAMPLERS:
        progress(f"  {sampler}")
        steps = 24 if sampler == "forward_backward" else STEPS  # its corrector starts at small times
        for name, head in built(VOCAB):
            network = Formula(head.process.states)
            try:
                tokens = m2s.sample(network, head, (SAMPLES, LENGTH), steps, sampler, grid="linear", seed=7, micro_batch=ROWS)
            except (TypeError, ValueError):  # not served
                continue
            yield f"samplers/{sampler}/{name}", tensor(tokens)


def options(_: Runs) -> Iterator[Entry]:
    """Yield samples under the options of `m2s.sample`: sharpening, clamp, guidance, batches, windows, kinds of output."""
    clamp = torch.full((SAMPLES, LENGTH), -1)
    clamp[::2, 1::3] = 4
    guided = {"condition": torch.arange(SAMPLES) % 8, "guidance": 2.0}
    asked: dict[str, dict[str, Any]] = {
        "linear": {"grid": "linear"},
        "temperature": {"temperature": 0.6},
        "top_p": {"top_p": 0.7},
        "top_k": {"top_k": 3},
        "sharpened-leave-one-out": {"temperature": 0.8, "top_p": 0.9, "top_k": 6, "on": "leave_one_out"},
        "clamp": {"clamp": clamp},
        "condition": {"condition": guided["condition"]},
        "guidance": guided,
        "guidance-rates": {**guided, "guide": "rates"},
        "guidance-step": {**guided, "guide": "step"},
        "batches": {"batch_size": 5, "start": 9},
        "windows": {"window": 4, "overlap": 1},
    }
    used = (
        "uniform/leave-one-out",
        "absorbing/posterior",
        "hybrid/leave-one-out",
        "gaussian/leave-one-out",
        "uniform/log-score",
    )
    names = ("bayes", "euler", "analytic", "confidence")
    known = dict(built(VOCAB))
    for name, sampler in itertools.product(used, names):
        head = known[name]
        for option, given in asked.items():
            common = {"shape": (SAMPLES, LENGTH), "steps": STEPS, "sampler": sampler, "seed": 11, "micro_batch": ROWS}
            try:
                tokens = m2s.sample(Formula(head.process.states), head, **common, **given)
            except (TypeError, ValueError):  # not served, or not with this option
                continue
            yield f"options/{name}/{sampler}/{option}", tensor(tokens)
    for name, head in built(VOCAB):
        states, trajectory = head.process.states, m2s.Trajectory()
        drawn: dict[str, Any] = {"shape": (4, LENGTH), "steps": STEPS, "seed": 13, "micro_batch": ROWS}
        try:
            m2s.sample(Formula(states, torch.float64), head, callback=trajectory, **drawn)
        except (TypeError, ValueError):  # no sampler serves this head
            continue
        yield f"options/{name}/trajectory", tensor(trajectory.states)
        tokens = m2s.sample(Formula(states, unprojected=True), head, **drawn)
        yield f"options/{name}/unprojected", tensor(tokens)
