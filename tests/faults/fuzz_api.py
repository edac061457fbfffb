"""Suite 3: extreme arguments of the public functions. They work, or raise TypeError or ValueError with a message of m2s."""

import dataclasses
import linecache
import math
import random
import resource
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import m2s
from m2s.samplers import SAMPLERS

from .campaign import Suite, suite
from .commands import workplace
from .fork import forked
from .io_errors import status

PACKAGE = str(Path(m2s.__file__).parent)
MEMORY = 4 * 2**30  # bytes that a call may allocate
LIMIT = 30.0  # seconds of one call

INTEGERS = (0, -1, 1, 2**31, 2**63, 10**30, True, 1.5, math.nan, math.inf, "x", None, [], (1, 2), np.int64(3), np.float64(2.0))
FLOATS = (0.0, -0.0, -1.0, 2.0, math.nan, math.inf, -math.inf, 1e308, 1e-320, 10**400, "x", None, [], True, np.float32(0.5))
LONG = ("steps", "passes")  # a large number is valid, and takes forever
OBJECTS = (None, 3, "x", [], {}, m2s.Uniform, len, np.zeros(3))

Made = dict[str, Any]
"""Arguments by name."""


def schedule(dice: random.Random) -> m2s.Schedule:
    """A noise schedule."""
    return dice.choice(
        (m2s.Linear(), m2s.Cosine(), m2s.LogLinear(), m2s.Geometric(1e-3, 20.0), m2s.Exponential(5.0), m2s.GeometricRate(5.0))
    )


def process(dice: random.Random) -> m2s.Process:
    """A process of a small vocabulary."""
    vocab = dice.choice((2, 3, 5, 17))
    kind = dice.randrange(5)
    if kind == 0:
        return m2s.Uniform(vocab, schedule(dice))
    if kind == 1:
        return m2s.Absorbing(vocab, schedule(dice))
    if kind == 2:
        return m2s.Hybrid(vocab, dice.choice((0.1, 0.2)))
    rates = torch.rand(vocab, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(dice.randrange(99)))
    rates.fill_diagonal_(0)
    if kind == 3:
        return m2s.RateMatrix(rates - torch.diag(rates.sum(1)), schedule(dice))
    return m2s.Chain(
        (torch.eye(vocab, dtype=torch.float64) + 0.1 * rates).div(1 + 0.1 * rates.sum(1, keepdim=True))[None].repeat(4, 1, 1)
    )


def head(dice: random.Random, of: m2s.Process) -> m2s.Head:
    """A head of a process."""
    made = dice.choice((m2s.Posterior, m2s.LogScore, m2s.FactorizedRate, m2s.Ordinal, lambda p: m2s.Projected(m2s.LogScore(p))))
    try:
        return made(of)
    except (TypeError, ValueError):
        return m2s.Posterior(of)


def sites(dice: random.Random) -> tuple[int, ...]:
    """The shape of a batch of sequences."""
    return dice.choice(((2, 3), (1, 1), (4, 2), (3,), (0, 3), (2, 0), (2, 2, 2)))


def tokens(dice: random.Random, count: int, shape: tuple[int, ...]) -> Tensor:
    """Tokens below `count`."""
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(dice.randrange(999)))


def numbers(dice: random.Random, shape: tuple[int, ...], kind: str) -> Tensor:
    """Numbers of a kind: score (positive), posterior (sums to 1), logits; of moderate or extreme size."""
    scale = dice.choice((1.0, 1.0, 5.0, 30.0))
    raw = scale * torch.randn(shape, generator=torch.Generator().manual_seed(dice.randrange(999)), dtype=torch.float64)
    raw = raw.to(dice.choice((torch.float32, torch.float32, torch.float64)))
    if kind == "score":
        return raw.exp()
    return raw.softmax(-1) if kind == "posterior" else raw


