"""The examples of docstrings, which the reference shows, run and give what they say."""

import ast
import doctest
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_pages import ROOT, restored_registries
from torch.utils.data import DataLoader

import m2s
from m2s.cli import main
from m2s.errors import UnsupportedError, UserError
from m2s.io import atomic_write
from m2s.ops.backend import use_backend
from m2s.ops.counter_noise import CounterNoise
from m2s.patches import AttributePatches
from m2s.progress import Progress
from m2s.registry import Registry
from m2s.training.export import export_state
from small_runs import QUICK

PARSER = doctest.DocTestParser()
VOCAB = 256
# Networks of other projects, of their size, and a file of one: tests/hub and tests/models have small ones.
OF_OTHERS = {"from_diffusers", "from_transformers", "HuggingFace", "MaskAt"}
# The same with less to compute.
SHORTER = {
    "steps=200": "steps=1, progress=False",
    "checkpoint.sample(4)": "checkpoint.sample(4, steps=2)",
    "sampler=Redraw()": "sampler=Redraw(), steps=4",
    "head, (4, 128))": "head, (4, 128), steps=2)",
    "(16, 784)": "(16, 64), steps=2",
    "1200": "2",
    "linear_betas(1000)": "linear_betas(10)",
}
# Results of random networks: numbers do not count.
RANDOM = {"audit"}


def examples() -> Iterator[tuple[str, list[doctest.Example]]]:
    """Every docstring with an example, by the name of its object."""
    for file in sorted((ROOT / "m2s").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                found := PARSER.get_examples(ast.get_docstring(node) or "")
            ):
                yield node.name, found


EXAMPLES = list(examples())


def network(width: int) -> Callable[..., torch.Tensor]:
    """A network that is sure of nothing, with columns for `width` states."""
    return lambda x_t, t, condition=None: torch.zeros(*x_t.shape, width)


def world(name: str, folder: Path) -> dict[str, Any]:
    """The names that an example takes as given: tokens, times, a network, a head, files."""
    torch.manual_seed(0)
    process = m2s.Uniform(VOCAB, m2s.Linear())
    head = m2s.Posterior(process)
    x_t, t = torch.randint(27, (2, 4)), torch.tensor([0.4, 0.7])
    mu = torch.rand(2, 4, VOCAB, dtype=torch.float64).softmax(-1)
    found: dict[str, Any] = {
        **{each.__name__: each for each in (UserError, UnsupportedError, AttributePatches, Progress, Registry, CounterNoise)},
        **{each.__name__: each for each in (atomic_write, use_backend, export_state, DataLoader, Path)},
        **{
            "m2s": m2s,
            "torch": torch,
            "math": math,
            "Bytes": m2s.data.Bytes,
            "Posterior": m2s.Posterior,
            "Uniform": m2s.Uniform,
        },
        **{"process": process, "head": head, "x_0": x_t, "x_t": x_t, "t": t, "s": t / 2, "mu": mu},
        **{"logits": torch.randn(2, 4, VOCAB), "output": torch.randn(2, 4, VOCAB), "score": mu * VOCAB},
        **{"model": network(50_400), "batches": [0, 1], "weights": {"w": np.zeros(2)}},
        "save_file": lambda weights, path: path.write_bytes(weights["w"].tobytes()),
    }
    if name in ("load", "save"):  # a folder of the network "dit"
        config = m2s.models.DiTConfig(states=27, width=16, depth=1, heads=2)
        found |= {"head": m2s.Posterior(m2s.Uniform(27, m2s.Linear())), "model": m2s.models.DiT(config)}
        m2s.save(folder / "runs" / "mine", found["model"], found["head"], data={"kind": "text", "length": 128})
    if name in ("Sampler", "Trajectory"):
        found["model"] = network(VOCAB)
    if name == "UnsupportedError":
        found["head"] = m2s.LogScore(process)
    if name == "certify":
        found["model"] = network(4)
    if name == "audit":
        found["model"] = lambda x_t, t: torch.randn(*x_t.shape, 6)
    if name == "collate":
        found |= {"dataset": [torch.tensor([1, 2, 3]), torch.tensor([4])] * 4, "objective": m2s.Objective(network(VOCAB), head)}
    if name in ("Projected", "export_state"):
        main(["train", "digits", "--method", "sedd", "--steps", "2", "--out", "runs/sedd", *QUICK])
    return found


def result(source: str, names: dict[str, Any]) -> str:
    """Run one example. Return the value of an expression, what it raises, or nothing, as text."""
    for long, short in SHORTER.items():
        source = source.replace(long, short)
    is_expression = isinstance(ast.parse(source).body[-1], ast.Expr)
    try:
        if is_expression:
            return repr(eval(source, names))
        exec(source, names)
    except (UserError, UnsupportedError) as error:
        return f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    return ""


def test_docstrings_with_examples_are_found() -> None:
    assert len(EXAMPLES) > 50 and {"sample", "fit", "load", "classify"} <= {name for name, _ in EXAMPLES}


def test_every_function_that_import_m2s_offers_has_an_example() -> None:
    functions = {
        name for name in dir(m2s) if inspect.isfunction(inspect.unwrap(getattr(m2s, name))) and not name.startswith("_")
    }
    assert len(functions) > 20 and functions <= {name for name, _ in EXAMPLES}


@pytest.mark.usefixtures("default_rows")
@pytest.mark.parametrize(("name", "found"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example_runs(name: str, found: list[doctest.Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in OF_OTHERS:
        for example in found:
            ast.parse(example.source)
        return
    monkeypatch.chdir(tmp_path)
    with restored_registries():
        check(found, world(name, tmp_path), name in RANDOM)


def check(found: list[doctest.Example], names: dict[str, Any], is_random: bool) -> None:
    """Run examples one after another, and compare what they give with what the docstring says."""
    for example in found:
        got, wanted = result(example.source, names), " ".join(example.want.split())
        if wanted:
            if is_random:
                got, wanted = (re.sub(r"[\d.]+", "0", text) for text in (got, wanted))
            assert doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), got


@pytest.mark.parametrize(
    "text", [">>> 1 + 1\n3", ">>> raise m2s.errors.UserError('steps is 0')\nm2s.errors.UserError: steps is 1"]
)
def test_a_wrong_example_is_found(text: str) -> None:
    with pytest.raises(AssertionError):
        check(PARSER.get_examples(text), {"m2s": m2s}, False)
