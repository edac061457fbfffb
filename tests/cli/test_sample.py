"""`m2s sample`: the files it writes, interrupted and divided runs, and its errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fork_server import COMMAND, Program
from matplotlib.image import imread

import m2s
import m2s.hub
from m2s.cli import main
from m2s.data import GPT2, Characters, prepare_text
from m2s.errors import UserError
from m2s.models import DiT, DiTConfig
from m2s.report.samples import picture_grid
from m2s.samplers import Adaptive, ForwardBackward, PredictorCorrector, Sampler
from m2s.samplers.shards import SampleShards
from merges import write_merges

LETTERS = Characters(" abcdefg")


def network(states: int, length: int, classes: int | None = None) -> DiT:
    torch.manual_seed(3)
    model = DiT(DiTConfig(states=states, width=16, depth=1, heads=2, condition_width=8, length=length, classes=classes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    head = m2s.Posterior(m2s.Uniform(5, m2s.Linear()), offset="exact")
    data = {"kind": "image", "shape": [3, 4], "levels": 5}
    return str(m2s.hub.save(tmp_path_factory.mktemp("images"), network(5, 12, classes=3), head, data))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    head = m2s.Posterior(m2s.Absorbing(8, m2s.Linear()))
    data = {"kind": "text", "length": 10}
    return str(m2s.hub.save(tmp_path_factory.mktemp("text"), network(9, 10), head, data, tokenizer=LETTERS))


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> str:
    head = m2s.LogScore(m2s.Uniform(5, m2s.Linear()))
    return str(m2s.hub.save(tmp_path_factory.mktemp("free"), network(5, 12), head, {"kind": "text", "length": 12}))


def draw(checkpoint: str, out: Path, *more: str) -> np.ndarray:
    main(["sample", checkpoint, "--out", str(out), "--steps", "4", *more])
    with np.load(out.with_suffix(".npz"), allow_pickle=False) as file:
        return file["tokens"]


def test_no_bar_without_a_terminal(images, free, tmp_path, capsys):
    draw(images, tmp_path / "a.npz", "--n", "2")
    main(["audit", free, "--n", "2", "--steps", "2", "--out", str(tmp_path / "audit")])
    assert capsys.readouterr().err == ""


def error_line(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Run a command that must fail and write nothing, and return its one line on stderr."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as exit_:
        main(["sample", *arguments])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and sorted(folder.rglob("*")) == before
    return err


def test_tokens_are_those_of_the_library(images: str, tmp_path: Path) -> None:
    tokens = draw(images, tmp_path / "a.npz", "--n", "7", "--batch-size", "3", "--seed", "5")
    model, head = m2s.hub.load(images)
    assert np.array_equal(tokens, m2s.sample(model, head, (7, 12), steps=4, seed=5).numpy())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz"]
    with np.load(tmp_path / "a.npz") as file:
        settings = json.loads(str(file["settings"]))
    assert settings["seed"] == 5 and settings["sampler"] == "bayes" and len(settings["weights"]) == 64


def test_grid_of_pictures(images: str, tmp_path: Path) -> None:
    tokens = draw(images, tmp_path / "a.png", "--n", "5")
    page = imread(tmp_path / "a.png")
    scale = 19  # three rows of pixels enlarged to at least 56
    assert page.shape[:2] == (2 * (3 * scale + 2) + 2, 3 * (4 * scale + 2) + 2)
    fourth = page[2 + 3 * scale + 2 :, 2:][: 3 * scale : scale, : 4 * scale : scale, 0]
    assert np.allclose(fourth, tokens[3].reshape(3, 4) / 4, atol=1 / 255)
    color = picture_grid(torch.arange(12).reshape(1, 12) * 20, (2, 2, 3), 256)
    assert color[2, 2].tolist() == [0, 20, 40] and color[2, -3].tolist() == [60, 80, 100]


def test_text_and_prompt(text: str, tmp_path: Path) -> None:
    tokens = draw(text, tmp_path / "a.txt", "--n", "3", "--prompt", "bad ", "--sampler", "ancestral")
    lines = (tmp_path / "a.txt").read_text().splitlines()
    assert lines[0] == "--- sample 0 ---" and lines[1].startswith("bad ") and len(lines[1]) == 10
    assert LETTERS.decode(tokens[1].tolist()) == lines[4]


def test_longer_text_is_filled_in_windows(text: str, tmp_path: Path) -> None:
    tokens = draw(text, tmp_path / "a.npz", "--n", "2", "--length", "23")
    model, head = m2s.hub.load(text)
    assert np.array_equal(tokens, m2s.sample(model, head, (2, 23), steps=4, window=10, seed=0).numpy())


def test_clamp_from_a_file_and_labels(images: str, tmp_path: Path) -> None:
    clamp = np.full(12, -1)
    clamp[[0, 5, 11]] = [4, 2, 1]
    np.save(tmp_path / "clamp.npy", clamp)
    more = ("--n", "4", "--clamp", str(tmp_path / "clamp.npy"), "--labels", "0", "2", "--guidance", "2")
    tokens = draw(images, tmp_path / "a.npz", *more)
    assert (tokens[:, [0, 5, 11]] == [4, 2, 1]).all()
    model, head = m2s.hub.load(images)
    both = torch.from_numpy(clamp).expand(4, 12)
    condition = torch.tensor([0, 2, 0, 2])
    assert np.array_equal(
        tokens, m2s.sample(model, head, (4, 12), steps=4, clamp=both, condition=condition, guidance=2.0, seed=0)
    )


@pytest.mark.parametrize("start", [1, 4, 5])
def test_labels_belong_to_the_number_of_a_sample(images: str, tmp_path: Path, start: int) -> None:
    """Samples drawn with --start are those of a run that draws all of them."""
    labels = ("--labels", "0", "2", "1", "--guidance", "2")
    together = draw(images, tmp_path / "all.npz", "--n", "8", *labels)
    later = draw(images, tmp_path / "later.npz", "--n", str(8 - start), "--start", str(start), *labels)
    assert np.array_equal(later, together[start:])


def test_project_repairs_an_unconstrained_score(free: str, tmp_path: Path) -> None:
    plain = draw(free, tmp_path / "a.npz", "--n", "4", "--sampler", "analytic")
    repaired = draw(free, tmp_path / "b.npz", "--n", "4", "--sampler", "analytic", "--project")
    model, head = m2s.hub.load(free)
    assert np.array_equal(repaired, m2s.sample(model, m2s.Projected(head), (4, 12), steps=4, sampler="analytic", seed=0))
    assert not np.array_equal(plain, repaired)


def program(checkpoint: str, out: Path, *more: str) -> Program:
    return Program(COMMAND, "sample", checkpoint, "--out", str(out), *more)


def test_interrupted_run_resumes(images: str, tmp_path: Path) -> None:
    """A run killed three times, each time after a new shard: no incomplete file, and the samples of an uninterrupted run."""
    more = ("--n", "40", "--steps", "100", "--batch-size", "8", "--micro-batch", "16")
    out = tmp_path / "a.npz"
    for least in (1, 2, 4):
        run = program(images, out, *more)
        while run.poll() is None and len(list(out.with_name("a.npz.parts").glob("*.npz"))) < least:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        assert run.wait().returncode == -signal.SIGKILL and not out.exists()
    last = program(images, out, *more).wait()
    assert last.returncode == 0 and "resuming: " in last.stdout and not out.with_name("a.npz.parts").exists()
    model, head = m2s.hub.load(images)
    torch.set_num_threads(1)
    with np.load(out) as file:
        assert np.array_equal(file["tokens"], m2s.sample(model, head, (40, 12), steps=100, seed=0, micro_batch=16).numpy())


def test_two_processes_divide_the_work(images: str, tmp_path: Path) -> None:
    more = ("--n", "21", "--steps", "4", "--batch-size", "4")
    variables = {**os.environ, "PYTHONPATH": str(Path(m2s.__file__).parent.parent)}
    variables |= {"WORLD_SIZE": "2", "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-m", "m2s.cli", "sample", images, "--out", str(tmp_path / "a.npz"), *more]
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, env=variables | {"RANK": str(rank)}, **piped) for rank in range(2)]
    imports = [run.communicate()[1] for run in both]
    assert [run.returncode for run in both] == [0, 0]
    # torch's compiler takes a second to import, and nothing is compiled.
    assert all(" torch\n" in text and "torch._dynamo" not in text for text in imports)
    with np.load(tmp_path / "a.npz") as file:
        assert np.array_equal(file["tokens"], draw(images, tmp_path / "b.npz", "--n", "21"))


def unfinished(checkpoint: str, out: Path) -> Path:
    main(["sample", checkpoint, "--out", str(out), "--steps", "4", "--n", "8", "--batch-size", "4", "--shard", "0/2"])
    assert not out.exists()
    return out.with_name(out.name + ".parts")


def test_two_runs_on_one_output(images: str, tmp_path: Path) -> None:
    """The second is an error of one line. The first is not disturbed, and the next one starts after its end."""
    out, more = tmp_path / "a.npz", ("--n", "12", "--steps", "300", "--batch-size", "4", "--micro-batch", "16")
    first = program(images, out, *more)
    while first.poll() is None and not list(out.with_name("a.npz.parts").glob("*.npz")):
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # a stopped process keeps its locks, so the others need not be fast
    try:
        for words in (more, (*more, "--shard", "0/2"), (*more, "--overwrite")):
            second = program(images, out, *words).wait()
            assert second.returncode == 2 and second.stderr.count("\n") == 1
            assert "is being drawn by another process" in second.stderr
            assert first.poll() is None
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait().returncode == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["a.npz"]


def test_divided_runs_are_locked_by_part(images: str, tmp_path: Path) -> None:
    parts = SampleShards(tmp_path / "a.npz", 8, 12, 2, {})
    with parts.lock(0, 2), parts.lock(1, 2):
        for shard, shards in ((0, 2), (1, 2), (0, 1)):
            with pytest.raises(UserError, match="is being drawn by another process"), parts.lock(shard, shards):
                pass
    with parts.lock():
        parts.open()
        parts.delete()
    with parts.joining() as complete:  # another process has joined them
        assert not complete
    parts.folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a link"), parts.lock():
        pass
    parts.folder.unlink()
    parts.folder.mkdir()
    (tmp_path / "secret").write_text("unchanged")
    (parts.folder / ".lock-0-of-2").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="is a link or not an ordinary file"), parts.lock(0, 2):
        pass
    assert (tmp_path / "secret").read_text() == "unchanged"


def test_torchrun_passes_the_options_on(images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without "--", torchrun takes --n for the beginning of several of its own options."""
    from torch.distributed.run import get_args_parser

    command = ["sample", images, "--n", "2", "--steps", "2", "--out", str(tmp_path / "a.npz")]
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["-m", "m2s.cli", *command])
    assert "ambiguous option: --n" in capsys.readouterr().err
    given = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", "m2s.cli", "--", *command])
    assert given.training_script == "m2s.cli"
    assert given.training_script_args in (command, ["--", *command])  # depends on the version of Python
    main(["--", *command])
    assert (tmp_path / "a.npz").is_file()


