"""`--plugin FILE`: files that register a user's parts before the command line is parsed."""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import m2s.cli.evaluate
from m2s import registry
from m2s.cli import commands, main, parse
from m2s.cli.options import command_options
from m2s.cli.plugins import take_plugins
from m2s.errors import UserError
from m2s.samplers.registry import SAMPLERS

SAMPLER = """
from dataclasses import dataclass

from m2s.samplers import Bayes
from m2s.samplers.registry import SAMPLERS


@dataclass(frozen=True)
class Twice(Bayes):
    name = "twice"
    repeats: int = 2
    \"\"\"How often each step is repeated.\"\"\"
    flavor: str = "plain"


SAMPLERS["twice"] = Twice
"""
METRIC = """
from m2s.evaluation.registry import METRICS


@METRICS.register("distinct")
def distinct(samples, reference=None, checkpoint=None, length: int = 1, scale: float = 1.0, **_):
    \"\"\"Count the distinct sequences.

    Args:
        samples: The samples.
        reference: Real data.
        checkpoint: Not used.
        length: Tokens of a sequence that are compared.
        scale: A factor.
    \"\"\"
    def count(tokens):
        return {"value": scale * len(tokens[:, :length].unique(dim=0)), "error": None}

    return {"samples": count(samples)} | ({} if reference is None else {"reference": count(reference)})
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file that registers the sampler `twice`."""
    # Until the samplers have a Registry, `add` is an assignment.
    register = 'SAMPLERS.add("twice", Twice)' if hasattr(SAMPLERS, "add") else 'SAMPLERS["twice"] = Twice'
    path = tmp_path / "twice.py"
    path.write_text(SAMPLER.replace('SAMPLERS["twice"] = Twice', register))
    monkeypatch.setattr(registry, "_loaded", {})
    yield str(path)
    getattr(SAMPLERS, "_entries", SAMPLERS).pop("twice", None)


def test_plugins_are_separated_from_the_arguments() -> None:
    words = ["--plugin", "a.py", "train", "digits", "--plugin=b.py", "--steps", "3"]
    assert take_plugins(words) == (["train", "digits", "--steps", "3"], ["a.py", "b.py"])
    for wrong in (["train", "--plugin"], ["train", "--plugin", "--steps"]):
        with pytest.raises(UserError, match="--plugin needs a value"):
            take_plugins(wrong)


def test_sampler_of_a_plugin_has_its_options(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = parse(["sample", "run", "--plugin", plugin, "--sampler", "twice", "--repeats", "3", "--out", "x.npz"])
    assert command.sampler == "twice" and command.repeats == 3 and command.flavor is None
    assert "--repeats" in command_options(commands()["audit"])
    with pytest.raises(SystemExit):
        main(["sample", "--help", "--plugin", plugin])
    text = " ".join(capsys.readouterr().out.split())
    assert "twice: How often each step is repeated (default 2)" in text and "--flavor TEXT" in text


def test_options_of_a_plugin_are_unknown_without_it() -> None:
    with pytest.raises(UserError, match="there is no option --repeats"):
        parse(["sample", "run", "--repeats", "3", "--out", "x.npz"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no plugin"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("def broken(:", "failed: SyntaxError"),
    ],
)
def test_missing_or_failing_plugin(content, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(registry, "_loaded", {})
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as exit_:
        main(["cite", "--plugin", str(path)])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("m2s: ") and said in err and str(path) in err


def test_help_explains_plugins(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0 and "--plugin FILE" in capsys.readouterr().out


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> registry.Registry:
    """An empty registry of metrics in place of that of m2s.evaluation."""
    entries: registry.Registry = registry.Registry("metric")
    module = types.ModuleType("m2s.evaluation.registry")
    module.METRICS = entries  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "m2s.evaluation.registry", module)
    monkeypatch.setattr(m2s.cli.evaluate, "_registered", lambda: dict(entries))
    return entries


def test_metric_of_a_plugin(metrics, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(registry, "_loaded", {})
    path = tmp_path / "distinct.py"
    path.write_text(METRIC)
    np.savez(tmp_path / "a.npz", tokens=np.array([[1, 2], [1, 3], [1, 3]]))
    plugin, source = ("--plugin", str(path)), str(tmp_path / "a.npz")
    main(["evaluate", "distinct", source, *plugin])
    assert capsys.readouterr().out == "samples  1\n"
    out, more = tmp_path / "a.json", ("--length", "2", "--scale", "2", "--reference", source)
    main(["evaluate", "distinct", source, *more, "--out", str(out), *plugin])
    result = json.loads(out.read_text())
    assert result["samples"]["value"] == result["reference"]["value"] == 4 and result["metric"] == "distinct"
    assert result["options"] == {"length": 2, "scale": 2.0} and result["inputs"]["checkpoint"] is None
    main(["evaluate", "distinct", source, "--reference", "digits:test", *plugin])
    assert "reference  " in capsys.readouterr().out
    capsys.readouterr()
    for arguments, said in (
        (["distint", source], "unknown metric 'distint'; did you mean distinct?"),
        (["distinct", source, "--length", "two"], "--length is 'two', but it must be a whole number"),
        (["distinct", str(tmp_path / "b.npz")], "b.npz is no .npz with an array `tokens`"),
        (["distinct", source, "--reference", "some text"], "give --checkpoint too"),
        (["distinct"], "the metric distinct failed: TypeError"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["evaluate", *arguments, *plugin])
        err = capsys.readouterr().err
        assert exit_.value.code == 2 and said in err and err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["evaluate", "--help", *plugin])
    assert "Count the distinct sequences." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["evaluate", "distinct", "--help", *plugin])
    page = " ".join(capsys.readouterr().out.split())
    assert "Tokens of a sequence that are compared" in page and "Example: m2s evaluate distinct samples.npz" in page
    assert parse(["evaluate", "bpd", "run"]).measure.checkpoint == "run"
