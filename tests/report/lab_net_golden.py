"""Golden vectors of the networks in the lab: what the library computes, with which the tests of web/ compare its TypeScript.

python tests/report/lab_net_golden.py     # writes web/tests/golden/net-NAME.json
"""

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import m2s
from m2s.io import atomic_write
from m2s.models import rotary
from m2s.report.lab.weights import container
from m2s.samplers import Prediction, StepEvent

FOLDER = Path(__file__).parents[2] / "web" / "tests" / "golden"
LENGTHS = {"digits-m2s": 64, "digits-m2s-offset": 64, "digits-sedd": 64, "chars": 128}
TIMES = (0.8, 0.02)
T_MIN = 1e-3
DIGITS = 10  # significant digits of the numbers in the files


@dataclass(frozen=True)
class Case:
    """A call of `m2s.sample`: `samples` samples, with some positions clamped if `clamp`."""

    samples: int
    steps: int
    repair: bool = False
    seed: int = 0
    start: int = 0
    grid: str = "cosine"
    temperature: float = 1.0
    clamp: bool = False


COMMON = (Case(8, 8), Case(8, 16))
OTHER = {"seed": 2**40 + 7, "start": 3, "grid": "linear"}  # a seed of more than 32 bits
CASES = {
    "digits-m2s": COMMON,
    "digits-m2s-offset": (*COMMON, Case(2, 8, temperature=0.7, clamp=True, **OTHER)),
    "digits-sedd": (
        *COMMON,
        Case(8, 8, repair=True),
        Case(8, 16, repair=True),
        Case(2, 8, clamp=True, **OTHER),
        Case(2, 8, repair=True, temperature=0.7, clamp=True, **OTHER),
    ),
    "chars": (Case(4, 8), Case(4, 16), Case(1, 8, clamp=True, **OTHER)),
}


def header() -> dict[str, str]:
    """What the last digits of a network's output, and so rarely a token, depend on."""
    return {"torch": str(torch.__version__), "cpu_capability": torch.backends.cpu.get_cpu_capability()}


def vectors(name: str) -> dict[str, Any]:
    """The golden vectors of one network."""
    parts = {"outputs": outputs(name), "samples": samples(name)}
    return {"header": header(), "container": hashlib.sha256(container(name)).hexdigest(), **parts}


def outputs(name: str) -> list[dict[str, Any]]:
    """Posterior and log-score at some times, in float64, at the tokens of a sample that is corrupted to that time."""
    model, head = m2s.load(f"builtin:{name}")
    x_0 = m2s.sample(model, head, (1, LENGTHS[name]), steps=8, seed=0, micro_batch=1)
    return [_output(model, head, x_0, t) for t in TIMES]


def samples(name: str) -> list[dict[str, Any]]:
    """The calls of `m2s.sample` in `CASES`."""
    model, head = m2s.load(f"builtin:{name}")
    return [_sample(model, head, case, LENGTHS[name]) for case in CASES[name]]


def exact_output(model: torch.nn.Module, x_t: Tensor, t: Tensor) -> Tensor:
    """The output of a network in float64, for the float32 weights and the float32 features of time and position.

    The features are part of the definition: an angle of up to 1,000 is rounded to float32, by up to 3e-5.
    """
    exact = copy.deepcopy(model).double()

    def sinusoids(x_t: Tensor, t: Tensor) -> Tensor:
        return model.condition._sinusoids(x_t, t.float()).double()

    def angles(length: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(table.to(dtype) for table in rotary.angles(length, width, device))

    with patch.object(exact.condition, "_sinusoids", sinusoids), patch("m2s.models.dit.angles", angles), torch.no_grad():
        return exact(x_t, t.float())


def _output(model: torch.nn.Module, head: Any, x_0: Tensor, time: float) -> dict[str, Any]:
    """One of the `outputs`."""
    t = torch.tensor([time], dtype=torch.float64)
    x_t = head.process.corrupt(x_0, t, torch.Generator().manual_seed(0))
    output = exact_output(model, x_t, t)
    return {
        "t": time,
        "tokens": _text(x_t[0]),
        "posterior": _numbers(head.posterior(output, x_t, t)),
        "log_score": _numbers(head.log_score(output, x_t, t)),
    }


def _sample(model: torch.nn.Module, head: Any, case: Case, length: int) -> dict[str, Any]:
    """All states of some samples, and at every step the classes of the scores and the negative mass that is dropped."""
    used = m2s.realizability.Projected(head) if case.repair else head
    clamp = torch.full((case.samples, length), -1)
    if case.clamp:
        clamp[:, ::3] = torch.arange(length)[::3] % head.process.vocab
    trajectory = m2s.Trajectory()
    classes: list[list[str]] = []
    dropped: list[list[float]] = []

    def record(event: StepEvent) -> None:
        trajectory(event)
        part = event.prediction
        t = part.t.clamp(max=1 - T_MIN)  # there is no score at t = 1
        score = Prediction(part.head, part.output, part.x_t, t, part.logits_processor).score()
        classes.append([_text(row) for row in m2s.classify(score, part.x_t, t, head.process)])
        mass = part.notes.get("negative_mass", torch.zeros(part.x_t.shape, dtype=torch.float64))
        dropped.append(_numbers(torch.where(part.free, mass, 0).sum(-1)))

    m2s.sample(
        model,
        used,
        (case.samples, length),
        steps=case.steps,
        sampler="analytic" if used.predicts_score else "bayes",
        grid=case.grid,
        seed=case.seed,
        start=case.start,
        temperature=case.temperature,
        clamp=clamp if case.clamp else None,
        micro_batch=8,  # all samples in one, so that the events are in the order of the steps
        callback=record,
    )
    states = trajectory.states.transpose(0, 1)
    return {
        "steps": case.steps,
        "grid": case.grid,
        "seed": case.seed,
        "start": case.start,
        "repair": case.repair,
        "temperature": case.temperature,
        "clamp": [_text(row) for row in clamp] if case.clamp else None,
        "states": [[_text(row) for row in sample] for sample in states],
        "classes": [list(sample) for sample in zip(*classes, strict=True)],
        "dropped": [list(sample) for sample in zip(*dropped, strict=True)],
    }


def _text(tokens: Tensor) -> str:
    """Tokens as one character each, in base 36; "-" for -1."""
    return "".join("-" if token < 0 else "0123456789abcdefghijklmnopqrstuvwxyz"[token] for token in tokens.tolist())


def tokens(text: str) -> list[int]:
    """The tokens of a text without "-"."""
    return [int(character, 36) for character in text]


def _numbers(values: Tensor) -> list[float]:
    """The numbers of a tensor, to `DIGITS` digits."""
    return [float(f"{value:.{DIGITS}g}") for value in values.flatten().tolist()]


if __name__ == "__main__":
    for name in LENGTHS:
        with atomic_write(FOLDER / f"net-{name}.json") as file:
            file.write_text(json.dumps(vectors(name), separators=(",", ":")) + "\n")
