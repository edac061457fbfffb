"""The command line: the files it writes, what it prints, and its errors."""

import html
import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import torch

import m2s
from m2s.cli import COMMANDS, main
from m2s.cli.compare import Compare
from m2s.cli.demo import Demo
from m2s.errors import UserError
from m2s.io import atomic_write, output_file, output_folder
from m2s.methods import METHODS
from m2s.report import toy

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Longer steps of the integrator: its numbers are tested elsewhere."""
    exact = toy.toy_data
    monkeypatch.setattr(toy, "toy_data", lambda distribution=toy.DATA_DISTRIBUTION: exact(distribution, points=15, step=0.2))


def error_line(capsys, *arguments: str) -> str:
    """Run a command that must fail, and return its one line on stderr."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("m2s: ") and err.count("\n") == 1
    return err


def test_figure_writes_a_picture_and_its_numbers(tmp_path, capsys):
    out = tmp_path / "new" / "toy.png"
    main(["figure", "toy", "--out", str(out)])
    assert out.read_bytes().startswith(PNG)
    width = int.from_bytes(out.read_bytes()[16:20], "big")
    assert width == 3900
    numbers = json.loads(out.with_suffix(".json").read_text())
    assert numbers["distribution"] == list(toy.DATA_DISTRIBUTION) and len(numbers["tv"]) == len(numbers["c"])
    assert sorted(path.name for path in out.parent.iterdir()) == ["toy.json", "toy.png"]
    assert "toy.png" in capsys.readouterr().out


def test_figure_seed_changes_the_distribution_and_replaces_the_file(tmp_path):
    out = tmp_path / "toy.svg"
    out.write_text("old")
    main(["figure", "toy", "--out", str(out), "--seed", "1", "--overwrite"])
    assert "<svg" in out.read_text()
    assert json.loads(out.with_suffix(".json").read_text())["distribution"] == list(toy.random_distribution(1))


def test_demo_writes_a_page_with_the_numbers_of_its_files(tmp_path, capsys, monkeypatch):
    """With 2 and 4 sampling steps in place of 4, 8, 16 and 32. Every result names the command that makes it again."""
    original = Demo.commands

    def quick(self):
        few = {"compare": ["--steps", "2", "4"], "bpd": ["--limit", "8"]}
        return [(what, [*words, *few.get(words[0], few.get(words[1], []))]) for what, words in original(self)]

    monkeypatch.setattr(Demo, "commands", quick)
    out = tmp_path / "demo"
    main(["demo", "--out", str(out), "--steps", "2", "--n", "4"])
    text, page = capsys.readouterr().out, (out / "index.html").read_text()
    found = json.loads((out / "m2s-offset" / "bpd.json").read_text())
    compared = json.loads((out / "m2s-offset" / "compare" / "compare.json").read_text())
    audit = json.loads((out / "sedd" / "audit" / "audit.json").read_text())
    train = json.loads((out / "sedd" / "train.json").read_text())["starts"][0]
    for bits in (found["nelbo"], found["against"]["nelbo"], found["against"]["difference"]["nelbo"]):
        assert f"{bits['bits']['value']:.4f}" in page
    for row in compared["steps"]:
        assert all(f"{one['value']:.3f}" in page for one in row["distances"].values())
    assert audit["settings"]["steps"] == 8
    joined = page.replace("</span> <span>", " ")  # the page does not break lines inside a word
    for result, words in ((found, "m2s evaluate bpd"), (compared, "m2s compare"), (audit, "m2s audit"), (train, "m2s train")):
        command = shlex.join(result["command"])
        assert command.startswith(words) and f"$ {command}\n" in text and html.escape(command, quote=False) in joined
    assert str(out / "index.html") in text and page.count("<picture>") >= 6
    assert "Mean-to-Score Discrete Diffusion: Posterior-Mean Denoisers for Score Entropy" in " ".join(page.split())


