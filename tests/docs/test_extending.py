"""The plugins of docs/extending run in `m2s train`, `m2s sample` and `m2s evaluate`, with the commands of their pages."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_pages import ROOT, commands, plugins, restored_registries
from safetensors.torch import save_file

import m2s
from m2s.cli import main
from m2s.registry import load_plugin
from m2s.samplers import make_sampler
from m2s.training.run_folder import RECORD

PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "extending").glob("*.md"))}
FILES = {name: code for text in PAGES.values() for name, code in plugins(text).items()}
# What makes each command of the pages short. The last value of an option wins.
QUICK = {
    "train": ["--steps", "2", "--batch", "4", "--validation-samples", "4", "--log-every", "1", "--device", "cpu"],
    "sample": ["--steps", "3", "--n", "4"],
    "evaluate": [],
    "cite": [],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the plugins of the pages, in which the commands run. Afterwards nothing of them is registered."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    with restored_registries():
        yield tmp_path


def run(words: list[str]) -> None:
    """Run one command of a page, quickly. It knows only the plugins that it names."""
    short = ["--limit", "4", "--passes", "2"] if words[:2] == ["evaluate", "bpd"] else []
    with restored_registries():
        main([*words, *QUICK[words[0]], *short])


def run_section(page: str, title: str = "") -> list[list[str]]:
    """Run all commands of a page, or of a section, that use plugins, and return them."""
    section = PAGES[page].partition(f"\n## {title}\n")[2].partition("\n## ")[0] if title else PAGES[page]
    found = [words for words in commands(section) if words[0] != "data" and "packed/" not in words]
    for words in found:
        run(words)
    return found


def load(run_folder: str, *names: str) -> m2s.Checkpoint:
    """Load a checkpoint, with some plugins."""
    for name in names:
        load_plugin(name)
    return m2s.load(run_folder)


def record(run_folder: str) -> dict[str, Any]:
    """The configuration of a run."""
    return json.loads((Path(run_folder) / RECORD).read_text())["config"]


def tokens(file: str) -> np.ndarray:
    """The tokens of samples."""
    with np.load(file) as found:
        return found["tokens"]


def test_the_pages_have_a_plugin_of_every_kind() -> None:
    kinds = ("data", "head", "loss", "method", "metric", "text_metric", "network", "noise", "sampler")
    assert [f"my_{kind}.py" for kind in kinds] == list(FILES)
    for name in FILES:
        assert any(f"--plugin {name}" in page for page in PAGES.values()), name
    for name, page in PAGES.items():
        assert f"({name}.md" in PAGES["index"] or name == "index"
        assert "\n## Common errors\n" in page and ("\n## What tests it\n" in page or name == "index")


def test_network(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_section("network-and-training-loop")
    assert [words[0] for words in ran] == ["train", "sample", "evaluate"]
    model = json.loads(Path("runs/scan/config.json").read_text())["model"]
    assert model == {"kind": "scan", "states": 17, "width": 32, "layers": 2}
    assert tokens("scan.npz").shape == (4, 64) and Path("scan.png").is_file()
    assert "4 images of 8 x 8, 2 passes" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"kind is 'scan', .* of your own with m2s\.models\.NETWORKS\.add\("):
        m2s.load("runs/scan")
    assert type(load("runs/scan", "my_network.py").model).__name__ == "Scan"


def test_data_set() -> None:
    run_section("data")
    assert json.loads(Path("runs/cycles/config.json").read_text())["data"] == {"kind": "text", "length": 12}
    data = record("runs/cycles")["data"]
    assert (data["name"], data["length"], data["options"]) == ("cycles", 12, ["vocab=7"])
    drawn = tokens("cycles.npz")
    assert drawn.shape == (4, 12) and drawn.max() < 7
    main(["evaluate", "bpd", "runs/cycles", "--plugin", "my_data.py", "--passes", "2", "--out", "bpd.json"])
    measured = json.loads(Path("bpd.json").read_text())
    model, head = load("runs/cycles")
    rows = (torch.arange(16)[:, None] + torch.arange(12)) % 7
    expected = m2s.evaluation.dataset_nelbo(model, head, rows, passes=2, seed=0)
    assert measured["rows"] == 16 and measured["data"]["split"] == "validation"
    bits = float(expected.term("nelbo").sum(1).mean()) / rows.numel() / np.log(2)
    assert np.mean(measured["passes"]) == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "was trained on 'cycles', which is no registered data set: give --plugin"),
        (("--plugin", "my_data.py", "--split", "test"), "cycles has no test split: give --split validation or train"),
        (("--plugin", "my_data.py", "--data", "digits"), "is a model of text, but digits holds images"),
    ],
)
def test_bpd_of_a_data_set_that_does_not_fit(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = next(words for words in commands(PAGES["data"]) if "cycles" in words)
    run(words)
    with pytest.raises(SystemExit), restored_registries():
        main(["evaluate", "bpd", "runs/cycles", *arguments])
    assert message in capsys.readouterr().err


def test_bpd_does_not_support_weights_of_positions(capsys: pytest.CaptureFixture[str]) -> None:
    code = FILES["my_data.py"].replace("% self.vocab)", "% self.vocab, torch.ones(len(indices), self.length))")
    Path("my_data.py").write_text(code)
    run(next(words for words in commands(PAGES["data"]) if "cycles" in words))
    with pytest.raises(SystemExit), restored_registries():
        main(["evaluate", "bpd", "runs/cycles", "--plugin", "my_data.py"])
    assert "cycles weights its positions, which bpd does not support" in capsys.readouterr().err


def test_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    run_section("sampler")
    assert "distinct_1" in capsys.readouterr().out
    load_plugin("my_sampler.py")
    model, head = m2s.load("runs/digits")
    drawn = {
        greedy: m2s.sample(model, head, (4, 64), steps=3, seed=0, sampler=make_sampler("renoise", greedy=greedy))
        for greedy in (True, False)
    }
    assert np.array_equal(tokens("renoise.npz"), drawn[True].numpy()) and not torch.equal(drawn[True], drawn[False])
    with np.load("renoise.npz") as file:
        assert "renoise" in str(file["settings"])
    # The last step is greedy: the samples are the most likely tokens of the prediction that it was given.
    seen: list[Any] = []

    def watch(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append((x_t, t, model(x_t, t)))
        return seen[-1][2]

    with torch.no_grad():
        found = m2s.sample(watch, head, (4, 64), steps=3, seed=0, sampler=make_sampler("renoise", greedy=True), micro_batch=4)
    x_t, t, output = seen[-1]
    assert torch.equal(found, head.posterior(output, x_t, t)[..., :17].argmax(-1))
    with pytest.raises(TypeError, match="sampler 'renoise' is for uniform noise"):
        m2s.sample(model, m2s.Posterior(m2s.Absorbing(16, m2s.Linear())), (1, 64), sampler="renoise")


def test_loss() -> None:
    run_section("head-and-loss", "A loss")
    head = record("runs/smooth")["head"]
    assert (head["loss"], head["options"]) == ("cross-entropy", ["smoothing=0.1"])
    assert tokens("smooth.npz").shape == (4, 64)
    load_plugin("my_loss.py")
    parts = m2s.methods.METHODS["m2s"].build(3, head=m2s.methods.HeadConfig(loss="cross-entropy", options=("smoothing=0.5",)))
    x_0, x_t, t = torch.tensor([[0, 2]]), torch.tensor([[1, 2]]), torch.tensor([0.5])
    output = torch.tensor([[[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]])
    log_mu = output.log_softmax(-1)
    by_hand = -(0.5 * log_mu.gather(-1, x_0[..., None])[..., 0] + 0.5 * log_mu.mean(-1))
    torch.testing.assert_close(parts.loss(parts.head, output, x_0, x_t, t), by_hand)
    assert parts.nelbo_loss is m2s.score_entropy


def test_head() -> None:
    run_section("head-and-loss", "A head")
    found = load("runs/capped", "my_head.py").head
    assert type(found).__name__ == "Capped" and found.cap == 20 and tokens("capped.npz").shape == (4, 64)
    process, t = found.process, torch.tensor([0.5, 0.9])
    x_t = torch.randint(17, (2, 8))
    output = 100 * torch.randn(2, 8, 17)
    expected = m2s.Posterior(process, "exact").posterior(20 * torch.tanh(output / 20), x_t, t)
    torch.testing.assert_close(found.posterior(output, x_t, t), expected)


def test_method(capsys: pytest.CaptureFixture[str]) -> None:
    run_section("method-and-metric", "A method")
    config = record("runs/cosine")
    assert (config["method"], config["process"]["schedule"], config["head"]["offset"]) == ("m2s-cosine", "cosine", "exact")
    assert m2s.load("runs/cosine").head.process.schedule == m2s.Cosine()
    out = capsys.readouterr().out
    assert "@misc{cosine," in out and "4 images of 8 x 8" in out


def test_metric(capsys: pytest.CaptureFixture[str]) -> None:
    run_section("method-and-metric", "A metric")
    result = json.loads(Path("brightness.json").read_text())
    means = tokens("samples.npz").mean(1) / 16
    assert result["samples"]["value"] == pytest.approx(means.mean())
    assert result["samples"]["error"] == pytest.approx(means.std(ddof=1) / 2)
    assert result["reference"]["value"] == pytest.approx(float(m2s.data.load("digits").test.double().mean()) / 16)
    assert (
        result["metric"] == "brightness"
        and result["options"] == {"levels": 17}
        and result["inputs"]["reference"] == "digits:test"
    )
    assert re.search(r"^reference  0\.3\d+ ± 0\.00\d+$", capsys.readouterr().out, re.MULTILINE)


def test_metric_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("size.py").write_text(
        "from m2s.evaluation import METRICS\n\n\n"
        '@METRICS.register("size")\n'
        "def size(samples, reference=None, checkpoint=None):\n"
        "    return {'weights': sum(p.numel() for p in checkpoint.model.parameters()), 'samples': samples is not None}\n"
    )
    head = m2s.Posterior(m2s.Uniform(5, m2s.Linear()))
    load_plugin("my_network.py")
    scan, settings = m2s.models.NETWORKS["scan"][1], m2s.models.NETWORKS["scan"][0]
    network = scan(settings(states=5, width=4))
    m2s.hub.save("saved", network, head, data={"kind": "text", "length": 8})
    count = sum(p.numel() for p in network.parameters())
    main(["evaluate", "size", "--checkpoint", "saved", "--plugin", "size.py"])
    assert capsys.readouterr().out == f"weights  {count}\nsamples  False\n"
    np.savez("drawn.npz", tokens=np.zeros((2, 8), dtype=np.int64))
    main(["evaluate", "size", "drawn.npz", "--checkpoint", "saved", "--plugin", "size.py"])
    assert capsys.readouterr().out == f"weights  {count}\nsamples  True\n"


def test_metric_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("".join(f"the cat number {n} sat on a mat\n<|endoftext|>\n" for n in range(60)))
    words = ["--tokenizer", "bytes", "--validation-fraction", "0.3"]
    main(["data", "prepare", "a.txt", "--out", "packed", *words])
    main(["data", "adversaries", "packed", "--n", "5", "--length", "30", "--names", "shuffled", "copied", "--out", "."])
    (command,) = (words for words in commands(PAGES["method-and-metric"]) if words[:2] == ["evaluate", "text"])
    at = command.index("a.npz")
    command[at : at + 2] = ["shuffled.npz", "copied.npz"]
    with restored_registries():
        main([*command, "--out", "out"])
    result = json.loads(Path("out/text.json").read_text())
    for name, entry in zip(("shuffled", "copied"), result["files"], strict=False):
        texts = [bytes(row.tolist()).replace(b"\x00", b"<|endoftext|>") for row in tokens(f"{name}.npz") % 256]
        assert entry["values"]["text"]["words"]["words"]["value"] == np.mean([len(text.split()) for text in texts])
    assert "words of a text" in capsys.readouterr().out


def test_schedule_and_process() -> None:
    run_section("process-and-schedule")
    quadratic = load("runs/quadratic", "my_noise.py").head.process
    assert isinstance(quadratic, m2s.Uniform) and repr(quadratic.schedule) == "Quadratic()"
    process = m2s.load("runs/neighbors").head.process
    assert isinstance(process, m2s.RateMatrix) and repr(process.schedule) == "Quadratic()"
    assert process.generator[0, 1] == process.generator[8, 7] == 4 and process.generator[0, 2] == 0
    assert tokens("neighbors.npz").shape == (4, 64)


def test_one_plugin_of_each_kind_in_every_command() -> None:
    """All plugins together, each command in its own process, as a user runs them."""
    given = [word for name in FILES for word in ("--plugin", name)]
    Path("all.py").write_text(
        "from m2s.methods import METHODS, HeadConfig, Method, ProcessConfig\n\n"
        'process = ProcessConfig(kind="uniform", schedule="quadratic")\n'
        'head = HeadConfig(kind="posterior", offset="exact", loss="cross-entropy")\n'
        'METHODS.add("all", Method("all", "All plugins", process, head, "", ""))\n'
    )
    given += ["--plugin", "all.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def m2s_command(*words: str) -> str:
        command = [sys.executable, "-m", "m2s.cli", *words, *given]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    chosen = [
        "--method",
        "all",
        "--network.kind",
        "scan",
        "--network.width",
        "8",
        "--data.name",
        "cycles",
        "--data.length",
        "12",
    ]
    m2s_command("train", "digits", *chosen, *QUICK["train"], "--out", "run")
    m2s_command("sample", "run", "--sampler", "renoise", "--greedy", "True", "--n", "4", "--steps", "3", "--out", "all.npz")
    assert "16 windows of 12 tokens" in m2s_command("evaluate", "bpd", "run", "--passes", "2")
    measured = m2s_command("evaluate", "brightness", "all.npz", "--levels", "5")
    assert float(measured.split()[1]) == pytest.approx(tokens("all.npz").mean() / 4, rel=1e-5)
    config = json.loads(Path("run/config.json").read_text())
    assert config["model"]["kind"] == "scan" and config["head"]["process"]["schedule"]["kind"] == "Quadratic"
    assert record("run")["head"]["loss"] == "cross-entropy" and record("run")["data"]["name"] == "cycles"


def test_every_package_is_there_after_one_import() -> None:
    """As the pages name them. What is heavy is imported on first access."""
    page = PAGES["network-and-training-loop"]
    assert "`m2s.evaluation.dataset_nelbo(" in page and "`m2s.training.train(" in page
    heavy = ("triton", "matplotlib", "torch._dynamo", "m2s.training", "m2s.benchmark", "m2s.cli", "m2s.evaluation.bpd")
    code = f"""
