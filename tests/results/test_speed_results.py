"""The tables of speed are those of their files."""

import statistics

import pytest
from result_files import RESULTS, benchmark, has_rows, section

SEDD = "score (SEDD), fused"


LABELS = {f"free {SEDD}": f"unconstrained {SEDD}"}  # files of older versions have the first name


def test_rows_of_the_ablation_table() -> None:
    from m2s.benchmark.ablation import REPLACEMENTS, SMALL  # here, so that the other tests do not import torch

    page = section("Auxiliary kernels, one at a time")
    parts = [benchmark(name)["parts"]["ablation"]["saved"] for name in ("ablation", "ablation-mdlm")]
    for operation in parts[0]:
        if operation.startswith("nothing") or operation == "all below":
            continue
        cells = [f"{saved[operation]['time']:.1%} ± {saved[operation]['error']:.1%}" for saved in parts]
        times = [f"{saved[operation]['milliseconds']:.2f}" for saved in parts]
        memory = round(parts[0][operation]["memory_gib"], 2) + 0.0  # 0.0 instead of -0.0
        verdict = "stays" if max(saved[operation]["time"] for saved in parts) >= SMALL else "removed"
        assert (verdict == "stays") == (operation in REPLACEMENTS), operation
        has_rows(page, f"| {cells[0]} | {times[0]} | {cells[1]} | {times[1]} | {memory:.2f} | {verdict} |")


def test_rows_of_the_renovation_table() -> None:
    page = section("Speed before and after the renovation")
    for name, found in benchmark("renovation")["contenders"].items():
        before, after = (statistics.fmean(found[key]) for key in ("before_ms", "after_ms"))
        has_rows(page, f"| {name} | {before:.2f} | {after:.2f} | {found['ratio']:.3f} | {found['spread']:.1%} |")


@pytest.mark.parametrize("name", ["kernels", "kernels-projection", "steps"])
def test_rows_of_the_kernel_tables(name: str) -> None:
    for kind, part in benchmark(name)["parts"].items():
        if name == "kernels" and kind in ("projection", "audit"):  # measured again
            continue
        for contender, one in part["contenders"].items():
            more = f"{one['median_ms']:.1f} | {one['tokens_per_second']:,.0f}" if "mfu" in one else f"{one['median_ms']:.2f}"
            has_rows(RESULTS, f"| {LABELS.get(contender, contender)} | {more} |")
        for bar in part["bars"]:
            has_rows(RESULTS, f"| {bar['measured']:.3g} | {'met' if bar['met'] else '**missed**'} |")