def test_corrupt_shard_is_named(images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.npz"
    parts = unfinished(images, out)
    part = next(parts.glob("*.npz"))
    good = part.read_bytes()
    more = (images, "--out", str(out), "--steps", "4", "--n", "8", "--batch-size", "4")
    for bad in (good[: len(good) // 2], b"", good[:60] + b"?" * 20 + good[80:]):
        part.write_bytes(bad)
        with pytest.raises(SystemExit):
            main(["sample", *more])
        assert f"{part} is damaged" in capsys.readouterr().err and not out.exists()
    part.write_bytes(good)
    (parts / "settings.json").write_text("{")
    with pytest.raises(SystemExit):
        main(["sample", *more])
    assert "settings.json is damaged" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("options", "sampler"),
    [
        ("forward_backward", ForwardBackward()),
        ("forward_backward --corrections 2 --leap 0.05 --entry 0.9", ForwardBackward(corrections=2, leap=0.05, entry=0.9)),
        ("predictor_corrector --corrections 3 --sites 2", PredictorCorrector(corrections=3, sites=2)),
        ("adaptive --sites 2", Adaptive(sites=2)),
    ],
)
def test_options_of_a_sampler(text: str, tmp_path: Path, options: str, sampler: Sampler) -> None:
    """The command and the library give the same samples."""
    tokens = draw(text, tmp_path / "a.npz", "--n", "5", "--sampler", *options.split())
    model, head = m2s.hub.load(text)
    assert np.array_equal(tokens, m2s.sample(model, head, (5, 10), steps=4, sampler=sampler, seed=0).numpy())
    with np.load(tmp_path / "a.npz") as file:
        settings = json.loads(str(file["settings"]))
    assert settings["sampler"] == sampler.name
    for name in ("corrections", "sites", "leap", "entry"):
        assert settings.get(name) == getattr(sampler, name, None)


def test_a_run_resumes_only_with_the_same_sampler_options(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, more = tmp_path / "a.npz", ("--n", "8", "--steps", "4", "--batch-size", "4", "--sampler", "forward_backward")
    main(["sample", text, "--out", str(out), *more, "--shard", "0/2"])
    capsys.readouterr()
    for option, value, said in (
        ("--corrections", "3", "corrections 10 there and 3 here"),
        ("--leap", "0.01", "leap 0.003 there and 0.01 here"),
        ("--entry", "0.5", "entry 0.1 there and 0.5 here"),
    ):
        assert said in error_line(capsys, tmp_path, text, "--out", str(out), *more, option, value)
    main(["sample", text, "--out", str(out), *more, "--corrections", "10", "--entry", "0.1"])  # its defaults
    assert "resuming: 4 of 8" in capsys.readouterr().out
    model, head = m2s.hub.load(text)
    with np.load(out) as file:
        assert np.array_equal(
            file["tokens"], m2s.sample(model, head, (8, 10), steps=4, sampler="forward_backward", seed=0).numpy()
        )


def test_shards_of_another_run_are_an_error(images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.npz"
    unfinished(images, out)
    capsys.readouterr()
    err = error_line(capsys, tmp_path, images, "--out", str(out), "--steps", "5", "--n", "8", "--batch-size", "4")
    assert "steps 4 there and 5 here" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--steps", "0"), "m2s: --steps is 0, but it must be at least 1"),
        (("--steps", "-3"), "m2s: --steps is -3"),
        (("--n", "0"), "m2s: --n is 0, but it must be at least 1"),
        (("--batch-size", "0"), "m2s: --batch-size is 0, but it must be at least 1"),
        (("--sampler", "eulr"), "m2s: --sampler is 'eulr', but there is no sampler of that name: did you mean euler"),
        (
            ("--sampler", "ancestral"),
            "it needs a model trained with --process.kind absorbing: use --sampler bayes, analytic, euler or tau",
        ),
        (("--leap", "0.1"), "m2s: --leap is 0.1, but sampler 'bayes' does not read it, only forward_backward: leave it out"),
        (
            ("--sampler", "predictor_corrector", "--entry", "0.5"),
            "m2s: --entry is 0.5, but sampler 'predictor_corrector' does not",
        ),
        (("--sampler", "euler", "--corrections", "2"), "only forward_backward, predictor_corrector, self_correcting"),
        (
            ("--sampler", "forward_backward", "--sites", "2"),
            "m2s: --sites is 2, but sampler 'forward_backward' does not read it",
        ),
        (("--sampler", "forward_backward", "--corrections", "0"), "m2s: --corrections is 0, but it must be at least 1"),
        (("--sampler", "forward_backward", "--leap", "nan"), "m2s: --leap is nan, but it must be a positive number"),
        (("--sampler", "forward_backward", "--entry", "1.5"), "m2s: --entry is 1.5, but it must be in (0, 1]"),
        (("--grid", "log"), "m2s: --grid is 'log', but there is no grid of that name: choose from linear, cosine"),
        (("--temperature", "0"), "m2s: --temperature is 0.0, but it must be positive"),
        (("--top-k", "0"), "m2s: --top-k is 0, but it must be at least 1"),
        (("--top-p", "1.5"), "m2s: --top-p is 1.5, but it must be in (0, 1]"),
        (("--seed", "-1"), "m2s: --seed is -1, but it must be an int in [0, 2^64)"),
        (("--length", "13"), "m2s: --length is 13, but the images of"),
        (("--labels", "3"), "knows the classes 0..2"),
        (("--guidance", "2"), "--guidance is 2.0, but there are no --labels"),
        (("--project",), "predicts a posterior already"),
        (("--prompt", "a"), "no tokenizer"),
        (("--shard", "2/2"), "m2s: --shard is '2/2', but the first number must lie in 0..1"),
        (("--shard", "two"), "m2s: --shard is 'two', but it must be like 0/2"),
        (("--clamp", "nowhere.npy"), "cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_options(
    images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert message in error_line(capsys, tmp_path, images, "--out", str(tmp_path / "a.npz"), *more)


def test_invalid_files(images: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must end in" in error_line(capsys, tmp_path, images, "--out", str(tmp_path / "a.gif"))
    assert "no folder" in error_line(capsys, tmp_path, str(tmp_path / "no"), "--out", str(tmp_path / "a.npz"))
    assert "model of images" in error_line(capsys, tmp_path, text, "--out", str(tmp_path / "a.png"))
    assert "no tokenizer" in error_line(capsys, tmp_path, images, "--out", str(tmp_path / "a.txt"))
    assert "10 tokens" in error_line(capsys, tmp_path, text, "--out", str(tmp_path / "a.txt"), "--prompt", "abababababab"[:10])
    assert "--prompt" in error_line(capsys, tmp_path, text, "--out", str(tmp_path / "a.txt"), "--prompt", "ABC")
    (tmp_path / "a.npz").write_bytes(b"mine")
    assert "is there already" in error_line(capsys, tmp_path, images, "--out", str(tmp_path / "a.png"))
    assert (tmp_path / "a.npz").read_bytes() == b"mine"
    draw(images, tmp_path / "a.png", "--overwrite")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of GPT-2's tokens without the merges."""
    head = m2s.Posterior(m2s.Absorbing(50_257, m2s.Linear()))
    data = {"kind": "text", "length": 4}
    return str(m2s.hub.save(tmp_path_factory.mktemp("gpt2"), network(50_258, 4), head, data, tokenizer=GPT2("/nowhere")))


def test_missing_files_of_a_tokenizer_are_an_error_before_the_first_sample(
    gpt2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    asked = (("a.txt",), ("a.npz", "--prompt", "a"))
    for out, *more in asked:
        err = error_line(capsys, tmp_path, gpt2, "--out", str(tmp_path / out), "--n", "1", "--steps", "1", *more)
        assert (
            err.startswith("m2s: GPT-2's merges are not at ") and f"into {tmp_path}/data/gpt2" in err and "prepare" not in err
        )
    draw(gpt2, tmp_path / "b.npz", "--n", "1")  # tokens alone need no tokenizer
    capsys.readouterr()
    write_merges(tmp_path / "data" / "gpt2" / "merges.txt")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", None)
        for out, *more in asked:
            err = error_line(capsys, tmp_path, gpt2, "--out", str(tmp_path / out), "--n", "1", "--steps", "1", *more)
            assert "pip install tiktoken" in err
    pytest.importorskip("tiktoken")
    draw(gpt2, tmp_path / "a.txt", "--n", "1", "--prompt", "a ")
    assert (tmp_path / "a.txt").read_text().startswith("--- sample 0 ---\na ")


def test_merges_are_saved_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training, sampling and evaluation find them with an empty data folder."""
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some words " * 9)
    prepare_text("a.txt", "packed", GPT2(str(write_merges(tmp_path / "given.txt"))), validation_fraction=0.25)
    (tmp_path / "given.txt").unlink()
    small = "--network.size tiny --network.width 16 --network.heads 2 --network.depth 1 --data.length 4 --batch 2 --steps 1"
    rest = "--optimizer.warmup 0 --device cpu --out run"
    main(["train", "owt", "--data.folder", "packed", *small.split(), *rest.split()])
    Path("packed").rename("away")  # the checkpoint has its own copy
    draw("run", tmp_path / "samples.txt", "--n", "2", "--prompt", "so")
    Path("away").rename("packed")
    assert (tmp_path / "samples.txt").read_text().count("---\nso") == 2
    main(["evaluate", "bpd", "run", "--passes", "1", "--device", "cpu"])
    assert "byte" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".png", ".txt"])
def test_missing_picture_or_text_of_finished_tokens_is_written(
    images: str, text: str, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command writes it without calling the network. Tokens with other settings stay as they are."""
    checkpoint, out = (images if suffix == ".png" else text), tmp_path / f"a{suffix}"
    tokens = draw(checkpoint, out, "--n", "3")
    full, before = out.read_bytes(), out.with_suffix(".npz").read_bytes()
    out.unlink()
    unfinished(checkpoint, tmp_path / "b.npz").rename(tmp_path / "a.npz.parts")  # killed before they were removed
    with monkeypatch.context() as patch:
        patch.setattr(m2s, "sample", lambda *_, **__: pytest.fail("the network was called"))
        assert np.array_equal(draw(checkpoint, out, "--n", "3"), tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", out.name]
    assert out.read_bytes() == full and out.with_suffix(".npz").read_bytes() == before
    capsys.readouterr()
    assert "is there already: give another" in error_line(
        capsys, tmp_path, checkpoint, "--out", str(out), "--n", "3", "--steps", "4"
    )
    out.unlink()
    err = error_line(capsys, tmp_path, checkpoint, "--out", str(out), "--n", "3", "--steps", "4", "--seed", "1")
    assert "a.npz is there already, drawn with other settings (seed): give another --out, or --overwrite" in err
    for bad in (before[: len(before) // 2], before[:200] + b"?" * 20 + before[220:], b""):
        out.with_suffix(".npz").write_bytes(bad)
        err = error_line(capsys, tmp_path, checkpoint, "--out", str(out), "--n", "3", "--steps", "4")
        assert "a.npz is there already, and is not a complete file of samples: give another" in err
    assert not np.array_equal(draw(checkpoint, out, "--n", "3", "--seed", "1", "--overwrite"), tokens)


def test_default_sampler_of_an_unconstrained_score(tmp_path):
    """Without --sampler it is that of SEDD's release, and with --project the exact step of the posterior."""
    run = tmp_path / "run"
    main(["train", "digits", "--method", "sedd", "--steps", "1", "--validate-every", "0", "--device", "cpu", "--out", str(run)])
    for options, sampler in (([], "analytic"), (["--project"], "bayes")):
        main(["sample", str(run), "--n", "2", "--steps", "2", "--overwrite", *options, "--out", str(tmp_path / "a.npz")])
        assert json.loads(str(np.load(tmp_path / "a.npz")["settings"]))["sampler"] == sampler