import sys, m2s
assert not [name for name in {heavy} if name in sys.modules]
assert m2s.evaluation.dataset_nelbo is m2s.evaluation.bpd.dataset_nelbo and callable(m2s.training.train)
assert m2s.audit is m2s.evaluation.audit.audit
for name in m2s.PARTS:
    assert getattr(m2s, name).__name__ == "m2s." + name
for name in m2s.evaluation.PARTS:
    try:
        assert getattr(m2s.evaluation, name).__name__ == "m2s.evaluation." + name
    except ModuleNotFoundError as error:  # an optional package
        assert (name, error.name) == ("harness", "lm_eval"), error
for package in (m2s, m2s.evaluation):
    assert all(hasattr(package, name) for name in package.__all__) and not hasattr(package, "trian")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def test_lists_of_packages_are_complete() -> None:
    eager = {"conversions", "heads", "hub", "losses", "ops", "process", "realizability", "samplers"}
    packages = {path.parent.name for path in (ROOT / "m2s").glob("*/__init__.py")}
    assert packages == {*m2s.PARTS} | eager and all(hasattr(m2s, name) for name in eager)
    inside = ROOT / "m2s" / "evaluation"
    modules = {path.stem for path in inside.glob("*.py")} | {path.parent.name for path in inside.glob("*/__init__.py")}
    assert modules - {"__init__"} == {*m2s.evaluation.PARTS}


@pytest.mark.parametrize("config", [{"width": 64}, None], ids=["config", "no config"])
def test_a_folder_of_the_hubs_mixin(config: dict | None, folder: Path) -> None:
    """PyTorchModelHubMixin.save_pretrained writes weights, and arguments where there are any."""
    saved = folder / "saved"
    saved.mkdir()
    save_file({"table.weight": torch.zeros(3, 3)}, saved / "model.safetensors")
    if config is not None:
        (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        (ValueError, FileNotFoundError), match="PyTorchModelHubMixin wrote: load it by its class's from_pretrained"
    ):
        m2s.load(saved)
