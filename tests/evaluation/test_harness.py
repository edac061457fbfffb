"""m2s as a model of lm-evaluation-harness, run by the harness itself on two local tasks."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.data import Bytes
from m2s.evaluation.likelihood.conditional import conditional_nats, encode_pair, windows

pytest.importorskip("lm_eval", reason="no lm_eval here: pip install lm_eval")
TASKS = Path(__file__).parent / "tasks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of text of length 6, and the tasks with absolute paths."""
    folder = tmp_path_factory.mktemp("harness")
    torch.manual_seed(0)
    config = m2s.models.DiTConfig(states=258, width=8, depth=1, heads=2, condition_width=8)
    model = m2s.models.DiT(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    head = m2s.Posterior(m2s.Absorbing(257, m2s.LogLinear(1e-3)))
    m2s.save(folder / "model", model, head, {"kind": "text", "length": 6}, Bytes())
    model.head.bias.data[ord("c")] += 1000.0
    m2s.save(folder / "certain", model, head, {"kind": "text", "length": 6}, Bytes())
    shutil.copytree(TASKS, folder / "tasks")
    for path in (folder / "tasks").glob("*.yaml"):
        path.write_text(path.read_text().replace("test: ", f"test: {folder}/tasks/"))
    return folder


@pytest.fixture
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tasks of `--include-path` are listed. The harness reads thousands of files for its own, in every command."""
    from lm_eval import tasks

    class OwnTasks(tasks.TaskManager):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **{**named, "include_defaults": False})

    monkeypatch.setattr(tasks, "TaskManager", OwnTasks)


def nats(folder: Path, context: str, continuation: str, passes: int = 4) -> float:
    """The estimate of a request, summed over windows of 6 tokens."""
    loaded = m2s.load(folder / "model")
    parts = list(windows(encode_pair(Bytes(), context, continuation), 6))
    return float(conditional_nats(loaded.model, loaded.head, parts, passes, 5)[0].sum())


def test_the_harness_runs_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its metrics are those computed by hand from the estimates of `conditional_nats`."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", "lm-eval", folder / "model", "--tasks", "m2s_vowels", "m2s_perplexity", "--passes", 4, "--seed", 5]
    words += ["--include-path", folder / "tasks", "--device", "cpu", "--out", tmp_path / "found.json"]
    main([str(word) for word in words])
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    documents = [json.loads(line) for line in (TASKS / "vowels.jsonl").read_text().splitlines()]
    right = by_length = 0
    for document in documents:
        costs = [nats(folder, document["context"], choice) for choice in document["choices"]]
        right += min(range(2), key=costs.__getitem__) == document["label"]
        lengths = [len(choice) for choice in document["choices"]]
        by_length += min(range(2), key=lambda i: costs[i] / lengths[i]) == document["label"]
    assert found["m2s_vowels"]["acc,none"] == pytest.approx(right / len(documents))
    assert found["m2s_vowels"]["acc_norm,none"] == pytest.approx(by_length / len(documents))
    texts = [json.loads(line)["text"] for line in (TASKS / "texts.jsonl").read_text().splitlines()]
    total = sum(nats(folder, "", text) for text in texts)
    bytes_, words_ = sum(map(len, texts)), sum(len(text.split()) for text in texts)
    assert found["m2s_perplexity"]["byte_perplexity,none"] == pytest.approx(math.exp(total / bytes_), rel=1e-5)
    assert found["m2s_perplexity"]["word_perplexity,none"] == pytest.approx(math.exp(total / words_), rel=1e-5)


@pytest.mark.usefixtures("own_tasks")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the results of a GPU are others")
def test_the_command_of_the_harness(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m m2s.evaluation.harness run` has the results of `m2s evaluate lm-eval`, also where it asks for cuda:0."""
    from m2s.evaluation import harness

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", "lm-eval", folder / "model", "--tasks", "m2s_perplexity", "--passes", 2, "--seed", 5]
    main([str(word) for word in [*words, "--include-path", folder / "tasks", "--out", tmp_path / "found.json"]])
    found = json.loads((tmp_path / "found.json").read_text())["results"]["m2s_perplexity"]
    options = f"checkpoint={folder / 'model'},passes=2,seed=5"
    words = ["lm_eval", "run", "--model", "m2s", "--model_args", options, "--tasks", "m2s_perplexity"]
    words += ["--include_path", folder / "tasks", "--output_path", tmp_path / "theirs"]
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    harness.main()
    (path,) = (tmp_path / "theirs").rglob("results*.json")
    theirs = json.loads(path.read_text())["results"]["m2s_perplexity"]
    for name in ("byte_perplexity,none", "word_perplexity,none"):
        assert theirs[name] == pytest.approx(found[name], rel=1e-6)  # other batches
    assert "m2s_perplexity" in capsys.readouterr().out


@pytest.mark.usefixtures("own_tasks")
def test_the_harness_generates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network that always predicts "c" gives three of the four answers. The output says that an estimator is no bound."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = [
        "evaluate",
        "lm-eval",
        folder / "certain",
        "--tasks",
        "m2s_generate",
        "--steps",
        2,
        "--include-path",
        folder / "tasks",
    ]
    words += ["--estimator", "mdlm", "--device", "cpu", "--out", tmp_path / "found.json"]
    main([str(word) for word in words])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["results"]["m2s_generate"]["exact_match,none"] == 0.75
    assert found["missing"] == ["reconstruction", "prior", "length of the interval"]
    assert "NO lower bounds: mdlm lacks reconstruction, prior" in capsys.readouterr().out


def test_generation_keeps_the_context_and_stops(folder: Path) -> None:
    """A generation has at most as many tokens as fit, is the same again, and ends before a stop string."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    import m2s.evaluation.harness  # noqa: F401

    model = get_model("m2s").create_from_arg_string(f"checkpoint={folder / 'model'},passes=2,steps=4,device=cpu")

    def generate(**options: object) -> str:
        return model.generate_until([Instance("generate_until", {}, ("ab", options), 0)])[0]

    full = generate(until=[], max_gen_toks=4)
    assert generate(until=[], max_gen_toks=4) == full and len(full.encode("utf-8", "replace")) > 0
    stop = full[1]
    assert generate(until=[stop], max_gen_toks=4) == full.split(stop)[0]


@pytest.mark.usefixtures("own_tasks")
def test_invalid_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "lm-eval", str(folder / "model"), "--tasks", "nothing_of_that_name"])
    assert "there is no task of that name" in capsys.readouterr().err
    for estimator, message in (("udlm", "it needs uniform noise"), ("nothing", "no estimator of that name")):
        words = ("--tasks", "m2s_vowels", "--include-path", str(folder / "tasks"), "--estimator", estimator)
        with pytest.raises(SystemExit):
            main(["evaluate", "lm-eval", str(folder / "model"), *words])
        assert message in capsys.readouterr().err
