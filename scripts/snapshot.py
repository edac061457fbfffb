"""Record what the library computes, and check that a later version computes the same, bit for bit.

Write the record before a refactoring, and check it after every step:

    python scripts/snapshot.py --write
    python scripts/snapshot.py --check

The script uses the public API (`import m2s`) and the command line (`python -m m2s.cli`) alone, so modules may be renamed. It
runs the library of its own checkout, whatever version is installed, on one thread of the CPU.

Floats are written by `repr`, which `float` inverts exactly. A tensor of floats is written as the SHA-256 of its bytes, its
first values and its sum. Tokens are written in full after their shape, one character each in base 36, "-" for -1.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
from torch import Tensor

import m2s

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_suffix(".json")
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
TOLERANCE = 1e-5  # relative, of floats under another torch or CPU
CHANGED_TOKENS = 0.1  # fraction of tokens of an entry that may differ under another torch or CPU

Entry = tuple[str, Any]
Network = Callable[..., Tensor]

# ------------------------------------------------------------------------------------------------------------- command line

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
SAMPLE = "--n 16 --steps 6 --seed 3 --device cpu"
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
AUDIT = "--n 8 --steps 4 --seed 3 --device cpu"
AUDITED = ("sedd", "tauldr")
REPAIRED = ("sedd", "sedd-absorb")
PROVENANCE = {  # keys of JSON files and logs that hold provenance, speed or options
    *("command", "device", "versions", "checkpoint", "settings", "options", "data", "precision", "processes", "batch_size"),
    *("seconds", "tokens_per_second"),
    # Keys of a log that follow from loss, gradient norm, weights and validation_bits.
    *("step", "bits", "lr", "tokens", "skipped", "grad_norm_max", "validation_perplexity"),
}


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
        yield from json_numbers(f"evaluate/{name}", runs.folder / f"bpd-{name}.json")


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
    options = {"shape": (16, 64), "sampler": "autoregressive", "seed": 5}
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
        yield from ((key, value) for key, value in found if "/steps/" not in key)  # as in an audit
        for path in sorted(folder.glob("*.npz")):
            yield from arrays(f"audit/repair-{name}/{path.stem}", path)


# ---------------------------------------------------------------------------------------------------------------- synthetic

VOCAB, LENGTH, SAMPLES, STEPS = 11, 6, 16, 6
TIMES = (0.001, 0.02, 0.3, 0.6, 0.95, 0.999)
CHAIN = 20  # steps of the finite chains

SCHEDULES: dict[str, Callable[[], Any]] = {
    "linear": m2s.Linear,
    "exponential": lambda: m2s.Exponential(5.0),
    "log-linear": lambda: m2s.LogLinear(1e-3),
    "geometric": lambda: m2s.Geometric(1e-2, 7.0),
    "cosine": m2s.Cosine,
    "geometric-rate": lambda: m2s.GeometricRate(7.0),
    "rescaled": lambda: m2s.Rescaled(m2s.Cosine(), 1e-2),
}
PROCESSES: dict[str, Callable[[int], Any]] = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "uniform-geometric": lambda vocab: m2s.Uniform(vocab, m2s.Geometric(1e-2, 7.0)),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "absorbing-log-linear": lambda vocab: m2s.Absorbing(vocab, m2s.LogLinear(1e-3)),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, p_uniform=0.2),
    "gaussian": lambda vocab: m2s.RateMatrix.gaussian(vocab, m2s.GeometricRate(7.0), 1.5, 2.0 * vocab),
    "birth-death": lambda vocab: m2s.RateMatrix(neighbours(vocab), m2s.Exponential(3.0)),
    "tabulated-absorbing": lambda vocab: m2s.RateMatrix.absorbing(vocab, m2s.Cosine()),
    "chain-uniform": lambda vocab: m2s.Chain(mixing(vocab, vocab)),
    "chain-absorbing": lambda vocab: m2s.Chain(mixing(vocab + 1, 1), mask=True),
}
HEADS: dict[str, Callable[[Any], Any]] = {
    "posterior": lambda process: m2s.Posterior(process, offset="none"),
    "leave-one-out": lambda process: m2s.Posterior(process, offset="exact"),
    "ordinal": m2s.Ordinal,
    "log-score": m2s.LogScore,
    "scaled-log-score": lambda process: m2s.LogScore(process, scale="sigma"),
    "factorized-rate": m2s.FactorizedRate,
    "projected": lambda process: m2s.Projected(m2s.LogScore(process)),
}
SAMPLERS = (
    *("bayes", "euler", "analytic", "tau_leaping", "ordinal_tau_leaping", "forward_backward"),
    *("predictor_corrector", "ancestral", "first_hitting", "confidence", "remasking", "adaptive"),
    "self_correcting",
)


COVERED = {  # heads that are not recorded over every process
    "ordinal": ("uniform", "gaussian", "chain-uniform"),
    "factorized-rate": ("uniform", "absorbing", "hybrid", "gaussian"),
}


def neighbours(vocab: int) -> Tensor:
    """Return the rates of a chain that moves to adjacent levels, up more often than down.

    Args:
        vocab: Number of levels.
    """
    rates = torch.zeros(vocab, vocab, dtype=torch.float64)
    rates.diagonal(1).fill_(1.5)
    rates.diagonal(-1).fill_(1.0)
    return rates - torch.diag(rates.sum(-1))


def mixing(states: int, reached: int) -> Tensor:
    """Return matrices [CHAIN, states, states] that replace a token by one of the last `reached` states.

    Args:
        states: Number of states.
        reached: Number of states that noise leads to.
    """
    beta = 1 / torch.arange(CHAIN, 0, -1, dtype=torch.float64)[:, None, None]
    noise = torch.zeros(states, dtype=torch.float64)
    noise[-reached:] = 1 / reached
    return (1 - beta) * torch.eye(states, dtype=torch.float64) + beta * noise


def seeded(*seeds: object) -> torch.Generator:
    """Return a generator whose seed is a hash of the arguments.

    Args:
        *seeds: Numbers or strings.
    """
    text = " ".join(map(str, seeds))
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


class Formula:
    """A fixed network: each position sees its token, its place, the mean over all positions, the time and a label.

    Args:
        columns: Width of the output.
        dtype: Of the output. Everything before is computed in float64, so that rounding seldom reaches a float32 output.
        unprojected: Return `m2s.Unprojected` in place of logits.
    """

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32, unprojected: bool = False) -> None:
        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=seeded("network", *shape), dtype=torch.float64)

        width = 24
        self.tokens, self.places, self.labels = weights(columns, width), weights(64, width), weights(8, width)
        self.frequencies, self.mix = 3 * weights(width), weights(width, width) / width**0.5
        self.last = weights(columns, width) * (2 / width**0.5)
        self.dtype, self.unprojected = dtype, unprojected

    def __call__(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        hidden = self.tokens[x_t] + self.places[: x_t.shape[1]] + torch.cos(t.double()[:, None, None] * self.frequencies)
        if condition is not None:
            hidden = hidden + self.labels[condition][:, None]
        hidden = torch.tanh(hidden + hidden.mean(1, keepdim=True) @ self.mix)
        if self.unprojected:
            return m2s.Unprojected(hidden.to(self.dtype), self.last.to(self.dtype))
        return (hidden @ self.last.T).to(self.dtype)


def built(vocab: int, heads: Mapping[str, Callable[[Any], Any]] = HEADS, chains: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield every head over every process, with a name. Some pairs do not exist (TypeError).

    Args:
        vocab: Number of tokens.
        heads: Constructors of heads by name.
        chains: Include finite chains.
    """
    for (process_name, process), (name, head) in itertools.product(PROCESSES.items(), heads.items()):
        if process_name not in COVERED.get(name, PROCESSES) or (process_name.startswith("chain") and not chains):
            continue
        try:
            yield f"{process_name}/{name}", head(process(vocab))
        except TypeError:
            continue


