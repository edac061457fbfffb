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
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from snapshot_parts.compare import CHANGED_TOKENS, TOLERANCE, compare
from snapshot_parts.library import elbo, heads, losses, options, processes, realizability, samplers
from snapshot_parts.runs import Runs, audit, evaluate, run_samples, train
from snapshot_parts.values import Entry, progress

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_suffix(".json")

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
            print(f"{path} was written with another torch or CPU: write all sections again", file=sys.stderr)
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
