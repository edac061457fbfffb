"""Part "expm": transition matrices expm(sigma Q) of a batch of times, by tables, by doubling, and by torch.linalg.matrix_exp.

The rates are those of `--method tauldr` between 256 levels, the times those of a training batch. Errors are the largest of any
entry, relative to it, against doubling, which tests/conversions/test_identities.py compares with 80 digits. Entries below
1e-290 do not count. matrix_exp is accurate in the large entries only. Tables must be three times as fast as doubling.
"""

import time
from typing import Any

import torch

from m2s.benchmark.comparison import Comparison, synchronize
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.process.expm import expm
from m2s.process.expm_table import ExpmTable
from m2s.training.build import make_process
from m2s.training.config import ProcessConfig

TIMES, LEVELS = 64, 256  # of the bar
QUICK_LEVELS = 32
TABLES, DOUBLING, MATRIX_EXP = "tables", "doubling", "matrix_exp"
SMALLEST = 1e-290  # entries below it are close to the end of float64's range
MIN_SPEEDUP = 3.0


@PARTS.register("expm")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare three ways to compute transition matrices, in float64.

    Args:
        setting: Device and repeats; an eighth of the rows, at most 64, are times, and at most 256 tokens are levels, or 32 in
            a quick run.

    Returns:
        Times, ratios, a bar, errors, and the time and the memory that the tables cost once.
    """
    comparison, device = Comparison(setting), setting.device
    count, levels = min(TIMES, setting.rows // 8), min(QUICK_LEVELS if setting.quick else LEVELS, setting.vocab)
    process = make_process(ProcessConfig(kind="gaussian", schedule="geometric"), levels).tabulated
    assert process is not None
    rates = process.generator.to(device)
    t = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(setting.seed))
    sigma = process.schedule.sigma(t).to(device)
    start = time.perf_counter()
    table = ExpmTable.of(rates)
    assert table is not None
    synchronize(device)
    seconds = time.perf_counter() - start
    comparison.add(TABLES, lambda: table(sigma))
    comparison.add(DOUBLING, lambda: expm(rates, sigma))
    comparison.add(MATRIX_EXP, lambda: torch.linalg.matrix_exp(sigma[:, None, None] * rates))
    comparison.run()
    exact = expm(rates, sigma)
    counted = exact > SMALLEST
    errors = {name: float(((call() - exact).abs() / exact)[counted].max()) for name, call in comparison.calls.items()}
    speedup = comparison.ratio(DOUBLING, TABLES)
    judged = (count, levels) == (TIMES, LEVELS)
    return comparison.result(
        f"transition matrices at {count} times, {levels} levels, float64",
        {f"{name} / {TABLES}": comparison.ratio(name, TABLES) for name in (DOUBLING, MATRIX_EXP)},
        [comparison.bar("times faster than doubling", speedup, at_least=MIN_SPEEDUP, judged=judged)],
        relative_error=errors,
        tables_seconds=seconds,
        tables_mib=sum(one.numel() for one in [*table.tables, table.powers]) * 8 / 2**20,
    )
