"""experiments/text_judges.py, text_tables.py and text_audit.py on small samples: judging in calls, tables, figures, a page."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import m2s
from m2s.cli import main
from m2s.data import Bytes
from m2s.evaluation.genppl import PROTOCOLS, frontier_areas, read_samples, score, summarize
from m2s.evaluation.judge import load_judge
from m2s.evaluation.text import embedding_distance
from m2s.realizability import SCORE_CLASSES
from packed_text import prepare
from small_judges import write_judges

pytest.importorskip("transformers", reason="no transformers here: pip install transformers gguf accelerate")
FOLDER = Path(__file__).parents[2] / "experiments"
N, LENGTH = 8, 24
SETS = {
    "mdlm/ancestral-linear-2": 1.0,
    "mdlm/ancestral-linear-4": 1.0,
    "mdlm/ancestral-linear-4-T0.8": 0.8,
    "m2s/bayes-cosine-4": 1.0,
    "m2s/bayes-cosine-4-T0.8": 0.8,
    "sedd/analytic-linear-4": 1.0,
}


def write_samples(path: Path, name: str, temperature: float, seed: int) -> None:
    """Samples of lower-case letters; a lower temperature has fewer of them."""
    sampler, grid, steps = Path(name).name.split("-")[:3]
    tokens = np.random.default_rng(seed).integers(97, 97 + int(26 * temperature), (N, LENGTH))
    settings = {"sampler": sampler, "grid": grid, "steps": int(steps), "temperature": temperature, "seed": 0, "start": 0}
    settings |= {"checkpoint": name.split("/")[0], "data": {"kind": "text", "tokenizer": {"kind": "Bytes"}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, tokens=tokens.astype(np.uint16), settings=json.dumps(settings))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared text, adversaries, and what a job brought home."""
    folder = tmp_path_factory.mktemp("tables")
    documents = [f"the cat {number} sat on {'a mat' if number % 3 else 'the dog'}." for number in range(300)]
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    prepare(folder / "a.txt", folder / "packed")
    words = ["--n", str(N), "--length", str(LENGTH), "--names", "unigram", "repeated"]
    main(["data", "adversaries", str(folder / "packed"), *words, "--out", str(folder / "adversaries")])
    arrived = folder / "arrived"
    for seed, (name, temperature) in enumerate(SETS.items()):
        write_samples(arrived / "samples" / f"{name}.npz", name, temperature, seed)
    write_samples(arrived / "repair" / "sedd-4" / "projected.npz", "sedd/analytic-linear-4", 1.0, 99)
    (arrived / "entry.json").write_text(json.dumps({"entry": "methods", "seconds": 360.0}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_judges(tmp_path_factory.mktemp("judges"))


@pytest.fixture
def here(texts: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder as the working folder, with two judges and an empty $M2S_DATA."""
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    for name in ("llama", "gpt2"):
        shutil.copytree(folders[name], tmp_path / "data" / "judges" / name)
    shutil.copytree(texts, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def read(path: str | Path) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


PACK = ["pack", "arrived", "--data", "packed", "--adversaries", "adversaries", "--out", "packed-sets"]
JUDGE = ["judge", "packed-sets", "judged", "--judges", "llama", "gpt2", "--device", "cpu", "--resamples", "100"]


def test_from_samples_to_tables_figures_and_page(here: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    judges, tables = script("text_judges", monkeypatch), script("text_tables", monkeypatch)
    assert judges.main(PACK) == 0
    held_out = {path.name for path in Path("packed-sets/held-out").iterdir()}
    assert "meta.json" in held_out and not any(name.startswith("train") for name in held_out)

    # A call whose time is over stops after a set. The next one judges the others, and reads none twice.
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(judges.time, "monotonic", lambda: float(next(clock)))
    assert judges.main([*JUDGE, "--seconds", "90", "--bundle", "back"]) == 0
    first = {path: path.stat().st_mtime_ns for path in Path("judged").rglob("*.json")}
    assert 0 < len(first) < 20 and "not finished" in capsys.readouterr().out
    assert count_packed() == len(first)

    # A call that is killed has packed the sets before.
    measure, measured = judges.Judging.measure, []

    def measure_two(self, *given):
        measured.append(given)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(judges.Judging, "measure", measure_two)
        patch.setattr(judges, "PACKING", 1e9)
        with pytest.raises(KeyboardInterrupt):
            judges.main([*JUDGE, "--bundle", "back"])
    assert count_packed() == len(first) + 2
    assert judges.main(JUDGE) == 0
    assert "finished: 9 sets" in capsys.readouterr().out
    every = {path: path.stat().st_mtime_ns for path in Path("judged").rglob("*.json")}
    assert len(every) == 2 * (len(SETS) + 1 + 2 + 1) and first.items() <= every.items()

    # Numbers are those of the functions that m2s evaluate genppl and m2s evaluate text call.
    llama = load_judge("llama", "cpu", "float32")
    samples = read_samples(Path("arrived/samples/m2s/bayes-cosine-4.npz"), PROTOCOLS["paper"], Bytes())
    scores = score(samples, llama)
    found = read("judged/llama/m2s/bayes-cosine-4.json")
    assert found["genppl"]["perplexity"] == pytest.approx(summarize(scores, 100)["perplexity"])
    real = judges.Judging(Path("packed-sets"), None, 100).texts()[1].samples
    assert found["metrics"]["frechet"]["frechet"]["value"] == pytest.approx(
        embedding_distance(scores.mean, score(real, llama).mean), rel=1e-4
    )

    # Nothing that both judges have read is packed again.
    assert judges.main([*PACK[:-1], "rest", "--done", "judged"]) == 0
    assert not Path("rest/samples").exists()

    sets = [str(path) for path in sorted(Path("packed-sets/samples").glob("*/*.npz"))]
    words = ["--against", "packed", "--metrics", "repetition", "novelty", "--resamples", "100", "--out", "ngrams"]
    main(["evaluate", "text", *sets, *words])
    capsys.readouterr()
    assert tables.main(["judges", "judged", "--ngrams", "ngrams", "--results", "text-judges.json"]) == 0
    check_tables(capsys.readouterr().out)
    for name in ("genppl", "frontier"):
        main(["figure", name, "--source", f"judged/{name}-llama.json", "--out", f"{name}.png"])
    names = [Path(one["file"]).name for one in read("judged/genppl-llama.json")["results"]]
    assert not [name for name in names if "-T" in name] and len(names) == len(SETS) - 2 + 1

    assert tables.main(["samples", "arrived", "--out", "samples.md"]) == 0
    page = Path("samples.md").read_text()
    with np.load("arrived/samples/mdlm/ancestral-linear-4.npz") as most:
        assert Bytes().decode(most["tokens"][0].tolist()) in page
    assert page.count("## ") == 4 and "sedd-projected" in page


def count_packed() -> int:
    """The number of results of judges that one would get who copies the packed folder."""
    assert sys.modules["transfer"].main(["join", "back", "arrived-judged"]) == 0
    return len(list(Path("arrived-judged/judged").rglob("*.json")))


def check_tables(printed: str) -> None:
    """The result file and the printed tables have the judges' numbers, the marks and the areas."""
    results = read("text-judges.json")
    by_set = {one["set"]: one for one in results["sets"]}
    assert by_set["adversaries/repeated"]["kind"] == "adversary" and by_set["held-out/validation"]["kind"] == "held-out"
    for judge in ("llama", "gpt2"):
        found = read(f"judged/{judge}/mdlm/ancestral-linear-2.json")["genppl"]
        assert by_set["mdlm/ancestral-linear-2"]["values"][judge]["perplexity"] == found["perplexity"]
        small, large = (by_set[f"mdlm/ancestral-linear-{steps}"]["values"][judge] for steps in (2, 4))
        cells = [
            f"{v['perplexity']['value']:.1f} ± {(v['perplexity']['high'] - v['perplexity']['low']) / 2:.1f} "
            f"({v['entropy_bits']['value']:.2f})"
            for v in (small, large)
        ]
        assert f"| `mdlm/ancestral-linear` | {cells[0]} | {cells[1]} | 1432.8 / 553.7 / 301.6 / 210.5 |" in printed
        sources = read(f"judged/frontier-{judge}.json")["results"]
        assert len(sources) == 4 and results["frontier"][judge] == json.loads(json.dumps(frontier_areas(sources)))
    novel = read("ngrams/text.json")["files"]
    novel = next(one for one in novel if one["file"].endswith("m2s/bayes-cosine-4.npz"))["values"]["text"]["novelty"]["novel_4"]
    assert by_set["m2s/bayes-cosine-4"]["values"]["text"]["novel_4"] == novel
    heads = next(line for line in printed.splitlines() if line.startswith("| set |")).split(" | ")
    entropy = next(number for number, head in enumerate(heads) if head.startswith("entropy_bits"))
    line = next(line for line in printed.splitlines() if line.startswith("| `m2s/bayes-cosine-4` |")).split(" | ")
    value = by_set["m2s/bayes-cosine-4"]["values"]["llama"]["entropy_bits"]["value"]
    assert len(heads) == len(line) == 13 and line[entropy].startswith(f"{value:.3f} ±")
    assert "held-out/validation" in printed and "-T0.8" not in printed
    ranked = {name for ranking in results["rankings"] for name in ranking["order"]}
    assert ranked == {
        *(f"adversaries/{name}" for name in ("unigram", "repeated")),
        *("mdlm/ancestral-linear-4", "m2s/bayes-cosine-4", "sedd/analytic-linear-4", "sedd-projected/analytic-linear-4"),
    }


def test_rows_of_several_entries_and_what_is_missing(here: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    judges, tables = script("text_judges", monkeypatch), script("text_tables", monkeypatch)
    shutil.copytree("arrived", "long")
    Path("long/entry.json").write_text(json.dumps({"entry": "long", "seconds": 1200.0}))
    assert judges.main([*PACK[:2], "long", *PACK[2:]]) == 0
    names = {path.name for path in Path("packed-sets/samples").iterdir()}
    assert names == {
        *("mdlm", "m2s", "sedd", "sedd-projected", "adversaries"),
        *("mdlm-20min", "m2s-20min", "sedd-20min", "sedd-20min-projected"),
    }
    shutil.copytree("arrived", "other")
    write_samples(Path("other/samples/mdlm/ancestral-linear-2.npz"), "mdlm/ancestral-linear-2", 1.0, 50)
    capsys.readouterr()
    assert judges.main([*PACK[:2], "other", *PACK[2:]]) == 2
    assert "differ, but both are the samples mdlm/ancestral-linear-2" in capsys.readouterr().err
    assert judges.main([*PACK[:3], "packed", "--adversaries", "packed", "--out", "x"]) == 2
    assert "m2s data adversaries" in capsys.readouterr().err and not Path("x").exists()
    assert tables.main(["judges", "adversaries"]) == 2 and "text_judges.py judge" in capsys.readouterr().err
    for judge, sets in {"llama": ("a/b", "a/c"), "gpt2": ("a/b",)}.items():
        for name in sets:
            target = Path(f"judged/{judge}/{name}.json")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps({"set": name, "judge": {"described": {"name": judge}}}))
    assert tables.main(["judges", "judged"]) == 2 and "gpt2 has not read a/c" in capsys.readouterr().err


def audit(steps: int, seed: int, n: int = 4) -> dict[str, Any]:
    """The audit of a score network with random weights."""
    process = m2s.Uniform(6, m2s.Linear())

    def model(x_t, t, condition=None):
        return torch.sin(3.0 * x_t.double().unsqueeze(-1) + seed * torch.arange(6) + t.double()[:, None, None])

    found = m2s.audit(model, m2s.LogScore(process), (n, 5), steps=steps, seed=seed).summary()
    settings = {"n": n, "length": 5, "steps": steps, "sampler": "analytic", "grid": "linear", "seed": seed}
    return {**found, "settings": settings, "command": [], "device": "cpu", "versions": {}}


def test_tables_of_the_audits_and_the_repair(here: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    script("text_judges", monkeypatch)
    found, tables = script("text_audit", monkeypatch), script("text_tables", monkeypatch)
    audits = {"audit": audit(4, 1), "audit-2": audit(4, 2, 2), "audit-steps-2": audit(2, 3), "audit-state-3": audit(4, 4)}
    for name, one in audits.items():
        target = Path(f"arrived/audits/sedd-{name}/audit.json")
        target.parent.mkdir(parents=True)
        target.write_text(json.dumps(one))
    capsys.readouterr()
    assert tables.main(["audit", "arrived", "--results", "audit.json"]) == 2
    assert "sedd.json" in capsys.readouterr().err
    Path("arrived/budgets").mkdir()
    Path("arrived/budgets/sedd.json").write_text(json.dumps({"steps": 12}))
    nelbo = {"nelbo": {"nats": {"value": 6.0, "rows_error": 0.1}}}
    Path("arrived/sedd.json").write_text(json.dumps({"tokens": 1_200_000, "nelbo": nelbo}))
    changes = {"tokens": 192, "tokens_changed": 96, "samples": 8, "distinct_unprojected": 8, "distinct_projected": 7}
    Path("arrived/repair/sedd-4/repair.json").write_text(json.dumps({"changes": changes}))
    generator = np.random.default_rng(0)
    sequences = {}
    for row in ("sedd", "sedd-projected"):
        nll, tokens = generator.uniform(50, 90, N), generator.integers(20, 24, N)
        entropy = generator.uniform(2, 3, N)
        sequences[row] = (nll, tokens)
        numbers = {"nll": nll, "tokens": tokens, "bytes": tokens, "entropy_nats": entropy}
        target = Path(f"judged/llama/{row}/analytic-linear-4.json")
        target.parent.mkdir(parents=True)
        summary = {"sequences": {name: values.tolist() for name, values in numbers.items()}}
        one = {"set": f"{row}/analytic-linear-4", "judge": {"described": {"name": "llama"}}, "genppl": summary}
        target.write_text(json.dumps(one))
    assert tables.main(["audit", "arrived", "judged", "--results", "audit.json"]) == 0
    printed, result = capsys.readouterr().out, read("audit.json")
    counts = audits["audit"]["overall"]["before"]["strict"]
    for name in SCORE_CLASSES:
        share, paper = 100 * counts[name] / 80, 100 * found.PAPER["classes"][name]
        assert f"| {name} | {share:.4f}% | {counts[name]} | {paper:.4f}% |" in printed
    overlap = audits["audit"]["overall"]["before"]["overlap"] / 80
    assert f"| {100 * overlap:.4f}% |  | 1.2584% |" in printed
    assert [one["settings"]["steps"] for one in result["by_steps"]] == [2, 4]
    assert [one["tokens"] for one in result["by_tokens"]] == [300_000, 1_200_000]
    assert result["by_tokens"][0]["counts"] == audits["audit-state-3"]["overall"]["before"]["strict"]
    assert result["trajectories"]["averages"] == audits["audit-2"]["averages"]
    assert "9.781%" in printed and "37.632%" in printed and "203.60 [196.64, 210.45]" in printed
    perplexity = {row: np.exp(nll.sum() / tokens.sum()) for row, (nll, tokens) in sequences.items()}
    for row, value in perplexity.items():
        assert f"{value:.2f} [" in printed, row
    gap = result["repair"][0]["judges"]["llama"]["difference"]["nats_per_token"]["value"]
    assert gap == pytest.approx(np.log(perplexity["sedd-projected"] / perplexity["sedd"]))
    assert "50.0%" in printed and "8 / 7 of 8" in printed


def test_the_paper_s_numbers_agree_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    script("text_judges", monkeypatch)
    found = script("text_audit", monkeypatch)
    assert sum(found.PAPER["classes"].values()) == pytest.approx(1, abs=2e-6)
    repair = found.PAPER["repair"]
    ratio = np.log(repair["projected"]["value"] / repair["unprojected"]["value"])
    assert ratio == pytest.approx(repair["nats_per_token"]["value"], abs=1e-3)
    assert found.PAPER["position_steps"] == 128 * 512 * 128
