"""The errors that a new user meets first name the cause, and not a consequence of it."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import m2s
import m2s.hub
from m2s.cli import main
from m2s.errors import UserError, counted
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
    assert "there is no folder or file boook.txt: check the path" in error_line(
        capsys, *prepare, "boook.txt", "--out", "packed"
    )
    assert "texts holds no file that ends in .txt" in error_line(capsys, *prepare, "texts", "--out", "packed")
    assert "notes.md must end in .txt" in error_line(capsys, *prepare, "notes.md", "--out", "packed")
    (tmp_path / "texts" / "book.txt").write_text("a text")
    assert "merges are not at" in error_line(capsys, *prepare, "texts", "--out", "packed")
    with pytest.raises(UserError, match=r"there is no folder or file boook\.txt: check the path"):
        m2s.data.prepare_text("boook.txt", "packed", m2s.data.GPT2())
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("mistyped", ["texts/boook", "texts/boook.txt", "txts/book.jsonl", "data/book", "./text/book"])
def test_a_mistyped_text_is_no_data_set_of_the_hub(tmp_path, monkeypatch, capsys, mistyped) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "texts").mkdir()
    said = error_line(capsys, "data", "prepare", mistyped, "--out", "packed", "--tokenizer", "bytes")
    assert f"there is no folder or file {mistyped}: check the path" in said and "pip install" not in said


NO_TEXT = "m2s: there is no folder or file {0}; if you mean the data set {0} of the Hugging Face hub: pip install 'datasets>=4'"
NO_RUN = "m2s: there is no folder {0}; if you mean the repository {0} of the Hugging Face hub: pip install huggingface_hub"


@pytest.fixture(params=["empty folder", "folder with similar names"])
def bare(request, tmp_path, monkeypatch) -> None:
    """An environment without the optional packages, and a folder whose contents must not matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    for package in ("datasets", "huggingface_hub", "tiktoken", "transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    if request.param != "empty folder":
        for name in ("text", "corpora", "experiment"):
            (tmp_path / name).mkdir()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("name", ["texts/boook", "corpus/books", "experiments/digits", "owner/name"])
def test_a_path_that_does_not_exist_is_reported_before_missing_packages(capsys, name) -> None:
    for tokenizer in ([], ["--tokenizer", "bytes"], ["--tokenizer", "gpt2"], ["--tokenizer", "someone/tokens"]):
        assert error_line(capsys, "data", "prepare", name, "--out", "x", *tokenizer) == NO_TEXT.format(name)
    for command in (["sample", name, "--out", "a.png"], ["evaluate", "bpd", name], ["audit", name, "--out", "x"]):
        assert error_line(capsys, *command) == NO_RUN.format(name)


def test_a_data_set_of_the_hub_is_named_before_what_the_tokenizer_lacks(tmp_path, monkeypatch, capsys) -> None:
    """The package `datasets` is there, but nothing is downloaded for a tokenizer that cannot encode."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("m2s.data.documents.is_installed", lambda: True)
    said = error_line(capsys, "data", "prepare", "corpus/books", "--out", "x")
    start = (
        "m2s: there is no folder or file corpus/books; if you mean the data set of the Hugging Face hub: GPT-2's merges are not"
    )
    assert said.startswith(start) and said.endswith("--tokenizer bytes needs none")


def test_without_tiktoken_another_tokenizer_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    (tmp_path / "book.txt").write_text("a text")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    said = error_line(capsys, "data", "prepare", "book.txt", "--out", "x", "--merges", "merges.txt")
    assert said.endswith("needs tiktoken: pip install tiktoken; --tokenizer bytes needs no package")


@pytest.mark.parametrize("mistyped", ["runs/digit", "runs/nested/digits", "./digits", "digits", "/digits"])
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


@pytest.mark.parametrize(("mistyped", "meant"), [("run/digits", "runs/digits"), ("model/digit", "models/digits")])
def test_a_path_that_is_similar_to_an_existing_one_is_no_repository(tmp_path, monkeypatch, capsys, mistyped, meant) -> None:
    """The name of the first folder is mistyped too, so that nothing else says that it is a path."""
    monkeypatch.chdir(tmp_path)
    for package in ("huggingface_hub", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / meant).mkdir(parents=True)
    for command in (["sample", mistyped, "--out", "a.png"], ["evaluate", "bpd", mistyped], ["audit", mistyped, "--out", "x"]):
        assert error_line(capsys, *command) == f"m2s: there is no folder {mistyped}: did you mean {meant}?"
    said = error_line(capsys, "data", "prepare", mistyped, "--out", "packed", "--tokenizer", "bytes")
    assert said.startswith(f"m2s: there is no folder or file {mistyped}: check the path") and "pip install" not in said
    assert error_line(capsys, "sample", "owner/digits", "--out", "a.png") == NO_RUN.format("owner/digits")


@pytest.mark.parametrize("mistyped", ["runs/digit", "results/digits", "nested/digit"])
def test_a_mistyped_run_is_a_mistyped_run_offline_too(tmp_path, monkeypatch, capsys, mistyped) -> None:
    """With huggingface_hub, which looks for a repository and finds no connection: the path is wrong."""

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.chdir(tmp_path)
    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = offline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    for folder in ("runs/digits", "nested"):
        (tmp_path / folder).mkdir(parents=True)
    said = error_line(capsys, "sample", mistyped, "--out", "samples.png")
    ends = {
        "runs/digit": " (runs holds digits): did you mean runs/digits?",
        "nested/digit": " (nested holds no folder): check the path",
        "results/digits": ": check the path",
    }
    assert said == f"m2s: there is no folder {mistyped}{ends[mistyped]}"
    assert "this machine is offline" in error_line(capsys, "sample", "owner/name", "--out", "samples.png")


def test_a_file_is_no_checkpoint(tmp_path, monkeypatch, capsys) -> None:
    """The folder of the file is offered only where it can be a checkpoint."""
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "model.safetensors", "run/log.jsonl", "run/config.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
        said = error_line(capsys, "sample", name, "--out", "a.png")
        start, _, advice = said.partition(": give ")
        assert start == f"m2s: {name} is a file, but a checkpoint is a folder"
        if name in ("book.txt", "run/log.jsonl"):
            assert advice == "the folder of a run, such as runs/digits (m2s train makes one)"
        else:
            assert advice == (str(tmp_path) if name == "model.safetensors" else "run")


def test_a_text_is_no_data_set_of_images(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packed").mkdir()
    said = error_line(capsys, "train", "digits", "--data.folder", "packed", "--out", "run")
    assert said.endswith(f"leave out --data.folder ({Path(m2s.data.__file__).parent} has them)") and "install" not in said
    (tmp_path / "packed" / "meta.json").write_text("{}")
    said = error_line(capsys, "train", "digits", "--data.folder", "packed", "--out", "run")
    assert said.endswith(
        "digits is a data set of images, but packed is a text that m2s data prepare made: train on it with "
        "m2s train owt --data.folder packed"
    )
    assert not (tmp_path / "run").exists()


def test_samples_that_no_judge_can_read(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    said = error_line(capsys, "evaluate", "genppl", "run")
    assert "run is a folder, but samples are a file" in said and "m2s sample run --n 1024 --out samples.npz" in said
    settings = json.dumps({"data": {"kind": "image", "shape": [2, 3], "levels": 4}})
    np.savez(tmp_path / "a.npz", tokens=np.zeros((4, 6), np.int32), settings=settings)
    for options in ([], ["--tokenizer", "bytes"]):
        said = error_line(capsys, "evaluate", "genppl", "a.npz", *options)
        assert said == "m2s: a.npz holds images, which a judge cannot read: measure them with m2s evaluate fid a.npz"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["evaluate", "bpd", "run", "--data.folder", "x"], "there is no option --data.folder: did you mean --data?"),
        (["train", "digits", "--folder", "x"], "there is no option --folder: did you mean --data.folder?"),
    ],
)
def test_the_option_of_another_command(words, advice, capsys) -> None:
    assert error_line(capsys, *words) == f"m2s: {advice}"


def test_a_model_of_tokens_without_a_tokenizer_writes_npz(tmp_path, capsys) -> None:
    head = m2s.Posterior(PROCESSES["uniform"])
    model = DiT(DiTConfig(states=4, width=16, depth=1, heads=2, length=6))
    for tokenizer, endings in ((None, ".npz"), (m2s.data.Characters("abcd"), ".txt or .npz")):
        m2s.hub.save(tmp_path / "run", model, head, {"kind": "text", "length": 6}, tokenizer=tokenizer)
        said = error_line(capsys, "sample", str(tmp_path / "run"), "--out", str(tmp_path / "a.png"))
        assert said.endswith(f"run is not a model of images: write {endings}")


def test_numbers_agree_with_their_nouns(tmp_path, monkeypatch, capsys) -> None:
    assert [counted(n, "sample") for n in (0, 1, 2, 2000)] == ["0 samples", "1 sample", "2 samples", "2,000 samples"]
    assert [counted(n, "pass") for n in (1, 3)] == ["1 pass", "3 passes"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("a text " * 100)
    main(["data", "prepare", "book.txt", "--out", "packed", "--tokenizer", "bytes"])
    assert "\n1 source, 0 blank documents left out; " in capsys.readouterr().out


def test_paths_and_names_of_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    local = ["models/a", "runs/a", "../a/b", "/a/b", "~/a", "a/b.txt", "book.jsonl", "a/../runs/b.json"]
    assert [name for name in local if not is_likely_local(name)] == []
    remote = ["louaaron/sedd-small", "google/gemma-2-9b", "gpt2-large", "a/b", "model/a"]
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
