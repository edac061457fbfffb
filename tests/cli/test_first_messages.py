"""The errors that a new user meets first name the cause, and not a consequence of it."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.errors import UserError
from m2s.hub import load
from m2s.io import is_likely_local
from m2s.models import DiT, DiTConfig

SCHEDULE = m2s.Linear()
PROCESSES = {
    "uniform": m2s.Uniform(4, SCHEDULE),
    "absorbing": m2s.Absorbing(4, SCHEDULE),
    "hybrid": m2s.Hybrid(4, p_uniform=0.1),
}


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail, and return its one line on stderr."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err.rstrip("\n")


def test_missing_text_is_reported_before_missing_tokenizer_files(tmp_path, monkeypatch, capsys) -> None:
    """There are no merges of GPT-2 here either, but the text is what the user typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "notes.md").write_text("notes")
    prepare = ("data", "prepare")
    assert "source 'boook.txt' is neither a file" in error_line(capsys, *prepare, "boook.txt", "--out", "packed")
    assert "texts holds no file that ends in .txt" in error_line(capsys, *prepare, "texts", "--out", "packed")
    assert "notes.md must end in .txt" in error_line(capsys, *prepare, "notes.md", "--out", "packed")
    (tmp_path / "texts" / "book.txt").write_text("a text")
    assert "merges are not at" in error_line(capsys, *prepare, "texts", "--out", "packed")
    with pytest.raises(UserError, match="is neither a file or folder here"):
        m2s.data.prepare_text("boook.txt", "packed", m2s.data.GPT2())
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("mistyped", ["texts/boook", "texts/boook.txt", "text/book", "txts/book.jsonl"])
def test_a_mistyped_text_is_no_data_set_of_the_hub(tmp_path, monkeypatch, capsys, mistyped) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "texts").mkdir()
    said = error_line(capsys, "data", "prepare", mistyped, "--out", "packed", "--tokenizer", "bytes")
    assert f"source '{mistyped}' is neither a file" in said and "pip install" not in said
    said = error_line(capsys, "data", "prepare", "owner/name", "--out", "packed", "--tokenizer", "bytes")
    assert "pip install 'datasets>=4'" in said


@pytest.mark.parametrize("mistyped", ["runs/digit", "run/digits", "runs/nested/digits", "./digits", "digits", "/digits"])
def test_a_mistyped_run_does_not_suggest_to_install_a_package(tmp_path, monkeypatch, capsys, mistyped) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="there is no folder") as error:
        load(mistyped)
    assert "huggingface_hub" not in str(error.value)
    said = error_line(capsys, "sample", mistyped, "--out", "samples.png")
    assert "there is no folder" in said and "pip install" not in said and "huggingface" not in said
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        load("louaaron/sedd-small")


def test_paths_and_names_of_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    local = ["models/a", "model/a", "runs/a", "../a/b", "/a/b", "~/a", "a/b.txt", "book.jsonl", "a/../runs/b.json"]
    assert [name for name in local if not is_likely_local(name)] == []
    remote = ["louaaron/sedd-small", "google/gemma-2-9b", "gpt2-large", "a/b"]
    assert [name for name in remote if is_likely_local(name)] == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: m2s.Uniform(vocab_size=4), "m2s.Uniform has no argument vocab_size: did you mean vocab?"),
        (lambda: m2s.Uniform(vocab_size=4, schedule=SCHEDULE), "m2s.Uniform has no argument vocab_size: did you mean vocab?"),
        (lambda: m2s.Absorbing(vocabulary=4), "m2s.Absorbing has no argument vocabulary: did you mean vocab?"),
        (lambda: m2s.Hybrid(4, uniform=0.1), "m2s.Hybrid has no argument uniform: did you mean p_uniform?"),
        (
            lambda: m2s.Absorbing(num_classes=4),
            "m2s.Absorbing has no argument num_classes: it is m2s.Absorbing(vocab, schedule)",
        ),
        (lambda: m2s.Uniform(), "m2s.Uniform needs vocab: it is m2s.Uniform(vocab, schedule)"),
        (lambda: m2s.Uniform(4, SCHEDULE, 1), "m2s.Uniform takes 2 arguments, each of them once"),
        (lambda: m2s.Uniform(4, vocab=4), "m2s.Uniform takes 2 arguments, each of them once"),
        (lambda: m2s.LogScore(), "m2s.LogScore needs process"),
        (
            lambda: m2s.Posterior(PROCESSES["uniform"], ofset="exact"),
            "m2s.Posterior has no argument ofset: did you mean offset?",
        ),
    ],
)
def test_a_constructor_names_its_arguments_and_no_internal_class(call, expected) -> None:
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value).startswith(expected) and isinstance(error.value, UserError)
    assert "Scheduled" not in str(error.value) and "__init__" not in str(error.value)


def test_errors_inside_a_constructor_stay_as_they_are() -> None:
    class Mine(m2s.Uniform):
        def __init__(self, vocab: int) -> None:
            super().__init__(vocab, SCHEDULE)
            len(vocab)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        Mine(4)
    with pytest.raises(TypeError, match=r"Mine has no argument size: it is .*Mine\(vocab\)$"):
        Mine(size=4)  # type: ignore[call-arg]
    assert list(inspect.signature(m2s.Uniform).parameters) == ["vocab", "schedule"]


class Few(torch.nn.Module):
    """A network with a given number of outputs."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outputs))

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, condition: object = None) -> torch.Tensor:
        return self.weight.expand(*x_t.shape, -1)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("kind", [m2s.Posterior, m2s.LogScore])
@pytest.mark.parametrize("is_dit", [True, False], ids=["DiT", "other network"])
def test_a_network_with_too_few_outputs_is_named_as_the_cause(name, kind, is_dit, without_shape_hook) -> None:
    process = PROCESSES[name]
    head, x_0, t = kind(process), torch.randint(4, (8, 6)), torch.rand(8)
    for outputs in (process.states - 1, 2):
        model = DiT(DiTConfig(states=outputs, width=16, depth=1, heads=2)) if is_dit else Few(outputs)
        calls = (
            lambda model=model: m2s.Objective(model, head)(x_0, t),
            lambda model=model: m2s.sample(model, head, shape=(2, 6), steps=2),
            lambda model=model: m2s.elbo(model, head, x_0, passes=1),
        )
        for call in calls:
            with pytest.raises(ValueError, match="the network has too few outputs") as error:
                call()
            assert str(outputs) in str(error.value) and f"{process.states}" in str(error.value)


def test_a_loss_names_the_network_too() -> None:
    head = m2s.Posterior(PROCESSES["absorbing"])
    x_0, t = torch.randint(4, (8, 6)), torch.rand(8)
    x_t = head.process.corrupt(x_0, t)
    for output in (torch.zeros(8, 6, 4), m2s.Unprojected(torch.zeros(8, 6, 3), torch.zeros(4, 3))):
        with pytest.raises(ValueError, match="the network has too few outputs, its last layer needs 5"):
            m2s.score_entropy(head, output, x_0, x_t, t)


def test_the_messages_are_the_same_in_a_program_of_its_own(tmp_path: Path) -> None:
    """Here the tests' shape checker wraps every function, and a user has none."""
    code = "import m2s\ntry: m2s.Uniform(vocab_size=4)\nexcept TypeError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(m2s.__file__).parents[1])
    assert done.stdout == "m2s.Uniform has no argument vocab_size: did you mean vocab? it is m2s.Uniform(vocab, schedule)\n"
