"""What the benchmarks share: timing, the machine in words, a table, a file of results."""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


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
        "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "threads": options.threads,
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