def example(process: Any, name: str, dtype: torch.dtype, length: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return clean tokens, noisy tokens, times and a random network output, one row for each of TIMES.

    Args:
        process: The forward process.
        name: Seed of the random numbers.
        dtype: Of times and output.
        length: Sites per row.
    """
    generator = seeded("example", name)
    t = torch.tensor(TIMES, dtype=dtype)
    x_0 = torch.randint(process.vocab, (len(t), length), generator=generator)
    x_t = process.corrupt(x_0, t, generator)
    output = 2 * torch.randn(*x_0.shape, process.states, generator=generator, dtype=torch.float64)
    return x_0, x_t, t, output.to(dtype)


def processes(_: Runs) -> Iterator[Entry]:
    """Yield schedules at several times, and corrupted tokens of every process."""
    t = torch.tensor([0.0, *TIMES, 1.0], dtype=torch.float64)
    for name, schedule in SCHEDULES.items():
        yield f"processes/{name}/alpha", tensor(schedule().alpha(t))
        yield f"processes/{name}/sigma", tensor(schedule().sigma(t))
    for name, process in PROCESSES.items():
        x_0 = torch.arange(len(TIMES) * 12).reshape(len(TIMES), 12) % 17
        x_t = process(17).corrupt(x_0, torch.tensor(TIMES), seeded("corrupt"))
        yield f"processes/{name}/corrupt", tensor(x_t)


def heads(_: Runs) -> Iterator[Entry]:
    """Yield posterior and log-score of every head over every process."""
    for name, head in built(17):
        _, x_t, t, output = example(head.process, name, torch.float32)
        for method in (head.posterior, head.log_score):
            yield f"heads/{name}/{method.__name__}", attempt(method, output, x_t, t)


def losses(_: Runs) -> Iterator[Entry]:
    """Yield score entropy and its gradient for every process and head (K = 17), some at K = 5,000; m2s.Objective."""
    for dtype in (torch.float32, torch.float64):
        for name, head in built(17, chains=False):
            yield from loss_entries(name, head, dtype)
    large = {name: HEADS[name] for name in ("posterior", "leave-one-out", "log-score", "factorized-rate")}
    for kind in ("uniform", "absorbing", "hybrid"):
        for name, head in large.items():
            yield from loss_entries(f"{kind}/{name}/K=5000", head(PROCESSES[kind](5_000)), torch.float32)
    for name, head in built(17, chains=False):
        x_0, _, t, _ = example(head.process, name, torch.float64)
        objective = m2s.Objective(Formula(head.process.states), head, generator=seeded("objective"))
        weight = (torch.arange(x_0.numel()).reshape(x_0.shape) % 3).double()
        yield f"losses/{name}/objective", tensor(objective(x_0, t, weight=weight, condition=torch.arange(len(t))))


def loss_entries(name: str, head: Any, dtype: torch.dtype) -> Iterator[Entry]:
    """Yield score entropy and its gradient in the network's output.

    Args:
        name: Name of the entries.
        head: The head.
        dtype: Of times and output.
    """
    x_0, x_t, t, output = example(head.process, name, dtype)
    output.requires_grad_()
    trained = not isinstance(head, m2s.Projected)
    with torch.set_grad_enabled(trained):
        loss = m2s.score_entropy(head, output, x_0, x_t, t)
    yield f"losses/{name}/{bits(dtype)}/value", tensor(loss)
    if trained:
        (gradient,) = torch.autograd.grad(loss[loss.isfinite()].sum(), output)
        yield f"losses/{name}/{bits(dtype)}/gradient", tensor(gradient)


def elbo(_: Runs) -> Iterator[Entry]:
    """Yield the NELBO of a fixed network, its standard error and its three terms, for every process and head."""
    for name, head in built(VOCAB, chains=False):
        x_0 = torch.randint(VOCAB, (6, LENGTH), generator=seeded("elbo"))
        try:
            found = m2s.elbo(Formula(head.process.states), head, x_0, passes=2, generator=seeded("elbo", name))
        except ValueError as error:  # no projection at t = 1, where tokens survive
            yield f"elbo/{name}", type(error).__name__
            continue
        terms = torch.stack([found.nats, found.standard_error, found.integral, found.prior, found.reconstruction])
        yield f"elbo/{name}", {**tensor(terms), "means": terms.mean(-1).tolist()}


def realizability(_: Runs) -> Iterator[Entry]:
    """Yield `m2s.classify`, `affine_inverse` and `project` on random scores, far from realizable, near it, and realizable."""
    cases = [(name, 17) for name in PROCESSES if not name.startswith("chain")] + [("uniform", 5_000), ("absorbing", 5_000)]
    for (kind, vocab), dtype in itertools.product(cases, (torch.float32, torch.float64)):
        process = PROCESSES[kind](vocab)
        _, x_t, t, output = example(process, kind, dtype)
        posterior = m2s.Posterior(process, offset="exact")
        realizable = posterior.log_score(output, x_t, t)
        scores = {"random": output}
        if dtype == torch.float64:
            scores |= {"near": realizable + 0.01 * output, "realizable": realizable}
        for name, log_score in scores.items():
            for function in (m2s.classify, m2s.affine_inverse, m2s.project):
                label = f"realizability/{kind}/K={vocab}/{bits(dtype)}/{name}/{function.__name__}"
                yield label, attempt(function, log_score.clamp(max=60).exp(), x_t, t, process)


def samplers(_: Runs) -> Iterator[Entry]:
    """Yield 16 samples of every sampler, for every process and head that it serves."""
    for sampler in SAMPLERS:
        progress(f"  {sampler}")
        steps = 24 if sampler == "forward_backward" else STEPS  # its corrector starts at small times
        for name, head in built(VOCAB):
            network = Formula(head.process.states)
            try:
                tokens = m2s.sample(network, head, (SAMPLES, LENGTH), steps, sampler, grid="linear", seed=7)
            except (TypeError, ValueError):  # not served
                continue
            yield f"samplers/{sampler}/{name}", tensor(tokens)


def options(_: Runs) -> Iterator[Entry]:
    """Yield samples under the options of `m2s.sample`: sharpening, clamp, guidance, batches, windows, kinds of output."""
    clamp = torch.full((SAMPLES, LENGTH), -1)
    clamp[::2, 1::3] = 4
    guided = {"condition": torch.arange(SAMPLES) % 8, "guidance": 2.0}
    asked: dict[str, dict[str, Any]] = {
        "linear": {"grid": "linear"},
        "temperature": {"temperature": 0.6},
        "top_p": {"top_p": 0.7},
        "top_k": {"top_k": 3},
        "sharpened-leave-one-out": {"temperature": 0.8, "top_p": 0.9, "top_k": 6, "on": "leave_one_out"},
        "clamp": {"clamp": clamp},
        "condition": {"condition": guided["condition"]},
        "guidance": guided,
        "guidance-rates": {**guided, "guide": "rates"},
        "guidance-step": {**guided, "guide": "step"},
        "batches": {"batch_size": 5, "start": 9},
        "windows": {"window": 4, "overlap": 1},
    }
    used = (
        "uniform/leave-one-out",
        "absorbing/posterior",
        "hybrid/leave-one-out",
        "gaussian/leave-one-out",
        "uniform/log-score",
    )
    drawn = ("bayes", "euler", "analytic", "confidence")
    known = dict(built(VOCAB))
    for name, sampler in itertools.product(used, drawn):
        head = known[name]
        for option, given in asked.items():
            common = {"shape": (SAMPLES, LENGTH), "steps": STEPS, "sampler": sampler, "seed": 11}
            try:
                tokens = m2s.sample(Formula(head.process.states), head, **common, **given)
            except (TypeError, ValueError):  # not served, or not with this option
                continue
            yield f"options/{name}/{sampler}/{option}", tensor(tokens)
    for name, head in built(VOCAB):
        states, shape, trajectory = head.process.states, (4, LENGTH), m2s.Trajectory()
        try:
            m2s.sample(Formula(states, torch.float64), head, shape=shape, steps=STEPS, seed=13, callback=trajectory)
        except (TypeError, ValueError):  # no sampler serves this head
            continue
        yield f"options/{name}/trajectory", tensor(trajectory.states)
        tokens = m2s.sample(Formula(states, unprojected=True), head, shape=shape, steps=STEPS, seed=13)
        yield f"options/{name}/unprojected", tensor(tokens)


# ------------------------------------------------------------------------------------------------------------------ entries

SECTIONS: dict[str, Callable[[Runs], Iterator[Entry]]] = {
    "processes": processes,
    "heads": heads,
    "losses": losses,
    "elbo": elbo,
    "realizability": realizability,
    "samplers": samplers,
    "options": options,
    "train": train,
    "evaluate": evaluate,
    "run_samples": run_samples,
    "audit": audit,
}
TRAINED = ("train", "evaluate", "run_samples", "audit")  # skipped by --fast


def bits(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.".

    Args:
        dtype: The dtype.
    """
    return str(dtype).removeprefix("torch.")


def digest(value: Tensor) -> str:
    """Return the first 128 bits of the SHA-256 of a tensor's bytes.

    Args:
        value: The tensor.
    """
    return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:32]