def times(dice: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Times inside (0, 1), also close to its ends."""
    drawn = [dice.choice((0.5, dice.random(), 1e-3, 1 - 1e-3, 1e-6)) for _ in range(shape[0])] if shape else [0.5]
    return torch.tensor(drawn)


def network(states: int) -> Callable[..., Tensor]:
    """A small deterministic network."""
    table = torch.randn(states, states, generator=torch.Generator().manual_seed(1))
    return lambda x, t, *rest, **options: table[x] * (1 + t.reshape(-1, *[1] * x.ndim))


def at_sites(name: str, kind: str) -> Callable[[random.Random], Made]:
    """Make the arguments of a function of numbers, x_t, t and a process."""

    def make(dice: random.Random) -> Made:
        of, shape = process(dice), sites(dice)
        made = {"x_t": tokens(dice, of.states, shape), "t": times(dice, shape), "process": of}
        return {name: numbers(dice, (*shape, of.states), kind), **made} if name else made

    return make


def between_times(name: str, kind: str) -> Callable[[random.Random], Made]:
    """As `at_sites`, with an earlier time s."""

    def make(dice: random.Random) -> Made:
        made = at_sites(name, kind)(dice)
        return {**made, "s": made["t"] * dice.choice((0.0, 0.5, 0.99))}

    return make


def of_loss(dice: random.Random) -> Made:
    """Make the arguments of a loss."""
    of, shape = process(dice), sites(dice)
    return {
        "head": head(dice, of),
        "output": numbers(dice, (*shape, of.states), "logits"),
        "x_0": tokens(dice, of.vocab, shape),
        "x_t": tokens(dice, of.states, shape),
        "t": times(dice, shape),
    }


def of_elbo(dice: random.Random) -> Made:
    """Make the arguments of `elbo`."""
    of = process(dice)
    x_0 = tokens(dice, of.vocab, dice.choice(((2, 3), (1, 1), (4, 2))))
    generator = torch.Generator().manual_seed(0)
    return {"model": network(of.states), "head": head(dice, of), "x_0": x_0, "passes": 2, "t_min": 1e-3, "generator": generator}


def of_sample(dice: random.Random) -> Made:
    """Make the arguments of `sample`."""
    of = process(dice)
    made: Made = {"model": network(of.states), "head": head(dice, of), "shape": (2, 3), "steps": dice.choice((1, 2, 5))}
    more = {
        "sampler": dice.choice(("auto", *SAMPLERS)),
        "grid": dice.choice(("linear", "cosine")),
        "seed": dice.choice((0, 1, 2**31)),
        "clamp": torch.tensor([[0, -1, -1]] * 2),
        "guidance": 1.0,
        "temperature": dice.choice((1.0, 0.5)),
        "top_p": dice.choice((1.0, 0.5)),
        "top_k": dice.choice((None, 1, 2)),
        "start": dice.choice((0, 5)),
        "micro_batch": dice.choice((1, 16)),
    }
    return made | {name: more[name] for name in dice.sample(sorted(more), dice.randrange(4))}


def of_audit(dice: random.Random) -> Made:
    """Make the arguments of `audit`."""
    of = process(dice)
    return {"model": network(of.states), "head": head(dice, of), "shape": (2, 3), "steps": 2, "seed": 0, "batch_size": 2}


def of_objective(dice: random.Random) -> Made:
    """Make the arguments of `Objective`, and data to call it with."""
    made = of_elbo(dice)
    x_0 = made["x_0"]
    return {"model": made["model"], "head": made["head"], "t_min": 1e-3, "x_0": x_0, "t": times(dice, x_0.shape)}


def call_objective(x_0: Any, t: Any, **options: Any) -> Any:
    """Build an objective and call it."""
    return m2s.Objective(**options)(x_0, t)


def of_rate_matrix(dice: random.Random) -> Made:
    """Make the arguments of `RateMatrix`."""
    rates = torch.rand(3, 3)
    return {"rates": rates - torch.diag(rates.sum(1)), "schedule": schedule(dice), "mask": False}


def of_ordinal(dice: random.Random) -> Made:
    """Make the arguments of `Ordinal`."""
    rates = torch.diag_embed(torch.ones(4), 1) + torch.diag_embed(torch.ones(4), -1)
    return {"process": m2s.RateMatrix(rates - torch.diag(rates.sum(1)), schedule(dice)), "offset": "exact"}


def call_checked(on: Any) -> None:
    """Enter and leave checked mode."""
    with m2s.checked(on):
        pass


def of_unprojected(dice: random.Random) -> Made:
    """Make the arguments of `Unprojected`."""
    return {"hidden": torch.randn(2, 3, 4), "weight": torch.randn(5, 4), "bias": torch.randn(5)}


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[random.Random], Made]]] = {
    "Absorbing": (m2s.Absorbing, lambda dice: {"vocab": 3, "schedule": schedule(dice)}),
    "Uniform": (m2s.Uniform, lambda dice: {"vocab": 3, "schedule": schedule(dice)}),
    "Hybrid": (m2s.Hybrid, lambda dice: {"vocab": 3, "p_uniform": 0.1}),
    "Chain": (m2s.Chain, lambda dice: {"matrices": torch.full((2, 3, 3), 1 / 3), "mask": False}),
    "RateMatrix": (m2s.RateMatrix, of_rate_matrix),
    "Exponential": (m2s.Exponential, lambda dice: {"horizon": 5.0}),
    "Geometric": (m2s.Geometric, lambda dice: {"sigma_min": 1e-3, "sigma_max": 5.0}),
    "GeometricRate": (m2s.GeometricRate, lambda dice: {"sigma_max": 5.0, "base": 100.0}),
    "LogLinear": (m2s.LogLinear, lambda dice: {"eps": 1e-3}),
    "Rescaled": (m2s.Rescaled, lambda dice: {"schedule": schedule(dice), "eps": 1e-4}),
    "FactorizedRate": (m2s.FactorizedRate, lambda dice: {"process": process(dice)}),
    "LogScore": (m2s.LogScore, lambda dice: {"process": process(dice), "scale": "none"}),
    "Posterior": (m2s.Posterior, lambda dice: {"process": process(dice), "offset": "none"}),
    "Ordinal": (m2s.Ordinal, of_ordinal),
    "Projected": (m2s.Projected, lambda dice: {"head": m2s.LogScore(process(dice))}),
    "Unprojected": (m2s.Unprojected, of_unprojected),
    "Objective": (call_objective, of_objective),
    "checked": (call_checked, lambda dice: {"on": True}),
    "affine_inverse": (m2s.affine_inverse, at_sites("score", "score")),
    "analytic_weights": (m2s.analytic_weights, between_times("score", "score")),
    "audit": (m2s.audit, of_audit),
    "bayes_probabilities": (m2s.bayes_probabilities, between_times("posterior", "posterior")),
    "box": (m2s.box, at_sites("", "")),
    "classify": (m2s.classify, at_sites("score", "score")),
    "diagnose": (m2s.diagnose, between_times("score", "score")),
    "elbo": (m2s.elbo, of_elbo),
    "leave_one_out_from_posterior": (m2s.leave_one_out_from_posterior, at_sites("posterior", "posterior")),
    "load": (m2s.load, lambda dice: {"path_or_repo": "nothing", "device": "cpu"}),
    "masked_cross_entropy": (m2s.masked_cross_entropy, of_loss),
    "posterior_from_leave_one_out": (m2s.posterior_from_leave_one_out, at_sites("leave_one_out", "posterior")),
    "project": (m2s.project, at_sites("score", "score")),
    "rate_from_score": (m2s.rate_from_score, at_sites("score", "score")),
    "sample": (m2s.sample, of_sample),
    "score_entropy": (m2s.score_entropy, of_loss),
    "score_from_leave_one_out": (m2s.score_from_leave_one_out, at_sites("leave_one_out", "posterior")),
    "score_from_posterior": (m2s.score_from_posterior, at_sites("posterior", "posterior")),
    "score_from_rate": (m2s.score_from_rate, at_sites("rate", "score")),
    "stratified_times": (m2s.stratified_times, lambda dice: {"count": 3, "low": 0.1, "high": 0.9}),
}
"""The public functions and classes, with a function that makes valid arguments. Classes without arguments are left out."""

COSTLY = {"sample": 1500, "audit": 300, "elbo": 500, "Objective": 300}


def spoil(value: Any, dice: random.Random) -> Any:
    """Replace a valid argument by an extreme or wrong one of the same kind, or of another.

    Args:
        value: The argument.
        dice: The random numbers.
    """
    if dice.random() < 0.1:
        return dice.choice(OBJECTS)
    if isinstance(value, Tensor):
        return _spoil_tensor(value, dice)
    if isinstance(value, bool | int):
        return dice.choice(INTEGERS)
    if isinstance(value, float):
        return dice.choice(FLOATS)
    if isinstance(value, str):
        return dice.choice(("", "x", "Posterior", "../x", "\0", "a" * 300, 3, None, b"x"))
    if isinstance(value, tuple):
        return dice.choice(
            ((0, 3), (-1, 3), (2,), (2, 3, 4), (2.5, 3), ("x", 3), (10**9, 10**9), (2**63, 1), (None, 3), 5, [2, 3])
        )
    if isinstance(value, types.FunctionType):
        return _spoil_network(value, dice)
    if isinstance(value, m2s.Process | m2s.Head | m2s.Schedule):
        return dice.choice((None, 3, "x", type(value), process(dice), head(dice, process(dice)), schedule(dice)))
    return dice.choice(OBJECTS)


def _spoil_tensor(value: Tensor, dice: random.Random) -> Any:
    """An extreme or wrong tensor."""
    changes: tuple[Callable[[], Any], ...] = (
        lambda: value.tolist(),
        lambda: value.numpy(),
        lambda: value.long(),
        lambda: value.float(),
        lambda: value.bool(),
        lambda: value.to(torch.complex64),
        lambda: value.to(torch.bfloat16),
        lambda: value.half(),
        lambda: value.double(),
        lambda: value.to(torch.int8),
        lambda: value[..., None],
        lambda: value[None],
        lambda: value.flatten(),
        lambda: value[..., :1],
        lambda: value[:0],
        lambda: torch.cat([value, value]),
        lambda: value.transpose(0, -1),
        lambda: value.sum(),
        lambda: value.new_zeros(()),
        lambda: value.new_zeros(0),
        lambda: -value,
        lambda: value * 0,
        lambda: value * 10**6,
        lambda: value.new_full((1,), 2**62 if not value.is_floating_point() else 1e38).expand(value.shape),
        lambda: torch.full_like(value, math.nan) if value.is_floating_point() else value - 2**40,
        lambda: torch.full_like(value, math.inf) if value.is_floating_point() else value + 2**40,
        lambda: torch.full_like(value, -math.inf) if value.is_floating_point() else value - 1,
        lambda: torch.full_like(value, 1e-45) if value.is_floating_point() else value + 1,
        lambda: torch.where(torch.arange(value.numel()).reshape(value.shape) == 0, math.nan, value.double()),
    )
    return dice.choice(changes)()


def _spoil_network(model: Callable[..., Tensor], dice: random.Random) -> Any:
    """A network whose output is wrong."""
    changes: tuple[Callable[[Tensor], Any], ...] = (
        lambda y: y * math.nan,
        lambda y: y + math.inf,
        lambda y: y * 1e30,
        lambda y: y[..., :1],
        lambda y: y[None],
        lambda y: y[:, :1],
        lambda y: y.long(),
        lambda y: y.bfloat16(),
        lambda y: y.double(),
        lambda y: (y, y),
        lambda y: None,
        lambda y: y.tolist(),
        lambda y: y.to(torch.complex64),
    )
    change = dice.choice(changes)
    return lambda *given, **options: change(model(*given, **options))


def extreme_call(name: str, dice: random.Random) -> str:
    """Call a function with arguments of which none, one or two are extreme or wrong.

    Args:
        name: Its name in `FUNCTIONS`.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """

    def work() -> str:
        limit = status("VmSize") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return _call(name, dice)

    ended = forked(work, workplace(), LIMIT)
    if ended.code is None:
        return f"m2s.{name} hangs\n{ended.err}"
    return ended.value if ended.code == 0 and ended.value is not None else f"m2s.{name}: exit code {ended.code}\n{ended.err}"


def _call(name: str, dice: random.Random) -> str:
    """Make the call in this process."""
    function, make = FUNCTIONS[name]
    torch.manual_seed(dice.randrange(999))
    given = make(dice)
    for key in dice.sample(sorted(given), min(len(given), dice.choice((0, 1, 1, 1, 2)))):
        other = spoil(given[key], dice)
        if key not in LONG or not isinstance(other, int) or other < 100:
            given[key] = other
    finite = all(_finite(value) for value in given.values()) and not _wrong_network(given.get("model"))
    shown = ", ".join(f"{key}={_short(value)}" for key, value in given.items())
    try:
        result = function(**given)
    except Exception as error:
        wrong = _foreign(error)
        return f"m2s.{name}({shown}): {wrong}" if wrong else ""
    if isinstance(result, m2s.Elbo) and given["passes"] == 1:  # its documented standard error is NaN
        result = (result.nats, result.integral, result.prior, result.reconstruction)
    wrong = "NaN from finite arguments" if finite and _has_nan(result) else ""
    if name == "sample" and isinstance(result, Tensor) and isinstance(given["head"], m2s.Head):
        outside = (result < 0) | (result >= given["head"].process.vocab)
        wrong = wrong or ("tokens outside the vocabulary" if outside.any() else "")
        wrong = wrong or ("samples of a network whose output is not finite" if _nan_network(given["model"]) else "")
    return f"m2s.{name}({shown}): {wrong}" if wrong else ""


def _foreign(error: Exception) -> str:
    """Describe an error that is not one of ours; empty for TypeError and ValueError that m2s raises itself."""
    frames = [(frame.f_code.co_filename, line) for frame, line in _walk(error)]
    file, line = frames[-1]
    ours = file.startswith(PACKAGE) and linecache.getline(file, line).strip().startswith("raise")
    kinds: tuple[type[Exception], ...] = (TypeError, ValueError, IndexError, FileNotFoundError, ImportError)
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if memory or (ours and isinstance(error, kinds) and str(error)):
        return ""
    at = next((f"{Path(f).relative_to(PACKAGE)}:{n}" for f, n in reversed(frames) if f.startswith(PACKAGE)), "the call")
    return f"{type(error).__name__} at {at}: {str(error)[:300]}"


def _walk(error: Exception) -> list[tuple[types.FrameType, int]]:
    """The frames of an error with their lines."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _finite(value: Any) -> bool:
    """Whether an argument has no NaN and no infinity."""
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _wrong_network(model: Any) -> bool:
    """Whether a network was spoiled."""
    return isinstance(model, types.FunctionType) and model.__closure__ is not None and "change" in model.__code__.co_freevars


def _nan_network(model: Any) -> bool:
    """Whether the output of a network is not finite."""
    if not _wrong_network(model):
        return False
    change = model.__closure__[model.__code__.co_freevars.index("change")].cell_contents
    changed = change(torch.ones(1, 2, 3))
    return isinstance(changed, Tensor) and not bool(changed.isfinite().all())


def _has_nan(result: Any) -> bool:
    """Whether a result holds NaN."""
    if isinstance(result, Tensor):
        return bool(result.isnan().any()) if result.is_floating_point() else False
    if isinstance(result, list | tuple):
        return any(map(_has_nan, result))
    if dataclasses.is_dataclass(result) and not isinstance(result, m2s.Process | m2s.Head | m2s.Schedule):
        return any(_has_nan(getattr(result, field.name)) for field in dataclasses.fields(result))
    return isinstance(result, float) and math.isnan(result)


def _short(value: Any) -> str:
    """A short description of an argument."""
    if isinstance(value, Tensor):
        some = value.flatten()[:3].tolist()
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {some}"
    return repr(value)[:80]


def _suites() -> list[Suite]:
    """The suites of all functions."""
    return [
        suite(
            f"api-{name}",
            "extreme arguments of a public function",
            lambda number, dice, name=name: extreme_call(name, dice),
            target=COSTLY.get(name, 150),
            short=4 if name in COSTLY else 2,
        )
        for name in FUNCTIONS
    ]


SUITES = _suites()
