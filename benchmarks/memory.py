"""Compare the estimated memory of training with the peak that the operating system reports.

    python benchmarks/memory.py [--out benchmarks/results/memory.json] [NAME ...]

Every case trains three steps, validates and saves, in a process of its own. Before the run the process makes one small run, so
that libraries are loaded. The measured memory is the peak of the resident set during the run less its size before it. It works
on Linux and on the CPU.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from m2s.data import Batch
from m2s.distributed import World
from m2s.io import write_json
from m2s.presets import PRESETS
from m2s.provenance import provenance
from m2s.training import Config, resolve, train
from m2s.training.config import replace
from m2s.training.estimate import estimate

FACTOR = 1.5  # the estimate and the peak differ by at most this factor

# Cases by name: the preset, its changes, the vocabulary, the length and the shape of the data.
CASES: dict[str, tuple[str, dict[str, Any], int, int, tuple[int, ...] | None]] = {
    "digits": ("digits", {"batch": 512}, 17, 64, (8, 8)),
    "mnist": ("mnist", {"batch": 32}, 256, 784, (28, 28)),
    "mnist, micro-batch 8": ("mnist", {"batch": 32, "micro_batch": 8}, 256, 784, (28, 28)),
    "mnist, m2s-gaussian": ("mnist", {"batch": 16, "method": "m2s-gaussian"}, 256, 784, (28, 28)),
    "bytes, DiT tiny": ("owt", {"batch": 32, "network.size": "tiny"}, 257, 256, None),
    "bytes, DiT tiny, recompute": ("owt", {"batch": 128, "network.size": "tiny", "recompute": True}, 257, 256, None),
    "GPT-2, DiT tiny": ("owt", {"batch": 8, "network.size": "tiny"}, 50_257, 128, None),
    "GPT-2, DiT tiny, sedd": ("owt", {"batch": 8, "network.size": "tiny", "method": "sedd"}, 50_257, 128, None),
    "GPT-2, DiT small": ("owt", {"batch": 2}, 50_257, 128, None),
}


class Tokens:
    """Examples that are all zero. Memory does not depend on their values.

    Args:
        vocab: The number of tokens.
        length: The length of an example.
        shape: The shape of an image; None for text.
    """

    tokenizer = classes = None
    size = held_out = 1024

    def __init__(self, vocab: int, length: int, shape: tuple[int, ...] | None) -> None:
        self.vocab, self.length, self.shape = vocab, length, shape
        self.description = {"kind": "text", "length": length}
        if shape is not None:
            self.description = {"kind": "image", "shape": list(shape), "levels": vocab}

    def train(self, indices: torch.Tensor) -> Batch:
        """Return examples.

        Args:
            indices: Their indices, [B].

        Returns:
            A batch of zeros, [B, L].
        """
        return Batch(torch.zeros(len(indices), self.length, dtype=torch.long))

    validation = train


def configuration(name: str, out: Path) -> tuple[Config, Tokens]:
    """Return the configuration and the data of a case.

    Args:
        name: The case.
        out: The folder of the run.
    """
    preset, changes, *data = CASES[name]
    config = PRESETS[preset]
    fixed = {"out": out, "steps": 3, "device": "cpu", "validation_samples": 16, "on_low_memory": "warn"}
    for key, value in {**fixed, **changes}.items():
        config = replace(config, key, value)
    return resolve(config), Tokens(*data)


def status(field: str) -> int:
    """Return a size of this process from /proc/self/status in bytes.

    Args:
        field: VmRSS, or VmHWM for its peak.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure(name: str) -> dict[str, Any]:
    """Measure one case in this process.

    Args:
        name: The case.

    Returns:
        The estimate and the measured peak in bytes, and their ratio.
    """
    with tempfile.TemporaryDirectory() as folder:
        small = replace(configuration("digits", Path(folder) / "small")[0], "batch", 4)
        train(small, configuration("digits", Path(folder))[1])
        config, source = configuration(name, Path(folder) / "run")
        found = estimate(config, source, World.start("cpu"))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status("VmRSS")
        train(config, source)
        peak = status("VmHWM") - before
    sizes = {"parameters": found.step.parameters, "estimate": found.total, "peak": peak}
    return {"name": name, **sizes, "ratio": found.total / peak}


def main() -> None:
    """Measure the cases, print a table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these cases: {'; '.join(CASES)}")
    parser.add_argument("--out", type=Path, help="write the numbers to this file")
    parser.add_argument("--here", action="store_true", help="measure one case in this process and print it as JSON")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.names[0])))
        return
    rows = []
    for name in options.names or CASES:
        command = [sys.executable, __file__, "--here", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        sizes = f"estimate {rows[-1]['estimate'] / 2**30:.2f} GiB, peak {rows[-1]['peak'] / 2**30:.2f} GiB"
        print(f"{name:28s} {sizes}, ratio {rows[-1]['ratio']:.2f}", flush=True)
    if options.out is not None:
        write_json(options.out, {**provenance("cpu"), "factor": FACTOR, "rows": rows})
    worst = max(max(row["ratio"], 1 / row["ratio"]) for row in rows)
    if worst > FACTOR:
        sys.exit(f"estimate and peak differ by a factor of {worst:.2f}, above {FACTOR}")


if __name__ == "__main__":
    main()
