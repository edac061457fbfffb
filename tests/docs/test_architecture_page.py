"""docs/architecture.md names what exists: modules, functions, files, registries, and the calls of a training step."""

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import ROOT, blocks
from test_architecture import LAYERS

import m2s
from m2s.cli import main
from m2s.registry import Registry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL))
NAMES = sorted({code for code in CODE if re.fullmatch(r"m2s(\.\w+)+", code)} - {"m2s.plugins"})  # an entry point group
PATHS = sorted({code for code in CODE if "/" in code or code.endswith((".py", ".md"))} - {"my_file.py"})
# Classes and members that the page names without their module.
MEMBERS = {
    "Registry": "m2s.registry",
    "Objective": "m2s.losses",
    "TrainingObjective": "m2s.losses.objective",
    "TrainingObjective.score": "m2s.losses.objective",
    "Method": "m2s.methods",
    "Method.build": "m2s.methods",
    "LossEntry": "m2s.losses.registry",
    "Estimator": "m2s.evaluation.likelihood",
    "Task": "m2s.evaluation.zero_shot",
    "CheckpointFormat": "m2s.hub.formats",
    "Published": "m2s.evaluation.published",
    "M2SModel": "m2s.hub.auto_model",
    "M2SScheduler": "m2s.hub.diffusers",
    **dict.fromkeys(("Posterior", "LogScore", "FactorizedRate", "Ordinal", "NextToken"), "m2s.heads"),
    "Projected": "m2s.realizability",
    "process.rank_one": "m2s.process",
    "process.tabulated": "m2s.process",
    "process.chain": "m2s.process",
    "step": "m2s.samplers",
    "last_step": "m2s.samplers",
    "torch.compile": "torch",
    "torch.nn.Module": "torch",
    "row_losses": "m2s.ops",
}
OWNERS = {
    "process": "Process",
    "step": "Sampler.step",
    "last_step": "Sampler.last_step",
    "torch": "",
    "row_losses": "posterior_entropy.triton.row_losses",
}


def resolve(name: str) -> Any:
    """The module, class, function or method of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name: str) -> None:
    assert resolve(name) is not None


@pytest.mark.parametrize("path", PATHS)
def test_paths_exist(path: str) -> None:
    if path in ("naive.py", "cpu.py", "triton.py"):  # one in a folder of every operation, or of some
        assert list((ROOT / "m2s" / "ops").glob(f"*/{path}"))
    else:
        assert (ROOT / path).exists()


def test_other_code_is_a_known_member_or_an_option() -> None:
    others = {code for code in CODE if code not in NAMES and code not in PATHS and not code.startswith(("--", "m2s "))}
    assert others <= {*MEMBERS, "m2s.plugins"}, others - {*MEMBERS}
    for name, module in MEMBERS.items():
        owner, _, member = name.partition(".")
        resolve(".".join(part for part in (module, OWNERS.get(owner, owner), member) if part))


def test_every_package_is_in_the_table() -> None:
    packages = {f"m2s/{path.parent.name}/" for path in (ROOT / "m2s").glob("*/__init__.py")}
    modules = {f"m2s/{path.name}" for path in (ROOT / "m2s").glob("*.py")}
    assert packages | modules <= set(PATHS)


def test_the_diagram_has_the_order_of_the_imports() -> None:
    (diagram,) = blocks(PAGE, "mermaid")
    drawn = re.findall(r"\b(?!flowchart|LR|br|infrastructure)[a-z_]+\b", diagram)
    order = list(dict.fromkeys(drawn))
    assert order == [name for names in LAYERS for name in names]


def test_every_registry_is_in_the_table() -> None:
    for module in pkgutil.walk_packages(m2s.__path__, "m2s."):
        if module.name.endswith(("triton", "__main__")):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
            if missing.name not in ("lm_eval", "diffusers", "transformers"):  # optional packages
                raise
    found = {
        id(value): f"{module.__name__}.{name}"
        for module in [module for name, module in sys.modules.items() if name.startswith("m2s.")]
        for name, value in vars(module).items()
        if isinstance(value, Registry)
    }
    table = PAGE.partition("## Registries and plugins")[2].partition("\n\nA plugin")[0]
    listed = {id(resolve(name)) for name in re.findall(r"`(m2s(?:\.\w+)+)`", table)}
    assert listed == set(found), [found[each] for each in set(found) - listed]


@pytest.mark.parametrize("method", ["m2s-offset", "sedd", "md4", "neural-ctmc"])
def test_the_calls_of_a_training_step(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of m2s on the stack when a loss kernel is launched: those of the table, from the entry point on."""
    pytest.importorskip("triton")
    section = PAGE.partition("## One training step")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (\d?) ?\| `([\w.]+)` ", section, re.MULTILINE)
    assert [number for number, _ in listed] == ["", *map(str, range(1, 7)), ""]
    names = [name for _, name in listed]

    stacks: list[list[str]] = []

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            frame, stack = sys._getframe(1), []
            while frame is not None:
                module = frame.f_globals.get("__name__", "")
                if module.startswith("m2s."):
                    owner = frame.f_locals.get("self")
                    prefix = "" if owner is None else f"{type(owner).__name__}."
                    stack.append(f"{module}.{prefix}{frame.f_code.co_name}")
                frame = frame.f_back  # type: ignore[assignment]
            stacks.append(stack[::-1])
            return original(*arguments, **options)

        return watched

    for operation in ("posterior_entropy", "score_entropy", "factorized_entropy", "cross_entropy"):
        launcher = importlib.import_module(f"m2s.ops.{operation}.triton")
        monkeypatch.setattr(launcher, names[-1], watch(getattr(launcher, names[-1])))
    quick = ["--steps", "1", "--batch", "1", "--validation-samples", "1", "--device", DEVICE, "--compile", "no"]
    small = ["--network.kind", "dit", "--network.width", "8", "--network.depth", "1", "--network.heads", "1"]
    main(["train", "digits", "--method", method, "--kernels", "fused", *quick, *small, "--out", str(tmp_path / "run")])
    after = stacks[0][stacks[0].index(names[0]) :]
    assert [name for name in after if not name.startswith("m2s.training.cuda_graph.")] == names[:-1]
