"""Three small runs with results of every kind, and their page."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2s.cli import main
from m2s.data import Characters
from m2s.data.files import sha256
from m2s.evaluation import inception
from m2s.evaluation.genppl import PROTOCOLS, Samples, Scores, paired_difference, summarize
from m2s.provenance import recorded_command
from m2s.training import train
from page_reader import Reader, picture_file, read
from small_runs import random_rows, small

QUICK = [
    "--steps",
    "3",
    "--batch",
    "8",
    "--network.width",
    "8",
    "--validation-samples",
    "4",
    "--log-every",
    "1",
    "--device",
    "cpu",
]
LETTERS = Characters(" abcdefg")


class Averages(torch.nn.Module):
    """Replaces the Inception network: 16 features of an image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), 4).flatten(1)


def judged(folder: Path) -> dict[str, Any]:
    """Return what `m2s evaluate genppl` writes for two files, with random numbers in the place of a judge's."""
    generator = np.random.default_rng(0)

    def scores(name: str, temperature: float) -> Scores:
        settings = {"steps": 16, "sampler": "bayes", "grid": "cosine", "seed": 0, "start": 0, "temperature": temperature}
        tokens = generator.integers(8, size=(6, 10))
        samples = Samples(
            folder / name, PROTOCOLS["mdlm"], [LETTERS.decode(row) for row in tokens.tolist()], tokens, LETTERS, settings
        )
        count = np.full(6, 9.0)
        entropy = generator.uniform(1, 2, 6)
        states = np.zeros((2, 6, 3), np.float32)
        nll = 20 + generator.uniform(0, 9, 6)
        return Scores(samples, {"name": "tiny"}, nll, count, count, entropy, 2.0, "sample", 6, *states)

    cold, warm = scores("cold.npz", 0.8), scores("warm.npz", 1.0)
    return {
        "m2s": "0",
        "results": [summarize(cold, 100), summarize(warm, 100)],
        "differences": [paired_difference(cold, warm, 100)],
    }


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache data sets in a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("M2S_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def runs(data_folder: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small runs with results of every kind, written by the commands except where a judge is needed."""
    folder = tmp_path_factory.mktemp("report")
    network = folder / "network.pt"
    torch.jit.save(torch.jit.script(Averages()), str(network))
    inception.KNOWN_SCRIPTS.add(sha256(network))
    for method in ("m2s", "sedd"):
        run = str(folder / method)
        main(["train", "digits", "--method", method, "--optimizer.lr", "0.03", "--optimizer.warmup", "0", "--out", run, *QUICK])
        main(
            [
                "evaluate",
                "bpd",
                run,
                "--limit",
                "6",
                "--passes",
                "2",
                "--bins",
                "5",
                "--out",
                f"{run}/bpd.json",
                "--device",
                "cpu",
            ]
        )
        main(["audit", run, "--n", "2", "--steps", "4", "--out", f"{run}/audit", "--device", "cpu"])
        sampler = "bayes" if method == "m2s" else "euler"
        main(
            ["sample", run, "--n", "9", "--steps", "4", "--sampler", sampler, "--out", f"{run}/samples.png", "--device", "cpu"]
        )
    fid = ["--inception", str(network), "--few", "--device", "cpu"]
    main(
        [
            "evaluate",
            "fid",
            f"{folder}/m2s/samples.npz",
            "--against",
            "digits:test",
            "--limit",
            "9",
            *fid,
            "--out",
            f"{folder}/m2s/fid.json",
        ]
    )
    main(
        [
            "repair",
            f"{folder}/sedd",
            "--n",
            "8",
            "--steps",
            "4",
            "--against",
            "digits:test",
            *fid,
            "--out",
            f"{folder}/sedd/repair",
        ]
    )
    picture_file(folder / "m2s" / "film.png")
    picture_file(folder / "sedd" / "odd.png")

    train(small(folder / "text"), random_rows())
    text = folder / "text"
    genppl = judged(folder)
    (text / "genppl.json").write_text(json.dumps(genppl))
    audit = json.loads((folder / "sedd" / "repair" / "repair.json").read_text())
    gap, (unprojected, projected) = genppl["differences"][0], genppl["results"]
    audit["measure"] = {"kind": "genppl", "unprojected": unprojected, "projected": projected, "difference": gap}
    (text / "repair").mkdir()
    (text / "repair" / "repair.json").write_text(json.dumps(audit))
    bpd = json.loads((folder / "m2s" / "bpd.json").read_text()) | {"unit": "token"}
    for term in ("nelbo", "integral"):
        bpd[term] |= {
            name: {**bpd[term]["bits"], "value": 7.25} for name in ("bits_per_byte", "bits_per_character", "perplexity")
        }
    (text / "bpd.json").write_text(json.dumps(bpd))
    (text / "samples.txt").write_text("--- sample 0 ---\na <b>bad</b> cab\n\n--- sample 1 ---\nfed\n")
    return folder


@pytest.fixture(scope="session")
def page(runs: Path) -> Path:
    """The page of the three runs."""
    out = runs / "page" / "report.html"
    main(["report", *(str(runs / name) for name in ("m2s", "sedd", "text")), "--out", str(out), "--title", "Three runs"])
    return out


@pytest.fixture(scope="session")
def parsed(page: Path) -> Reader:
    """The same page, parsed."""
    return read(page)


@pytest.fixture(scope="session")
def compared(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs with a comparison. One run has a name that must be escaped."""
    folder = tmp_path_factory.mktemp("compared")
    for name, new in (("m2s", "m2s"), ("sedd", "a<b")):
        shutil.copytree(runs / name, folder / new, ignore=lambda *_: {"audit", "repair", "bpd.json", "fid.json"})
    models, options = [str(folder / "a<b"), str(folder / "m2s")], ["--n", "4", "--steps", "2", "4", "--device", "cpu"]
    compare = ["compare", *models, "--against", "digits:train", *options, "--out", str(folder / "m2s" / "compare")]
    with recorded_command(["m2s", *compare]):  # not that of the process, which is pytest
        main(compare)
    main(
        [
            "evaluate",
            "bpd",
            *models[1:],
            "--against",
            models[0],
            "--limit",
            "6",
            "--out",
            f"{models[1]}/bpd.json",
            "--device",
            "cpu",
        ]
    )
    main(["report", *models[::-1], "--title", "Compared", "--notes", "About both.", "--out", str(folder / "page.html")])
    return folder / "page.html"
