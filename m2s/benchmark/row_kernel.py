"""Part "row-kernel": what the row kernel of the M2S loss waits for. Needs a GPU.

The kernel runs on a chunk of logits from memory, and with every program on one and the same row, which all find in the cache.
What is left in the second case is arithmetic; the difference is what memory adds. Beside them is a copy of as many bytes as the
kernel must move: logits read once in float32, gradients written in bf16.
"""

from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.losses.score_entropy import row_loss_spec
from m2s.ops.last_layer_chunks import CHUNK

WITH_COPY, COPY = "rows from memory, with their copy", "that copy of the rows"
ONE_ROW, BYTES = "every program on one row", "a copy of the bytes that must move"


@PARTS.register("row-kernel")
def measure(setting: Setting) -> dict[str, Any]:
    """Time the row kernel of the M2S loss on rows from memory and on one row.

    Args:
        setting: Vocabulary, device and repeats; the rows are those of one chunk of the fused loss.

    Returns:
        Times, and `median_ms`: the kernel on rows from memory (without the copy), on one row, and the copy of its bytes.
    """
    comparison, device = Comparison(setting), setting.device
    rows = CHUNK // setting.columns
    what = f"row kernel of the M2S loss on a chunk of {rows:,} rows x {setting.columns:,} columns"
    if device.type != "cuda":
        comparison.skipped.append(f"fused row kernel: needs a GPU, and this is {device}")
        return comparison.result(what, {}, [])
    from m2s.ops.posterior_entropy import triton  # Triton is optional.

    generator = torch.Generator(device).manual_seed(setting.seed)
    fresh = 2 * torch.randn(rows, setting.columns, generator=generator, device=device)
    logits = fresh.clone()
    head = m2s.Posterior(m2s.Uniform(setting.vocab, m2s.Linear()))
    t = torch.rand(rows, dtype=torch.float64, generator=generator, device=device) * 0.98 + 0.01
    x_0 = torch.randint(setting.vocab, (rows,), generator=generator, device=device)
    x_t = head.process.corrupt(x_0[:, None], t, generator)[:, 0]
    spec = row_loss_spec(head, x_0, x_t, t)
    assert spec is not None
    prepared, weight = triton.prepare(x_t, x_0, spec.scalars), torch.full_like(t, 1 / rows)

    def kernel(values: Tensor) -> None:
        triton.row_losses(values, *prepared, False, setting.vocab, weight, torch.bfloat16)

    moved = 6 * logits.numel() // 2  # bytes: float32 in, bf16 out; a copy reads and writes
    source, target = torch.empty(2, moved, dtype=torch.uint8, device=device)
    # The kernel may overwrite its input, so that every call gets fresh rows. The time of that copy is subtracted below.
    comparison.add(WITH_COPY, lambda: kernel(logits.copy_(fresh)))
    comparison.add(COPY, lambda: logits.copy_(fresh))
    comparison.add(ONE_ROW, lambda: kernel(fresh[:1].expand(rows, -1)))
    comparison.add(BYTES, lambda: target.copy_(source))
    comparison.run()
    median = {name: result["median_ms"] for name, result in comparison.results.items()}
    known = WITH_COPY in median and COPY in median
    times = {"rows from memory": median[WITH_COPY] - median[COPY] if known else None}
    times |= {name: median.get(name) for name in (ONE_ROW, BYTES)}
    return comparison.result(what, {}, [], median_ms=times)
