"""What is recorded of the command line: training runs of every method, and their evaluations, samples and audits."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import m2s
from snapshot_parts.values import Entry, arrays, digest, json_numbers, numbers, progress, tensor

ROOT = Path(__file__).resolve().parents[2]
RECORDED_NAMES = {"nelbo": "bound", "unprojected": "free", "distinct_unprojected": "distinct_free"}

# These options of the command line are all that the script uses. An option that is renamed is renamed here.
METHODS = (
    *("m2s", "m2s-offset", "m2s-hybrid", "sedd", "sedd-absorb", "md4", "mdlm", "radd", "gidd", "gidd-clipped"),
    *("udlm", "duo", "neural-ctmc", "d3pm-uniform", "d3pm-absorbing", "d3pm-gaussian", "tauldr"),
    *("tauldr-absorb", "m2s-gaussian", "ar"),
)
TRAIN = (
    "--steps 20 --batch 16 --seed 3 --log-every 1 --optimizer.warmup 5 --validate-every 10 --validation-samples 32 "
    "--validation-passes 2 --save-every 20 --device cpu"
)
VARIANTS = {  # of runs: the method and further options
    "dit": ("m2s-offset", "--network.kind dit"),
    "dit-absorbing": ("mdlm", "--network.kind dit"),
    "dit-sigma": ("sedd", "--network.kind dit --network.clock sigma --process.schedule log-linear"),
    "labels": ("m2s-offset", "--network.labels"),
    "micro-batch": ("m2s", "--micro-batch 8"),
    "dropout": ("m2s", "--network.dropout 0.1"),
    "uniform-times": ("m2s-offset", "--importance None"),
    "geometric": ("sedd", "--process.schedule geometric"),
    "cosine-rescaled": ("md4", "--process.schedule cosine --process.rescale 1e-4"),
    "ordinal": ("m2s-gaussian", "--head.kind ordinal"),
    "loss-gidd": ("m2s-hybrid", "--head.loss gidd"),
    "loss-udlm": ("m2s-offset", "--head.loss udlm"),
    "loss-path-kl": ("neural-ctmc", "--head.loss path-kl"),
    "loss-ct-elbo": ("m2s-gaussian", "--head.loss ct-elbo"),
}
EVALUATE = "--limit 32 --passes 2 --bins 4 --seed 3 --device cpu"
EVALUATED = ("m2s", "sedd", "md4", "gidd", "neural-ctmc", "d3pm-gaussian", "tauldr", "ar")
SAMPLE = "--n 16 --steps 6 --seed 3 --micro-batch 16 --device cpu"
SAMPLED = {  # the run and further options
    "m2s": ("m2s", ""),
    "m2s-sharpened": ("m2s", "--temperature 0.8 --top-p 0.9 --top-k 8 --on leave_one_out --start 5 --batch-size 6"),
    "m2s-predictor-corrector": ("m2s", "--sampler predictor_corrector --corrections 2 --sites 4"),
    "sedd": ("sedd", ""),
    "sedd-projected": ("sedd", "--project --grid linear"),
    "labels-guided": ("labels", "--labels 0 1 2 3 --guidance 2"),
    "labels-guided-rates": ("labels", "--labels 4 5 --guidance 1.5 --guide rates --sampler euler"),
    "labels-guided-step": ("labels", "--labels 6 7 --guidance 1.5 --guide step"),
    "hybrid-self-correcting": ("m2s-hybrid", "--sampler self_correcting --corrections 8 --sites 2"),
    "tauldr-forward-backward": ("tauldr", "--sampler forward_backward --corrections 2 --leap 0.01 --entry 0.5"),
    "d3pm-absorbing": ("d3pm-absorbing", ""),
    "d3pm-gaussian": ("d3pm-gaussian", ""),
    "ordinal": ("ordinal", ""),
    "dit-absorbing-confidence": ("dit-absorbing", "--sampler confidence"),
    "ar": ("ar", ""),
    "ar-sharpened": ("ar", "--temperature 0.7 --top-k 5"),
}
AUDIT = "--n 8 --steps 4 --seed 3 --micro-batch 16 --device cpu"
AUDITED = ("sedd", "tauldr")
REPAIRED = ("sedd", "sedd-absorb")


def command(*arguments: str, folder: Path) -> None:
    """Run one `m2s` command in a folder.

    Args:
        *arguments: Words of the command after `m2s`.
        folder: Working directory.

    Raises:
        RuntimeError: The command failed; the message holds the end of what it printed.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "m2s.cli", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"m2s {' '.join(arguments)}\nexit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


