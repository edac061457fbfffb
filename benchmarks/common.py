"""What the benchmarks share: timing, the machine in words, a table, a file of results."""

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
Ratios = tuple[dict[str, float], dict[str, float]]


def parser(description: str) -> argparse.ArgumentParser:
    """The options every benchmark takes."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--rows", type=int, default=512, help="sites, batch times length")
    options.add_argument("--vocab", type=int, default=8192, help="size of the vocabulary")
    options.add_argument("--repeats", type=int, default=9, help="timed calls of each variant; the contenders take turns")
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    options.add_argument("--seed", type=int, default=0, help="of the inputs")
    return options


def take_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of every call, best and median: one warm-up each, then round robin, so that a busy moment hits all alike."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"best_ms": min(value), "median_ms": statistics.median(value)} for name, value in times.items()}


def in_turns(file: str, names: Iterable[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What this benchmark prints with `--measure NAME`, for every name, `rounds` times in turns, each in a process of its own:
    the forms allocate very differently, and none should inherit another's heap.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, found in runs.items():
            command = [sys.executable, file, *sys.argv[1:], "--measure", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return runs


def memory_and_times(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """The peak memory of one call above what was there (Linux: the kernel's high-water mark), then the times of `repeats`."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    ctypes.CDLL(None).malloc_trim(0)  # what a warm-up freed must not serve the call for nothing
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    peak = (status("VmHWM") - before) / 1024
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return {"peak_mib": peak, "ms": times}


def compare(name: str, options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], baseline: str, what: str) -> Ratios:
    """Table and file of what `memory_and_times` found; how many times faster and smaller than `baseline` every form is."""
    every = {form: [ms for run in found for ms in run["ms"]] for form, found in runs.items()}
    times = {form: {"best_ms": min(ms), "median_ms": statistics.median(ms)} for form, ms in every.items()}
    memory = {form: statistics.median(run["peak_mib"] for run in found) for form, found in runs.items()}
    print(f"{what}, {options.threads} threads, torch {torch.__version__}")
    rows = [[form, f"{times[form]['best_ms']:.1f}", f"{times[form]['median_ms']:.1f}", f"{memory[form]:.0f}"] for form in runs]
    table(["", "best ms", "median ms", "peak MiB"], rows)
    faster = {form: times[baseline]["median_ms"] / times[form]["median_ms"] for form in runs}
    less = {form: memory[baseline] / memory[form] for form in runs}
    measure = "rise of VmHWM above VmRSS before the call, each in a process of its own; median of the rounds"
    numbers = {"rounds": options.rounds, "times": times, "peak_mib": memory, "times_faster": faster, "times_less_memory": less}
    save(name, options, {"what": what, "memory_measure": measure, **numbers})
    return faster, less


def processor() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def save(name: str, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write benchmarks/results/<name>.json: the numbers and what they were measured on."""
    about = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": processor(),
        "repeats": options.repeats,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({**about, **results}, indent=2) + "\n")


def table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )


def verdict(bars: list[tuple[str, float, float]]) -> int:
    """Print each (claim, measured, least) and return the exit status: 1 if any measured number is below its least."""
    for claim, measured, least in bars:
        print(f"{'met   ' if measured >= least else 'MISSED'}  {claim}: {measured:.2f} (at least {least:g})")
    return int(any(measured < least for _, measured, least in bars))