def test_demo_does_not_repeat_finished_training(tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise UserError("enough")

    monkeypatch.setattr(Compare, "run", stop)  # the first command after training
    for said in ("step 2", "resuming from step 2 of 2"):
        with pytest.raises(SystemExit):
            main(["demo", "--out", str(tmp_path / "demo"), "--steps", "2", "--n", "4"])
        captured = capsys.readouterr()
        assert said in captured.out + captured.err and "enough" in captured.err


@pytest.mark.parametrize("name", METHODS)
def test_cite_one(name, capsys):
    main(["cite", name.upper()])
    text = capsys.readouterr().out
    assert text.strip() == METHODS[name].bibtex and text.startswith("@") and text.count("{") == text.count("}")


def test_help_names_every_method(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert set(METHODS) <= words


def test_help_names_a_new_method():
    METHODS.add("brand-new", METHODS["m2s"])
    try:
        assert "brand-new" in runpy.run_path(m2s.cli.train.__file__)["Train"].__doc__
    finally:
        METHODS.remove("brand-new")


def test_cite_all(capsys):
    """Every reference appears once, with its key."""
    main(["cite"])
    keys = re.findall(r"^@\w+\{([^,]+),", capsys.readouterr().out, re.M)
    assert len(keys) == len(set(keys)) and set(keys) == set(
        re.findall(r"@\w+\{([^,]+),", " ".join(m.bibtex for m in METHODS.values()))
    )


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for name in command or COMMANDS:
        assert f"Example: m2s {name}" in text


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"m2s {m2s.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "1"], "m2s needs a command before any option: demo, data, train, sample, evaluate, audit"),
        (["bogus"], ", ".join(COMMANDS)),
        (["trian"], "did you mean train?"),
        (["figrue", "toy", "--out", "x.png"], "did you mean figure?"),
        (["data", "prepre"], "did you mean prepare?"),
        (["data", "--out", "x"], "prepare, check, list"),
        (["figure"], "NAME"),
        (["figure", "toy"], "--out"),
        (["figure", "nope", "--out", "x.png"], "toy"),
        (["figure", "toy", "--out", "x.png", "--sed", "1"], "no option --sed: did you mean --seed?"),
        (["figure", "toy", "--ot=x.png"], "did you mean --out?"),
        (["figure", "toy", "--out", "x.png", "--quite-another"], "see m2s figure --help"),
        (["figure", "toy", "--out", "x.png", "--seed", "one"], "one"),
        (["figure", "toy", "--out", "new/x.png", "--seed", "-1"], "-1"),
        (["figure", "toy", "--out", "x.json"], ".png"),
        (["figure", "toy", "--out", "."], "folder"),
        (["figure", "toy", "--out", "file/x.png"], "file"),
        (["figure", "toy", "--out", "/proc/new/x.png"], "cannot write"),
        (["figure", "toy", "--out", "taken.png"], "taken.json"),
        (["demo", "--out", "file"], "file"),
        (["demo", "--out", "new", "--seed", "-1"], "-1"),
        (["cite", "nobody"], "sedd"),
        (["train", "digits", "--out", "new", "--method", "MDLM"], "did you mean mdlm"),
        (["sample", "nowhere", "--out", "new.png", "--device", "cuda"], "no GPU"),
        (["audit", "nowhere", "--out", "new.json", "--device", "cuda:0"], "no GPU"),
    ],
    ids=" ".join,
)
def test_invalid_input_prints_one_line_and_writes_nothing(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "taken.json").mkdir()
    monkeypatch.setattr(toy, "toy_data", lambda *_: pytest.fail("computed before the check"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert said in error_line(capsys, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.json"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert "cannot write" in error_line(capsys, "figure", "toy", "--out", str(tmp_path / "x.png"))


def test_atomic_write_leaves_no_partial_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")

    def fail() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_output_checks_leave_no_file(tmp_path):
    assert output_file(tmp_path / "a" / "x.png", (".png",)) == tmp_path / "a" / "x.png"
    assert list(output_folder(tmp_path / "a").iterdir()) == []
    with pytest.raises(UserError, match="folder"):
        output_file(tmp_path / "a", (".png",))


def test_as_a_program(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "m2s.cli", *arguments], capture_output=True, text=True, cwd=tmp_path)

    version = run("--version")
    assert version.returncode == 0 and version.stdout == f"m2s {m2s.__version__}\n"
    bad = run("figure", "nope", "--out", "x.png")
    assert bad.returncode == 2 and bad.stdout == "" and bad.stderr.count("\n") == 1 and "Traceback" not in bad.stderr
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_prints_one_line(tmp_path, monkeypatch, capsys):
    def full(config: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("m2s.training.loop.train", full)
    with pytest.raises(SystemExit) as ended:
        main(["train", "owt", "--micro-batch", "66", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1
    assert "66 of a step's 1584" in said and "--micro-batch" in said


def test_closed_pipe_prints_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m m2s.cli cite | true", shell=True, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