class Runs:
    """Trained runs, each trained at its first use.

    Args:
        folder: Folder in which each run gets a folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [*METHODS, *VARIANTS]

    def __getitem__(self, name: str) -> Path:
        """Return the folder of the run, relative to `self.folder`."""
        if not (self.folder / "runs" / name).is_dir():
            method, more = VARIANTS.get(name, (name, ""))
            progress(f"  training {name}")
            options = ["--method", method, *TRAIN.split(), *more.split(), "--out", f"runs/{name}"]
            command("train", "digits", *options, folder=self.folder)
        return Path("runs", name)

    def command(self, *arguments: str) -> None:
        """Run a command in the folder of all runs."""
        progress(f"  m2s {' '.join(arguments)}")
        command(*arguments, folder=self.folder)

    def load(self, name: str) -> Any:
        """Return the checkpoint of a run."""
        return m2s.load(str(self.folder / self[name]))


def train(runs: Runs) -> Iterator[Entry]:
    """Yield loss, gradient norm and the rest of the log at each of 20 steps, and the weights, of every method.

    Args:
        runs: The trained runs.
    """
    for name in runs.names:
        log = runs.folder / runs[name] / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        yield from numbers(f"train/{name}", lines)
        # Sorted by content, so that neither names nor order of the parameters matter.
        weights = sorted(digest(value.detach()) for value in runs.load(name).model.parameters())
        yield f"train/{name}/weights", hashlib.sha256(" ".join(weights).encode()).hexdigest()[:32]


def evaluate(runs: Runs) -> Iterator[Entry]:
    """Yield the numbers of `m2s evaluate bpd`: the NELBO and its terms.

    Args:
        runs: The trained runs.
    """
    for name in EVALUATED:
        runs.command("evaluate", "bpd", str(runs[name]), *EVALUATE.split(), "--out", f"bpd-{name}.json")
        yield from _recorded(json_numbers(f"evaluate/{name}", runs.folder / f"bpd-{name}.json"))


def run_samples(runs: Runs) -> Iterator[Entry]:
    """Yield the tokens of `m2s sample`, and those of `m2s.sample` for a loaded next-token model with a prompt.

    Args:
        runs: The trained runs.
    """
    for name, (run, more) in SAMPLED.items():
        runs.command("sample", str(runs[run]), *SAMPLE.split(), *more.split(), "--out", f"sample-{name}.npz")
        yield from arrays(f"run_samples/{name}", runs.folder / f"sample-{name}.npz")
    checkpoint = runs.load("ar")
    prompt = torch.full((16, 64), -1)
    prompt[:, :7] = torch.arange(7)
    prompt[::2, 20] = 9
    options = {"shape": (16, 64), "sampler": "autoregressive", "seed": 5, "micro_batch": 16}
    yield "run_samples/ar-prompt", tensor(m2s.sample(checkpoint.model, checkpoint.head, clamp=prompt, **options))
    for name in ("m2s", "sedd", "dit"):
        checkpoint, x_t = runs.load(name), torch.arange(128).reshape(2, 64) % 17
        with torch.no_grad():
            output = checkpoint.model(x_t, torch.tensor([0.2, 0.7]))
            yield f"run_samples/{name}-posterior", tensor(checkpoint.head.posterior(output, x_t, torch.tensor([0.2, 0.7])))


def audit(runs: Runs) -> Iterator[Entry]:
    """Yield the numbers of `m2s audit` and `m2s repair`, and the tokens that the latter writes.

    Args:
        runs: The trained runs.
    """
    for name in AUDITED:
        runs.command("audit", str(runs[name]), *AUDIT.split(), "--out", f"audit-{name}")
        yield from json_numbers(f"audit/{name}", runs.folder / f"audit-{name}" / "audit.json")
    for name in REPAIRED:
        folder = runs.folder / f"repair-{name}"
        runs.command("repair", str(runs[name]), *AUDIT.split(), "--measure", "none", "--out", folder.name)
        found = json_numbers(f"audit/repair-{name}", folder / "repair.json")
        yield from _recorded((key, value) for key, value in found if "/steps/" not in key)  # as in an audit
        for path in sorted(folder.glob("*.npz")):
            yield from _recorded(arrays(f"audit/repair-{name}/{path.stem}", path))


def _recorded(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries under the names that the keys had when the values were recorded."""
    for key, value in entries:
        yield "/".join(RECORDED_NAMES.get(part, part) for part in key.split("/")), value
