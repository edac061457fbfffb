"""One reverse step on top of the network: the library's Bayes step, which draws one token and keeps no K-vector, against the
analytic step in the form in which SEDD released it, on K-vectors for every site. The network stands still: its output is fixed.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import common

import m2s
from m2s.sampler import Bayes, Belief, Move, Noise

LEAST_SPEED, LEAST_MEMORY = 4.0, 4.0
NAMES = ["vectors", "m2s"]
T, S = 0.5, 0.49


def vectors(log_score: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Positive part of (e^D score - (e^D - 1) mean(score)) P_{t|s}(k|.), D = sigma_t - sigma_s, drawn from by exponential
    noise, one number for each token of the vocabulary; uniform, linear schedule.
    """
    vocab = log_score.shape[-1]
    k = x_t.unsqueeze(-1)
    d = (torch.log1p(-s) - torch.log1p(-t))[:, None, None]
    score = log_score.exp().scatter(-1, k, 1.0)
    staggered = d.exp() * score - torch.expm1(d) * score.mean(-1, keepdim=True)
    row = (-torch.expm1(-d) / vocab).expand(score.shape).scatter_add(-1, k, torch.exp(-d).expand(k.shape))
    weights = (staggered * row).clamp(min=0)
    noise = 1e-10 - torch.log(torch.rand_like(weights) + 1e-10)
    return (weights / noise).argmax(-1)


def streaming(logits: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """The library's step: routes and one draw, some rows at a time."""
    belief = Belief(m2s.Posterior(m2s.Uniform(logits.shape[-1], m2s.Linear())), logits, x_t, t)
    return Bayes().step(belief, Move(t.double(), s.double()), Noise(0, torch.arange(len(x_t)), x_t.shape[1], 1))


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {"vectors": vectors, "m2s": streaming}


def inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(options.seed)
    batch = min(8, options.rows)
    shape = (batch, options.rows // batch)
    return (
        torch.randn(*shape, options.vocab),
        torch.randint(options.vocab, shape),
        torch.full((batch,), T),
        torch.full((batch,), S),
    )


def child(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Milliseconds of `repeats` steps and the peak memory of one, in a process of its own."""
    command = [sys.executable, __file__, "--measure", name, "--rows", options.rows, "--vocab", options.vocab]
    command += ["--threads", options.threads, "--seed", options.seed, "--repeats", options.repeats]
    return json.loads(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)


@torch.no_grad()
def measure(options: argparse.Namespace) -> None:
    """Warm up on a small input, reset the kernel's high-water mark (Linux), run once for the memory, then time."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    form = FORMS[options.measure]
    form(*inputs(argparse.Namespace(**{**vars(options), "rows": 8, "vocab": 64})))
    given = inputs(options)
    ctypes.CDLL(None).malloc_trim(0)  # what the warm-up freed must not serve the call for nothing
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    form(*given)
    peak = (status("VmHWM") - before) / 1024
    times = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        form(*given)
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps({"peak_mib": peak, "ms": times}))


def main() -> int:
    parser = common.parser(__doc__ or "")
    parser.set_defaults(rows=1024, vocab=50_257, repeats=5)
    parser.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3, help="processes started for each form, in turns")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        measure(options)
        return 0
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for _ in range(options.rounds):
        for name in NAMES:
            runs[name].append(child(options, name))
    every = {name: [ms for run in runs[name] for ms in run["ms"]] for name in NAMES}
    times = {name: {"best_ms": min(every[name]), "median_ms": statistics.median(every[name])} for name in NAMES}
    memory = {name: statistics.median(run["peak_mib"] for run in runs[name]) for name in NAMES}
    rows = [[name, f"{times[name]['best_ms']:.1f}", f"{times[name]['median_ms']:.1f}", f"{memory[name]:.0f}"] for name in NAMES]
    print(f"one step, {options.rows} x {options.vocab}, float32, {options.threads} threads, torch {torch.__version__}")
    common.table(["", "best ms", "median ms", "peak MiB"], rows)
    faster = times["vectors"]["median_ms"] / times["m2s"]["median_ms"]
    less = memory["vectors"] / memory["m2s"]
    common.save(
        "sampler",
        options,
        {
            "what": f"one step beyond the network, Uniform + Linear, Posterior, {options.rows} x {options.vocab} float32",
            "memory_measure": "rise of VmHWM above VmRSS before the call, each in a process of its own; median of the rounds",
            "rounds": options.rounds,
            "times": times,
            "peak_mib": memory,
            "times_faster": faster,
            "times_less_memory": less,
        },
    )
    return common.verdict(
        [
            ("times faster than the step on K-vectors (median of all calls)", faster, LEAST_SPEED),
            ("times less peak memory than the step on K-vectors", less, LEAST_MEMORY),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