def tensor(value: Tensor) -> Any:
    """Return the entry of a tensor: its shape and all tokens, or the digest of floats with values to read.

    Args:
        value: The tensor.
    """
    value = value.detach().cpu()
    shape = "x".join(map(str, value.shape))
    flat = value.flatten().tolist()
    if not value.dtype.is_floating_point:
        small = all(-1 <= token < len(DIGITS) for token in flat)
        return f"{shape} " + ("".join((DIGITS + "-")[token] for token in flat) if small else ",".join(map(str, flat)))
    finite = [number for number in flat if math.isfinite(number)]
    return {
        "tensor": f"{bits(value.dtype)} {shape}",
        "sha256": digest(value),
        "first": flat[:2],
        "sum": math.fsum(finite),
        "scale": float(f"{math.fsum(map(abs, finite)):.3g}"),  # of the rounding errors in the sum
    }


def attempt(function: Callable[..., Tensor], *arguments: Any) -> Any:
    """Return the entry of the result of a function, or the name of its exception: a finite chain has no rates, for example.

    Args:
        function: The function.
        *arguments: Its arguments.
    """
    try:
        return tensor(function(*arguments))
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__


def numbers(name: str, found: Any) -> Iterator[Entry]:
    """Yield the numbers of a JSON value by their path; a list of objects becomes one list for each path below it.

    Args:
        name: Path of the value.
        found: The value.
    """
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in PROVENANCE:
                yield from numbers(f"{name}/{key}", value)
    elif isinstance(found, list) and found and all(isinstance(value, dict) for value in found):
        columns: dict[str, list[Any]] = {}
        for value in found:
            for path, number in numbers(name, value):
                columns.setdefault(path, []).append(number)
        yield from columns.items()
    elif isinstance(found, list | int | float):
        yield name, found


