"""Kernels expm(sigma Q) of a batch of times, each another: by tables, by doubling a short step, by torch.linalg.matrix_exp.

The rates are those of `--method tauldr` between 256 levels, the times those of a batch of training. Errors are the greatest of
any entry, relative to it, against doubling, which `tests/conversions/test_identities.py` holds to 80 digits; entries below 1e-290 do not
count. matrix_exp is accurate in the large entries alone. Tables are held to three times the speed of doubling.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import common

from m2s.process.expm import expm
from m2s.process.expm_table import ExpmTable
from m2s.training.build import make_process
from m2s.training.config import ProcessConfig

LEAST = 3.0


def main() -> int:
    parser = common.parser(__doc__ or "")
    parser.set_defaults(rows=64, vocab=256, repeats=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    process = make_process(ProcessConfig(kind="gaussian", schedule="geometric"), options.vocab)
    rates = process.generator.to(device)
    t = torch.rand(options.rows, dtype=torch.float64, generator=torch.Generator().manual_seed(options.seed))
    sigma = process.schedule.sigma(t).to(device)

    def settled(found: Tensor) -> Tensor:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return found

    start = time.perf_counter()
    ladder = ExpmTable.of(rates)
    assert ladder is not None
    settled(rates)
    built = time.perf_counter() - start
    calls = {
        "tables": lambda: settled(ladder(sigma)),
        "doubling": lambda: settled(expm(rates, sigma)),
        "matrix_exp": lambda: settled(torch.linalg.matrix_exp(sigma[:, None, None] * rates)),
    }
    exact = calls["doubling"]()
    counted = exact > 1e-290
    errors = {name: float(((call() - exact).abs() / exact)[counted].max()) for name, call in calls.items()}
    times = common.take_turns(calls, options.repeats)
    common.table(
        ["", "median ms", "greatest relative error"],
        [[name, f"{times[name]['median_ms']:.1f}", f"{errors[name]:.1e}"] for name in calls],
    )
    faster = {name: one["median_ms"] / times["tables"]["median_ms"] for name, one in times.items()}
    size = sum(table.numel() for table in [*ladder.tables, ladder.powers]) * 8 / 2**20
    what = f"{options.rows} times, {options.vocab} levels, float64, {device.type}"
    print(f"{what}; tables made in {built:.1f} s, {size:.0f} MiB")
    found = {"what": what, "times": times, "relative_error": errors, "tables_times_faster_than": faster}
    common.save("ladder", options, {**found, "tables_seconds": built, "tables_mib": size})
    return common.verdict([("times faster than doubling", faster["doubling"], LEAST)])


if __name__ == "__main__":
    sys.exit(main())
