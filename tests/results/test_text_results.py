"""The tables of text are those of their files."""

import math
import re
import statistics

import pytest
from derived_values import RATES, candidate_tables, nats_by_rate, optimizer_pairs, text_rates
from result_files import experiment, has_rows, load, nelbo, script, section

TEXT = {
    "text-recipe": "A recipe for text: first ablation",
    "text-heads": "The plateau of text and the head",
    "text-optimizer": "A recipe for text: Muon",
    "text-rates": "A recipe for text: learning rates and options",
    "text-methods": "Text methods, six minutes each",
}


@pytest.mark.parametrize("name", TEXT)
def test_rows_of_the_text_tables(name: str) -> None:
    page = section(TEXT[name])
    for row in experiment(name)["rows"]:
        nats, bits, trace = nelbo(row)["nats"], nelbo(row)["bits_per_byte"]["value"], row["trace"]
        way = " | ".join(f"{point['nats']:.3f}" for point in row["validation"][:-1])
        norms = f"{statistics.median(trace['grad_norm']):,.0f} | {max(trace['grad_norm_max']):,.0f}"
        speed = f"{row['tokens_per_second']:,.0f} | {row['seconds']['train']:.0f}"
        has_rows(
            page,
            f"| `{row['row']}` | {nats['value']:.3f} ± {nats['rows_error']:.3f} | {bits:.3f} | {way} | {norms} | {speed} |",
        )


def test_the_classes_of_the_printed_audit() -> None:
    page, printed_audit = section(TEXT["text-methods"]), load("experiments/results/text-audit-sedd-printed.txt")
    beginnings = {
        "a score outside its box": r"outside C ",
        "in the box, no posterior, a signed posterior below -1e-6": r"in C, not in P, material ",
        "in the box, no posterior, all of it above -1e-6": r"in C, not in P, boundary ",
        "has a posterior": r"in P ",
    }
    for name, beginning in beginnings.items():
        share = re.search(rf"^{beginning}.*? (\d+\.\d+%)", printed_audit, re.M)
        assert share
        has_rows(page, f"| {name} | {share[1]} |")


def test_muon_against_adamw() -> None:
    page = section("A recipe for text: Muon")
    for name, (old, new) in optimizer_pairs().items():
        assert new < old  # "Every method improves"
        has_rows(page, f"| `{name}` | {old:.3f} | {new:.3f} | {old - new:.3f} |")
    fast = next(row for row in experiment("text-optimizer")["rows"] if row["row"] == "m2s-offset-fast-lr3e-3")
    assert [point["nats"] < 6.90 for point in fast["validation"][:2]] == [False, True]  # "below it at 9.8 M"


def test_learning_rates_of_the_fast_recipe() -> None:
    from m2s.presets import PRESETS  # here, so that the other tests do not import torch

    page, rows, table = section(TEXT["text-rates"]), text_rates(), nats_by_rate()
    for method, values in table.items():
        cells = ["-" if math.isnan(value) else f"{value:.3f}" for value in values]
        has_rows(page, f"| `{method}` | {' | '.join(cells)} |")
    complete = [values for values in table.values() if not any(map(math.isnan, values))]
    assert len(complete) == 3 and all(min(values) == values[1] for values in complete)  # "3e-3 is the best of the three"
    assert PRESETS["owt-fast"].optimizer.lr == 3e-3
    for other, limits in ((0, ("0.12", "0.21")), (2, ("0.12", "0.19"))):
        gaps = [values[other] - values[1] for values in complete]
        assert (f"{min(gaps):.2f}", f"{max(gaps):.2f}") == limits and all(gap in page for gap in limits)
    for method in ("m2s-offset", "mdlm", "sedd"):  # "at 9.8 M tokens all three methods are best at 6e-3"
        slow, middle, fast = (rows[name.format(method)]["validation"][1]["nats"] for name in RATES.values())
        assert fast < min(slow, middle)
    close = [nelbo(rows[f"{method}-3e-3"])["nats"]["value"] for method in ("md4", "mdlm", "gidd", "m2s-offset")]
    assert close == sorted(close) and f"{close[-1] - close[0]:.2f}" == "0.08"
    loss = dict(zip(rows["ar-3e-3"]["trace"]["tokens"], rows["ar-3e-3"]["trace"]["loss"], strict=True))
    epoch = 2 * experiment("text-rates")["data"]["train_tokens"]  # "where the third epoch begins"
    around = [loss[32_768 * step] for step in (725, 800)]
    assert 32_768 * 725 < epoch < 32_768 * 800 and all(f"{value:.3f}" in page for value in around)
    for row in experiment("text-rates")["rows"]:  # "in every other row by less than 0.18"
        other = dict(zip(row["trace"]["tokens"], row["trace"]["loss"], strict=True))
        assert row["row"] == "ar-3e-3" or other[32_768 * 725] - other[32_768 * 800] < 0.18
    slower = 1 - rows["m2s-offset-3e-3-qk-norm"]["tokens_per_second"] / rows["m2s-offset-6e-3"]["tokens_per_second"]
    assert f"{slower:.0%}" == "3%"


def test_rows_of_the_plateau() -> None:
    page, found = section("The plateau on a CPU"), experiment("plateau")
    tokens: dict[str, list[float]] = {}
    for row in found["rows"]:
        tokens.setdefault(row["recipe"], []).append(row["tokens_to_leave"])
    for recipe, values in tokens.items():
        cells = [f"{value:,.0f}" for value in (*values, statistics.median(values))]
        has_rows(page, f"| `{recipe}` | {' | '.join(cells)} |")
    ratio = statistics.median(tokens["owt"]) / statistics.median(tokens["owt-fast"])
    assert ratio >= 2 and f"needs {ratio:.2f} times as many tokens" in page
    assert max(tokens["owt-fast"]) < min(tokens["owt"])  # "leaves before the fastest of `owt`"


def test_rows_of_the_candidates() -> None:
    module, page, found = script("candidates"), section("Candidates on a CPU"), experiment("candidates")
    has_rows(page, *candidate_tables())
    assert module.summarize(found["rows"]) == found["summaries"]
    assert module.summarize_variance(found["variance_rows"]) == found["variance_ratios"]
    assert module.time_ratios(found["cost"]) == found["time_ratios"]
    plateau = {row["seed"]: row["trace"] for row in experiment("plateau")["rows"] if row["recipe"] == module.BASELINE}
    for row in found["rows"]:  # "the runs of `owt-fast` from there"
        if (row["method"], row["candidate"]) == ("m2s-offset", module.BASELINE):
            assert row["trace"]["nats"] == pytest.approx(plateau[row["seed"]]["nats"], rel=1e-6)
    points = {(one["method"], one["candidate"]): one["points"] for one in found["summaries"]}
    assert [key[1] for key, values in points.items() if all(point["wins"] for point in values)] == ["batch-schedule"]
    worse = [
        name
        for (_, name), (first, *_) in points.items()
        if first["difference"] > 2 * max(first["error"], first["pooled_error"])
    ]
    assert {"loss-clip", "no-clip", "repeat-4", "uniform-t"} < {*worse}  # "worse by more than two errors" at the first point
    variances = next(row["variance"]["owt-fast"] for row in found["variance_rows"] if row["network"] == "owt-fast")
    assert sum(variances["bias"]) < 0.002 * sum(variances["all"])  # "less than two thousandths"