def json_numbers(name: str, path: Path) -> Iterator[Entry]:
    """Yield the numbers of a JSON file.

    Args:
        name: Path of the entries.
        path: The file.
    """
    yield from numbers(name, json.loads(path.read_text(encoding="utf-8")))


def arrays(name: str, path: Path) -> Iterator[Entry]:
    """Yield the arrays of numbers of an .npz file.

    Args:
        name: Path of the entries.
        path: The file.
    """
    with np.load(path) as file:
        for key in file.files:
            if file[key].dtype.kind in "iuf":
                yield f"{name}/{key}", tensor(torch.from_numpy(file[key]))


def header() -> dict[str, Any]:
    """Return the versions and hardware that exact equality depends on, and the git revision."""
    revision = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    cpus = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in cpus.read_text().splitlines() if "model name" in line] if cpus.is_file() else []
    )
    return {
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": models[0] if models else platform.machine(),
        "threads": torch.get_num_threads(),
        "revision": revision.stdout.strip(),
    }


def compute(names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Compute the entries of some sections.

    Args:
        names: The sections.

    Returns:
        The entries, and one line for each section that ended with an exception.
    """
    entries: dict[str, Any] = {}
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for name in names:
            begin = time.perf_counter()
            progress(name)
            torch.manual_seed(0)
            count = len(entries)
            try:
                for key, value in SECTIONS[name](runs):
                    if key in entries:
                        raise KeyError(f"two entries are called {key}")
                    entries[key] = value
            except Exception as error:
                errors.append(f"section {name} stopped after {len(entries) - count} entries: {type(error).__name__}: {error}")
            progress(f"{name}: {len(entries) - count} entries, {time.perf_counter() - begin:.1f} s")
    return json.loads(json.dumps(entries)), errors  # as they are read back from the file


def progress(line: str) -> None:
    """Print a line on stderr.

    Args:
        line: The line.
    """
    print(line, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------- comparison


def same(a: Any, b: Any) -> bool:
    """Return whether two entries are equal, bit for bit; NaN equals NaN, and 0.0 differs from -0.0.

    Args:
        a: The recorded entry.
        b: The computed entry.
    """
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def near(a: Any, b: Any, scale: float = 0.0) -> bool:
    """Return whether two entries are equal up to rounding.

    Args:
        a: The recorded entry.
        b: The computed entry.
        scale: Floats may differ by TOLERANCE times this too.
    """
    if both_tokens(a, b):
        wrong, count = token_difference(a, b)
        return wrong <= CHANGED_TOKENS * count
    if isinstance(a, dict) and isinstance(b, dict) and a["tensor"] == b["tensor"]:
        # Terms of a sum that cancel leave an error relative to the sum of absolute values.
        return all(near(a[key], b[key], a["scale"] if key == "sum" else 0.0) for key in a if key not in ("sha256", "scale"))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(near(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return same(a, b) or abs(a - b) <= TOLERANCE * max(abs(a), abs(b), scale)
    return same(a, b)


def both_tokens(a: Any, b: Any) -> bool:
    """Return whether both entries are tokens of one shape.

    Args:
        a: The recorded entry.
        b: The computed entry.
    """
    return isinstance(a, str) and isinstance(b, str) and " " in a and " " in b and a.split()[0] == b.split()[0]


def token_difference(a: str, b: str) -> tuple[int, int]:
    """Return how many tokens differ, and how many there are.

    Args:
        a: The recorded entry.
        b: The computed entry.
    """
    x, y = (entry.partition(" ")[2] for entry in (a, b))
    pairs = list(zip(*((text.split(",") if "," in text else text) for text in (x, y)), strict=False))
    return sum(one != other for one, other in pairs), len(pairs)


def shown(a: Any, b: Any) -> str:
    """Return both values of an entry that differs.

    Args:
        a: The recorded entry.
        b: The computed entry.
    """
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        wrong = [i for i, pair in enumerate(zip(a, b, strict=True)) if not same(*pair)]
        where = f"{len(wrong)} of {len(a)} values differ, the first at [{wrong[0]}]"
        return f"{where}\n    recorded {a[wrong[0]]!r}\n    computed {b[wrong[0]]!r}"
    if both_tokens(a, b):
        changed, count = token_difference(a, b)
        return f"{changed} of {count} tokens differ\n    recorded {a}\n    computed {b}"
    return f"values differ\n    recorded {json.dumps(a)}\n    computed {json.dumps(b)}"


def renamed(missing: list[str], new: list[str], recorded: dict[str, Any], computed: dict[str, Any]) -> dict[str, str]:
    """Pair recorded entries with computed ones of another name and an equal value.

    Keys of JSON files and fields of results may be renamed; their values and their run or process may not change.

    Args:
        missing: Names of recorded entries that were not computed.
        new: Names of computed entries that were not recorded.
        recorded: Entries of the file.
        computed: Entries of this version of the library.

    Returns:
        New names by old names.
    """
    pairs: dict[str, str] = {}
    for old in missing:
        group = old.split("/")[:2]
        for name in new:
            if name not in pairs.values() and name.split("/")[:2] == group and same(recorded[old], computed[name]):
                pairs[old] = name
                break
    return pairs


def compare(recorded: dict[str, Any], computed: dict[str, Any], exact: bool) -> int:
    """Print all differences.

    Args:
        recorded: Entries of the file.
        computed: Entries of this version of the library.
        exact: Ask for equality of every bit; else for equality up to rounding.

    Returns:
        How many entries differ.
    """
    missing = [name for name in recorded if name not in computed]
    new = [name for name in computed if name not in recorded]
    pairs = renamed(missing, new, recorded, computed)
    for old, name in pairs.items():
        print(f"renamed, with the same value: {old} -> {name}")
    lines = [f"{name}: recorded, but not computed" for name in missing if name not in pairs]
    lines += [f"{name}: computed, but not recorded" for name in new if name not in pairs.values()]
    rounded = tokens = 0
    for name in recorded:
        if name not in computed or same(recorded[name], computed[name]):
            continue
        a, b = recorded[name], computed[name]
        if not exact and near(a, b):
            rounded += 1
            tokens += token_difference(a, b)[0] if both_tokens(a, b) else 0
            continue
        lines.append(f"{name}: {shown(a, b)}")
    print("\n".join(lines), end="\n" if lines else "")
    equal = len(recorded) - len(missing) - rounded - (len(lines) - len(missing) - len(new) + 2 * len(pairs))
    print(f"{equal} entries are equal bit for bit, {len(pairs)} renamed with equal values, {len(lines)} differ", end="")
    print("." if exact else f"; {rounded} are equal up to rounding ({tokens} of their tokens differ).")
    return len(lines)


def check(path: Path, names: list[str]) -> int:
    """Compare the library with the file; return the exit code.

    Args:
        path: The record.
        names: Sections to compare.
    """
    file = json.loads(path.read_text(encoding="utf-8"))
    then, now = file["header"], header()
    changed = [f"{key} ({then[key]}, now {now[key]})" for key in ("torch", "cpu_capability") if then[key] != now[key]]
    print(f"recorded at {then['revision']}, compared with {now['revision']}")
    if changed:
        print(
            f"Not an exact comparison: the record was made with another {' and '.join(changed)}. Floats are compared to a "
            f"relative {TOLERANCE:g}, and up to {CHANGED_TOKENS:.0%} of the tokens of an entry may differ."
        )
    elif then["processor"] != now["processor"]:
        print(f"The processor differs ({then['processor']}, now {now['processor']}): last digits may differ for that reason.")
    computed, errors = compute(names)
    recorded = {name: value for name, value in file["entries"].items() if name.split("/")[0] in names}
    wrong = compare(recorded, computed, exact=not changed)
    for line in errors:
        print(line)
    return 1 if wrong or errors else 0


def write(path: Path, names: list[str]) -> int:
    """Write the file, or some sections of it; return the exit code.

    Args:
        path: The record.
        names: Sections to write.
    """
    entries, now = {}, header()
    if path.is_file() and len(names) < len(SECTIONS):
        file = json.loads(path.read_text(encoding="utf-8"))
        entries = {name: value for name, value in file["entries"].items() if name.split("/")[0] not in names}
        if entries and any(file["header"][key] != now[key] for key in ("torch", "cpu_capability")):
            print(f"{path} was written with another torch or CPU: write all sections anew", file=sys.stderr)
            return 1
    found, errors = compute(names)
    if errors:
        print("\n".join([*errors, f"{path} was not written"]), file=sys.stderr)
        return 1
    entries |= found
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(entries.items())]
    text = f'{{"header": {json.dumps(now)},\n"entries": {{\n' + ",\n".join(lines) + "\n}}\n"
    path.write_text(text, encoding="utf-8")
    print(f"{len(entries)} entries in {path.name}, {len(text.encode()) / 1000:.0f} kB")
    return 0


def main() -> int:
    """Read the command line, and write or check the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="""sections:
  processes      schedules and corrupted tokens
  heads          posterior and log-score of every head over every process
  losses         score entropy and gradients, K = 17 and 5,000; m2s.Objective
  elbo           the NELBO and its terms
  realizability  classify, affine_inverse and project
  samplers       16 samples of every sampler, process and head
  options        samples with sharpening, clamp, guidance, batches, windows
  train          20 steps of every method on digits: losses, gradient norms, weights
  evaluate       m2s evaluate bpd of trained runs
  run_samples    m2s sample of trained runs
  audit          m2s audit and m2s repair of trained runs

--check exits with 1 if an entry differs, and prints both values. An entry whose name changed and whose value did not is printed
as renamed, and is no difference. Under another torch or CPU capability than the record's, floats are compared to a relative
1e-5; the output says so.

examples:
  python scripts/snapshot.py --check --fast            after every edit: no training
  python scripts/snapshot.py --check --only samplers   one section
  python scripts/snapshot.py --check                   before a commit
  python scripts/snapshot.py --write                   after a change of results that is intended""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the record; with --only or --fast, these sections of it")
    action.add_argument("--check", action="store_true", help="compare with the record")
    parser.add_argument("--file", type=Path, default=FILE, help="the record (default: snapshot.json beside the script)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="only these sections")
    parser.add_argument("--fast", action="store_true", help=f"leave out what needs training: {', '.join(TRAINED)}")
    given = parser.parse_args()
    names = [name for name in given.only or SECTIONS if not (given.fast and name in TRAINED)]
    if not names:
        parser.error("--fast leaves out all of these sections")
    if given.check and not given.file.is_file():
        parser.error(f"there is no {given.file}: write it first with --write")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return write(given.file, names) if given.write else check(given.file, names)


if __name__ == "__main__":
    sys.exit(main())
