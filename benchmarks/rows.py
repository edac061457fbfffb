"""What the row kernel of the M2S loss waits for: a chunk of logits from memory, and every program on one and the same row.

    python benchmarks/rows.py

On one row, which all find in the cache, what is left is arithmetic; the difference is what memory adds. Beside them stands a
copy of as many bytes as the kernel must move: logits read once in float32, gradients written in bf16. Needs a GPU; writes
benchmarks/results/rows.json.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import common

import m2s
from m2s.benchmark.comparison import interleave
from m2s.losses.score_entropy import row_loss_spec
from m2s.ops.last_layer_chunks import CHUNK

VOCAB, COLUMNS = 50_257, 50_304


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=15, help="timed calls of each; they take turns")
    given = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the kernel is for a GPU, and there is none")
    from m2s.ops.posterior_entropy import triton

    device, rows = torch.device("cuda"), CHUNK // COLUMNS
    torch.manual_seed(0)
    logits = 2 * torch.randn(rows, COLUMNS, device=device)
    head = m2s.Posterior(m2s.Uniform(VOCAB, m2s.Linear()))
    t = torch.rand(rows, dtype=torch.float64, device=device) * 0.98 + 0.01
    x_0 = torch.randint(VOCAB, (rows,), device=device)
    x_t = head.process.corrupt(x_0[:, None], t)[:, 0]
    told = row_loss_spec(head, x_0, x_t, t)
    assert told is not None
    ready, weight = triton.prepare(x_t, x_0, told.scalars), torch.full_like(t, 1 / rows)
    fresh = logits.clone()

    def work(on: Tensor) -> None:
        triton.row_losses(on, *ready, False, VOCAB, weight, torch.bfloat16)

    moved = 6 * logits.numel() // 2  # a copy reads and writes
    source, target = torch.empty(2, moved, dtype=torch.uint8, device=device)
    one = fresh[:1].expand(rows, -1)
    calls = {
        "rows from memory": lambda: work(logits.copy_(fresh)),
        "that copy of the rows": lambda: logits.copy_(fresh),
        "every program on one row": lambda: work(one),
        "a copy of the bytes that must move": lambda: target.copy_(source),
    }
    times = {name: statistics.median(found) for name, found in interleave(calls, device, given.repeats).items()}
    times["rows from memory"] -= times.pop("that copy of the rows")
    for name, ms in times.items():
        print(f"{name:36s} {ms:.3f} ms, {ms * 1e3 * 2048 / rows:.0f} us for 2,048 rows")
    about = {"device": torch.cuda.get_device_name(), "rows": rows, "columns": COLUMNS}
    common.save("rows", given, {**about, "median_ms": times})


if __name__ == "__main__":
    main()
