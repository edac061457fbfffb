"""Score entropy through the bridge, forward and backward: the library, as it is and under torch.compile, against the form that
builds s, r and h and leaves the rest to autograd. (Compiled, that form no longer builds them; its time is shown beside.)
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

LEAST_SPEED, LEAST_MEMORY = 3.0, 3.0
NAMES = ["direct", "m2s", "direct, compiled", "m2s, compiled"]


def direct(logits: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """n sum_{y != k} (s - r log s + r log r - r), s = off + rho mu_k + b mu, r = P_t(y|x_0) / P_t(k|x_0); uniform, linear
    schedule.
    """
    vocab = logits.shape[-1]
    alpha, beta = (1 - t)[:, None, None], t[:, None, None]
    rho = (beta / vocab) / (alpha + beta / vocab)
    k = x_t.unsqueeze(-1)
    mu = torch.softmax(logits, -1)
    mu_k = mu.gather(-1, k)
    s = (1 - mu_k) + rho * mu_k + (1 / rho - 1) * mu
    row = beta / vocab + alpha * torch.nn.functional.one_hot(x_0, vocab)
    r = row / row.gather(-1, k)
    h = s - r * torch.log(s) + r * torch.log(r) - r
    return h.scatter(-1, k, 0.0).sum(-1) / (vocab * alpha.squeeze(-1))


def inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(options.seed)
    batch = min(8, options.rows)
    shape = (batch, options.rows // batch)
    x_0 = torch.randint(options.vocab, shape)
    t = torch.rand(batch) * 0.9 + 0.05
    x_t = m2s.Uniform(options.vocab, m2s.Linear()).corrupt(x_0, t)
    return 2 * torch.randn(*shape, options.vocab), x_0, x_t, t


def contenders(x_0: Tensor, x_t: Tensor, t: Tensor, vocab: int) -> dict[str, Callable[[Tensor], Tensor]]:
    head = m2s.Posterior(m2s.Uniform(vocab, m2s.Linear()))
    forms = {
        "direct": lambda logits: direct(logits, x_0, x_t, t),
        "m2s": lambda logits: m2s.score_entropy(head, logits, x_0, x_t, t),
    }
    return forms | {f"{name}, compiled": torch.compile(form, fullgraph=True) for name, form in forms.items()}


def forward_backward(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    leaf = logits.detach().requires_grad_()
    loss(leaf).mean().backward()
    assert leaf.grad is not None
    return leaf.grad


def child(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Milliseconds of `repeats` calls and the peak memory of one, in a process of its own: the two forms allocate very
    differently, and neither should inherit the other's heap.
    """
    command = [sys.executable, __file__, "--measure", name, "--rows", options.rows, "--vocab", options.vocab]
    command += ["--threads", options.threads, "--seed", options.seed, "--repeats", options.repeats]
    return json.loads(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)


def measure(options: argparse.Namespace) -> None:
    """Warm up on a small input, reset the kernel's high-water mark (Linux), run once for the memory, then time."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    small = argparse.Namespace(**{**vars(options), "rows": 8, "vocab": 64})
    logits, *rest = inputs(small)
    forward_backward(contenders(*rest, small.vocab)[options.measure], logits)
    logits, *rest = inputs(options)
    call = contenders(*rest, options.vocab)[options.measure]
    if "compiled" in options.measure:
        forward_backward(call, logits)
    ctypes.CDLL(None).malloc_trim(0)  # what the warm-up freed must not serve the call for nothing
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    forward_backward(call, logits)
    peak = (status("VmHWM") - before) / 1024
    times = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        forward_backward(call, logits)
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps({"peak_mib": peak, "ms": times}))


def main() -> int:
    parser = common.parser(__doc__ or "")
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
    print(
        f"forward + backward, {options.rows} x {options.vocab}, float32, {options.threads} threads, torch {torch.__version__}"
    )
    common.table(["", "best ms", "median ms", "peak MiB"], rows)
    faster = {name: times["direct"]["median_ms"] / times[name]["median_ms"] for name in NAMES}
    less = {name: memory["direct"] / memory[name] for name in NAMES}
    common.save(
        "loss",
        options,
        {
            "what": f"score_entropy, Uniform + Linear, Posterior, forward + backward, {options.rows} x {options.vocab} float32",
            "memory_measure": "rise of VmHWM above VmRSS before the call, each in a process of its own; median of the rounds",
            "rounds": options.rounds,
            "times": times,
            "peak_mib": memory,
            "times_faster": faster,
            "times_less_memory": less,
        },
    )
    print(f"        times faster than the direct form, eager: {faster['m2s']:.2f}")
    return common.verdict(
        [
            ("times faster than the direct form (compiled, median of all calls)", faster["m2s, compiled"], LEAST_SPEED),
            ("times less peak memory than the direct form, eager", less["m2s"], LEAST_MEMORY),
            ("times less peak memory than the direct form, compiled", less["m2s, compiled"], LEAST_MEMORY),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
