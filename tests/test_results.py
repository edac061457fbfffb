"""Numbers in documents are those of the files that commands wrote. Sentences are not compared."""

import functools
import importlib.util
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m2s.report.blocks import svg_text
from m2s.report.comparison import plot_distances

ROOT = Path(__file__).parent.parent
RESULTS = (ROOT / "RESULTS.md").read_text()
SCALES = (1, 1e3, 1e-3, 1e6, 1e-6, 100, 1e-12)  # units in which a number may be printed: ms, MiB, %, TFLOP/s

# Numbers that are no results: sizes of networks and problems, tolerances, targets, and values computed in the tests below.
SETTINGS = {
    "What was measured": {"3,000", "29.5"},
    "Precision of the loss in float32": {"1e-5", "1e-6", "50,257", "1e-3"},
    "Projection against bisection": {"8,192"},
    "A training step of the paper's text model": {"169,697,920", "28,427,520", "2.6"},
    "Kernels at 50,257 tokens on one H200": {"4,096"},
    "Seven methods on digits, three seeds": {"1,000"},
    "Every method on MNIST, one budget": {"4.56"},
    "A recipe for text: first ablation": {"6.90", "32,768"},
    "The plateau of text and the head": {"29.5"},
    "A recipe for text: Muon": {"6.90"},
    "A recipe for text: learning rates and options": {"0.12", "0.21", "0.19", "0.08", "0.18"},  # tested below
}


def load(path: str) -> Any:
    """A result file, by its path in the repository: JSON, or the text of a profile."""
    text = (ROOT / path).read_text()
    return json.loads(text) if path.endswith(".json") else text


def benchmark(name: str) -> Any:
    return load(f"benchmarks/results/{name}.json")


def experiment(name: str) -> Any:
    return load(f"experiments/results/{name}.json")


def nelbo(row: dict[str, Any]) -> Any:
    """The NELBO of a row. Files of earlier versions call it "bound"."""
    terms = row["nelbo"] if "nelbo" in row else row["bound"]
    return terms["nelbo"] if "nelbo" in terms else terms["bound"]


def sections() -> dict[str, str]:
    """The sections of RESULTS.md by their titles."""
    return dict(re.findall(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", RESULTS, re.M | re.S))


def section(title: str) -> str:
    return sections()[title]


def anchored(anchor: str) -> str:
    """The section of RESULTS.md that an anchor leads to."""
    return next(text for title, text in sections().items() if re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") == anchor)


def summary_rows() -> list[tuple[str, str, str]]:
    """Question, result and anchor of each row of the summary."""
    return re.findall(r"^\| (.*?) \| (.*) \| \[[^]]*\]\(#([^)]*)\) \|$", section("What was measured"), re.M)


def numbers(found: Any) -> Iterator[float]:
    """All numbers of a result, however deep; also those inside strings, such as commands."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            yield from numbers(one)
    elif isinstance(found, str):
        yield from map(float, re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?", found))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield float(found)


def printed(text: str) -> set[str]:
    """Numbers of a page that look like results: with decimals, an exponent or thousands separators."""
    for pattern in (r"^```.*?^```", r"\]\([^)]*\)", r"`[^`]*`", r"\$[^$]*\$"):
        text = re.sub(pattern, " ", text, flags=re.M | re.S)
    return set(re.findall(r"(?<![\w.])(?:\d[\d,]*\.\d+(?:e-?\d+)?|\d{1,3}(?:,\d{3})+|\d+e-\d+)%?", text))


def matches(text: str, value: float) -> bool:
    """Whether a printed number is `value`, rounded to the printed digits."""
    digits, percent = text.rstrip("%").replace(",", ""), text.endswith("%")
    places = len(digits.partition("e")[0].partition(".")[2])
    for scale in (100,) if percent else SCALES:
        scaled = value * scale
        if "e" in digits and scaled and f"{scaled:.{places}e}" == f"{float(digits):.{places}e}":
            return True
        if "e" not in digits and abs(scaled - float(digits)) <= 0.5000001 * 10**-places:
            return True
    return False


def missing(text: str, files: list[Any], allowed: set[str]) -> list[str]:
    known = list(numbers(files))
    return sorted(number for number in printed(text) - allowed if not any(matches(number, value) for value in known))


@pytest.mark.parametrize("title", sections())
def test_every_number_of_a_section_is_in_a_file_that_it_names(title: str) -> None:
    text = section(title)
    files = [load(path) for path in re.findall(r"\(([\w/.-]+\.(?:json|txt))\)", text)]
    derived = [value for name, values in DERIVED.items() if name == title for value in values()]
    assert missing(text, [*files, derived], SETTINGS.get(title, set())) == []


def test_a_number_without_a_file_is_found() -> None:
    assert missing("It took 3.25 ms of 1,234 ms, or 12.5% and 1.2e-07.", [{"a": [3.249, 1234.4], "b": 1.23e-7}], set()) == [
        "12.5%"
    ]
    assert missing("It took 3.25 ms.", [{"a": 3.26}], set()) == ["3.25"]


# ----------------------------------------------------------------------------------------- values computed from several numbers


def direct_form() -> list[float]:
    times, memory = benchmark("loss")["times"], benchmark("loss")["peak_mib"]
    direct, ours = "direct, compiled", "m2s, compiled"
    return [times[direct]["median_ms"] / times[ours]["median_ms"], memory[direct] / memory[ours]]


def tabulated() -> list[float]:
    before = experiment("mnist-tauldr-no-offset")["last_record_of_log.jsonl"]
    since = next(row for row in experiment("mnist")["rows"] if row["method"] == "tauldr")
    return [since["images_per_second"], before["tokens_per_second"] / 784]


GROUPS = {
    "matrix products of the body": r"nvjet_|splitKreduce",
    "matrix products of the last layer": r"$^",  # those among them that are called for each chunk, not for each layer
    "norms and GELU": r"^_(forward|backward)$",
    "attention": r"cudnn",
    "rows of the loss": r"^_bridged$",
    "AdamW, with clipping and EMA": r"^_adamw$",
    "rotary position embeddings": r"^_turn$",
}
LAYERS = 12


def kernel_groups(text: str) -> dict[str, float]:
    """Milliseconds of a training step by kind of kernel, from a profile of three steps."""
    scale = {"us": 1e-3, "ms": 1.0}
    found, counted_twice = dict.fromkeys(GROUPS, 0.0), 0.0
    for cells in (re.split(r"\s{2,}", line.strip()) for line in text.splitlines()):
        if len(cells) > 8 and cells[-1].isdigit():
            ms = float(cells[-3][:-2]) * scale[cells[-3][-2:]] / 3
            group = next((name for name, pattern in GROUPS.items() if re.search(pattern, cells[0])), "")
            if group == "matrix products of the body" and int(cells[-1]) < LAYERS * 3:
                group = "matrix products of the last layer"
            if group:
                found[group] += ms
            counted_twice += ms if cells[0].startswith("aten::") else 0
    total = re.search(r"Self CUDA time total: ([\d.]+)ms", text)
    assert total
    return found | {"several hundred small kernels": float(total.group(1)) / 3 - counted_twice - sum(found.values())}


def profiled() -> list[float]:
    now = kernel_groups(load("benchmarks/results/profile-owt.txt"))
    train = benchmark("steps")["parts"]["train"]
    floor = 16_384 * train["operations_a_token"] / train["matrix_rate"] * 1e3
    return [*now.values(), sum(now.values()), floor]


def seven_methods() -> list[float]:
    rows = {row["method"]: sum(row["bits"]) / len(row["bits"]) for row in experiment("digits")}
    return [*rows.values(), rows["m2s"] - rows["m2s-offset"]]


def validations(method: str) -> list[dict[str, float]]:
    """The validations of a row of 50 epochs on MNIST, seed 1."""
    rows = {(row["method"], row["settings"]["seed"]): row for row in experiment("mnist-50-epochs")["rows"]}
    return rows[method, 1]["validation"]


def mnist_50_epochs() -> list[float]:
    pairs = zip(validations("m2s"), validations("m2s-offset"), strict=True)
    short = {row["method"]: nelbo(row)["value"] for row in experiment("mnist")["rows"]}
    return [*(paper["bits"] - offset["bits"] for paper, offset in pairs), short["m2s"] - short["m2s-offset"]]


def importance() -> list[float]:
    rows = experiment("importance")
    return [rows[0]["variance"] / row["variance"] for row in rows]


def certificates() -> list[float]:
    """Margins without their sign, which is not part of a printed number."""
    return [abs(each["margin"]) for each in experiment("certificates")["certificates"]]


def variance_ratios() -> list[float]:
    """How many times fewer calls the efficient design needs: under masks than `m2s evaluate bpd`, and than plain Monte Carlo
    with few draws of the reconstruction."""
    methods = experiment("variance")["methods"]
    masks = methods["mdlm"]
    designs = ("all", "all, groups of 16")
    few = [rows[name]["ratio"] / rows["reconstruction once in 8"]["ratio"] for rows in methods.values() for name in designs]
    return [masks["all"]["ratio"] / masks["m2s evaluate bpd"]["ratio"], *few]


def text_recipe() -> list[float]:
    rows = {row["row"]: row for row in experiment("text-recipe")["rows"]}
    nats = {name: nelbo(row)["nats"]["value"] for name, row in rows.items()}
    medians = [statistics.median(row["trace"]["grad_norm"]) for row in rows.values()]
    tokens, data = rows["mdlm"]["tokens"], experiment("text-recipe")["data"]
    gaps = [nats["m2s-offset-0.1"] - nats["sedd-0.1"], nats["mdlm"] - nats["mdlm-0.1"]]
    return [*gaps, *medians, tokens, tokens / data["train_tokens"]]


def renovated() -> list[float]:
    found = benchmark("renovation")["contenders"].values()
    return [statistics.fmean(one[key]) for one in found for key in ("before_ms", "after_ms")]


def removed_kernels() -> list[float]:
    """The sums of what the removed kernels save."""
    files = [benchmark(name)["parts"]["ablation"]["saved"] for name in ("ablation", "ablation-mdlm")]
    return [sum(saved[name]["time"] for name in ("gelu", "embedding", "bias_columns", "bf16_weights")) for saved in files]


def text_heads() -> list[float]:
    rows = {row["row"]: row for entry in ("recipe", "heads") for row in experiment(f"text-{entry}")["rows"]}
    nats = {name: nelbo(row)["nats"]["value"] for name, row in rows.items()}
    medians = [statistics.median(row["trace"]["grad_norm"]) for row in rows.values()]
    return [*nats.values(), nats["m2s"] - nats["m2s-0.1"], nats["sedd"] - nats["sedd-0.1"], math.log(50_257), *medians]


def optimizer_pairs() -> dict[str, tuple[float, float]]:
    """NELBO of each method in nats, with AdamW and with Muon."""
    adamw, muon = (
        {row["row"]: nelbo(row)["nats"]["value"] for row in experiment(f"text-{name}")["rows"]}
        for name in ("recipe", "optimizer")
    )
    return {
        name: (adamw.get(f"{name}-0.1", adamw.get(name)), muon[f"{name}-fast"]) for name in ("m2s-offset", "sedd", "mdlm", "ar")
    }


def text_optimizer() -> list[float]:
    rows = {row["row"]: row for row in experiment("text-optimizer")["rows"]}
    before = next(row for row in experiment("text-recipe")["rows"] if row["row"] == "m2s-offset-0.1")
    pairs = optimizer_pairs()
    gaps = [old - new for old, new in pairs.values()]
    speeds = [before["tokens_per_second"], 1 - rows["m2s-offset-fast"]["tokens_per_second"] / before["tokens_per_second"]]
    data = [
        experiment(f"text-{name}")["data"][key]
        for name in ("recipe", "optimizer")
        for key in ("unigram_nats", "validation_windows")
    ]
    return [
        *gaps,
        *(value for pair in pairs.values() for value in pair),
        pairs["sedd"][1] - pairs["m2s-offset"][1],
        *speeds,
        *data,
    ]


RATES = {"1e-3": "{}-fast", "3e-3": "{}-3e-3", "6e-3": "{}-6e-3"}


def text_rates() -> dict[str, dict[str, Any]]:
    """The rows of both tables with Muon, by name. `m2s-offset-3e-3` is the row of the earlier table with that rate."""
    rows = {row["row"]: row for name in ("optimizer", "rates") for row in experiment(f"text-{name}")["rows"]}
    return {**rows, "m2s-offset-3e-3": rows["m2s-offset-fast-lr3e-3"]}


def nats_by_rate() -> dict[str, list[float]]:
    """NELBO of each method in nats by learning rate; NaN where a rate was not run."""
    nats = {name: nelbo(row)["nats"]["value"] for name, row in text_rates().items()}
    return {
        method: [nats.get(name.format(method), math.nan) for name in RATES.values()]
        for method in ("m2s-offset", "mdlm", "sedd", "ar")
    }


def rates_section() -> list[float]:
    rows = text_rates()
    nats = {name: nelbo(row)["nats"]["value"] for name, row in rows.items()}
    before = {
        row["row"]: nelbo(row)["nats"]["value"] for name in ("recipe", "heads") for row in experiment(f"text-{name}")["rows"]
    }
    best = nats["m2s-offset-3e-3"]
    gaps = [abs(nats[name] - best) for name in rows if name.startswith("m2s-offset-3e-3-") or name == "sedd-3e-3"]
    gaps += [nats["mdlm-3e-3-uniform-t"] - nats["mdlm-3e-3"], nats["ar-fast"] - nats["ar-3e-3"]]
    muon, adamw = (rows[name]["tokens_per_second"] for name in ("m2s-offset-6e-3", "m2s-offset-adamw"))
    steps = [1000 * 64 * 512 / speed for speed in (muon, adamw)]
    return [*gaps, before["m2s-offset-0.1"], before["m2s-0.1"], 1 - muon / adamw, *steps, steps[0] - steps[1]]


def script(name: str) -> Any:
    """A program of experiments/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_tables", ROOT / "experiments" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def repair_tables() -> list[str]:
    """The lines of the tables of experiments/repair.py."""
    module, rows = script("repair"), experiment("repair")["rows"]
    tables = (module.format_distances, module.format_parts, module.format_means, module.format_errors)
    return [line for table in tables for line in table(rows)]


def repaired() -> list[float]:
    """Means and errors over seeds."""
    found = [one for line in repair_tables() for one in re.findall(r"(\d+\.\d+(?:e-\d+)?)(%?)", line)]
    return [float(number) / (100 if percent else 1) for number, percent in found]


@functools.cache
def candidate_tables() -> list[str]:
    """The lines of the tables of experiments/candidates.py."""
    module, found = script("candidates"), experiment("candidates")
    tables = [module.format_table(found["summaries"], method, found["time_ratios"]) for method in module.ROWS]
    return [line for table in [*tables, module.format_variance(found["variance_ratios"])] for line in table]


def last_gaps(name: str) -> list[float]:
    """Differences of the runs of a candidate to those of the baseline at the end, with `m2s-offset`."""
    rows = [row for row in experiment("candidates")["rows"] if row["method"] == "m2s-offset"]
    nats = {(row["candidate"], row["seed"]): row["trace"]["nats"][-1] for row in rows}
    return [nats[name, seed] - nats["owt-fast", seed] for seed in (1, 2, 3)]


def candidates() -> list[float]:
    """Differences without their sign, which is not part of a printed number, and the gain of QK-norm on text."""
    found = [abs(float(one)) for line in candidate_tables() for one in re.findall(r"-?\d+\.\d+", line)]
    text = text_rates()
    on_text = [nelbo(text[f"m2s-offset-3e-3{suffix}"])["nats"]["value"] for suffix in ("", "-qk-norm")]
    return [*found, *map(abs, last_gaps("bias-control")), on_text[0] - on_text[1]]


def summarized() -> list[float]:
    """The numbers of the sections that the summary links. Each of them is compared with its own files."""
    linked = [anchored(anchor) for _, _, anchor in summary_rows()]
    return [float(number.rstrip("%").replace(",", "")) for text in linked for number in printed(text)]


def projected_steps() -> list[float]:
    """How many times as fast the best fused step is as the best step of the reference."""
    steps = benchmark("analytic")["parts"]["sample-projected"]["contenders"]
    return [steps["m2s.sample, reference"]["best_ms"] / steps["m2s.sample, fused"]["best_ms"]]


DERIVED = {
    "Sampling steps of scores at 50,257 tokens": projected_steps,
    "What was measured": summarized,
    "When projection helps": repaired,
    "Candidates on a CPU": candidates,
    "A recipe for text: learning rates and options": rates_section,
    "A recipe for text: Muon": text_optimizer,
    "Speed before and after the renovation": renovated,
    "Auxiliary kernels, one at a time": removed_kernels,
    "The plateau of text and the head": text_heads,
    "Score entropy against the direct form": direct_form,
    "Transition matrices of a tabulated process": tabulated,
    "Kernels at 50,257 tokens on one H200": profiled,
    "Seven methods on digits, three seeds": seven_methods,
    "MNIST at 50 epochs": mnist_50_epochs,
    "Sampling times by importance": importance,
    "A recipe for text: first ablation": text_recipe,
    "The variance of the NELBO per network call": variance_ratios,
    "Which estimators of the likelihood are upper bounds": certificates,
}


# --------------------------------------------------------------------------------------------------------------- rows of tables


def has_rows(page: str, *rows: str) -> None:
    """Each table row is on the page; pytest would take minutes to show the difference to the page itself."""
    assert [row for row in rows if row not in page] == []


def test_the_summary_has_the_numbers_of_the_sections_that_it_links() -> None:
    assert len(summary_rows()) == section("What was measured").count("\n| ") - 1  # without the header; the rule begins with |-
    for question, result, anchor in summary_rows():
        assert printed(question + result) <= printed(anchored(anchor)) | SETTINGS["What was measured"], question
    best = min(experiment("mnist")["rows"], key=lambda row: row["samples"][-1]["fid"])
    assert best["method"] == "m2s-gaussian" and best["samples"][-1]["steps"] == 100
    found = experiment("certificates")["certificates"]
    names = dict.fromkeys(each["estimator"] for each in found)
    bounds = [name for name in names if all(each["passed"] for each in found if each["estimator"] == name)]
    result = next(result for _, result, anchor in summary_rows() if anchor.startswith("which-estimators"))
    assert len(names) == 14 and result == f"Five of fourteen in every world: {', '.join(f'`{name}`' for name in bounds)}"


def test_rows_of_the_digits_tables() -> None:
    for row in experiment("digits"):
        found, mean = " ".join(f"{bits:.3f}" for bits in row["bits"]), sum(row["bits"]) / len(row["bits"])
        has_rows(RESULTS, f"| `{row['method']}` | {row['limit']:.2f} | {found} | {mean:.3f} |")
        assert max(row["bits"]) < row["limit"]
    for row in experiment("methods")["rows"]:
        bits = f"{row['bits']:.4f}" + ("" if row["error"] is None else f" ± {row['error']:.4f}")
        has_rows(RESULTS, f"| `{row['method']}` | {bits} | {row['distance']:.3f} | {row['samples_per_second']:.1f} |")


def test_rows_of_the_certificates_table() -> None:
    """Estimators that lack nothing pass everywhere, and the others fail where bounds are tight."""
    found = experiment("certificates")["certificates"]
    for name in dict.fromkeys(each["estimator"] for each in found):
        rows = [each for each in found if each["estimator"] == name]
        passed = sum(each["passed"] for each in rows)
        kraft, margin = max(each["kraft"] for each in rows), min(each["margin"] for each in rows)
        page = section("Which estimators of the likelihood are upper bounds")
        has_rows(page, f"| `{name}` | {passed} of {len(rows)} | {kraft:.6f} | {margin:.6f} |")
    for each in found:
        assert each["passed"] or each["missing"]
        assert not (each["passed"] and each["missing"] and each["world"].endswith("exact network"))


def test_rows_of_the_variance_table() -> None:
    page, methods = section("The variance of the NELBO per network call"), experiment("variance")["methods"]
    names = list(methods)
    for design in methods[names[0]]:
        cells = []
        for name in names:
            row = methods[name][design]
            interval = f" ({row['low']:.2f} to {row['high']:.2f})" if "low" in row else ""
            cells.append(f"{row['ratio']:.2f}{interval}")
        has_rows(page, f"| {design} | {' | '.join(cells)} |")


def test_rows_of_the_table_of_estimators() -> None:
    page = section("What published estimators drop on trained networks")
    for network, rows in experiment("variance")["estimators"].items():
        for name, row in rows.items():
            bound = f"no: lacks {', '.join(row['missing'])}" if row["missing"] else "yes"
            numbers = f"{row['nats']:.2f} | {row['drop']:.2f} ± {row['drop_error']:.2f} | {row['variance_times_calls']:,.0f}"
            has_rows(page, f"| `{network}` | `{name}` | {bound} | {numbers} |")


def test_rows_of_the_mnist_table() -> None:
    from m2s.methods import METHODS  # here, so that the other tests do not import torch

    page, rows = section("Every method on MNIST, one budget"), experiment("mnist")["rows"]
    assert [row["method"] for row in rows] == [name for name in METHODS if name != "m2s-hybrid"]  # that one is gidd
    for row in rows:
        bits, distances = nelbo(row), [f"{each['fid']:.2f}" for each in row["samples"]]
        if len(distances) == 1:
            distances = ["-", "-", f"{distances[0]} ({row['samples'][0]['steps']} steps)"]
        speed = f"{row['images_per_second']:,.0f} | {row['peak_gib']:.1f} | {row['samples'][-1]['samples_per_second']:,.1f}"
        line = f"{bits['value']:.4f} ± {bits['rows_error']:.4f} | {' | '.join(distances)} | {speed} | {row['sampler']}"
        has_rows(page, f"| `{row['method']}` | {line} |")


def test_rows_of_the_50_epochs_table() -> None:
    page = section("MNIST at 50 epochs")
    pairs = list(zip(validations("m2s"), validations("m2s-offset"), strict=True))
    for paper, offset in pairs:
        assert paper["step"] == offset["step"] and paper["bits"] > offset["bits"]  # "higher at all 20 validations"
        bits = f"{paper['bits']:.4f} | {offset['bits']:.4f} | {paper['bits'] - offset['bits']:.4f}"
        terms = f"{paper['reconstruction']:.4f} | {offset['reconstruction']:.4f}"
        has_rows(page, f"| {paper['step']:,} | {bits} | {terms} |")
    assert len(pairs) == 20 and pairs[-1][0]["step"] == 11_700
    # "`m2s-offset` passes that value between steps 3,510 and 4,095"
    passed = [offset["step"] for _, offset in pairs if offset["bits"] < pairs[-1][0]["bits"]]
    assert passed[0] == 4095
    assert all(
        "error" in row and "nelbo" not in row for row in experiment("mnist-50-epochs")["rows"]
    )  # "Both rows are incomplete"


TEXT = {
    "text-recipe": "A recipe for text: first ablation",
    "text-heads": "The plateau of text and the head",
    "text-optimizer": "A recipe for text: Muon",
    "text-rates": "A recipe for text: learning rates and options",
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


def test_rows_of_the_tables_of_projection() -> None:
    page, rows = section("When projection helps"), experiment("repair")["rows"]
    has_rows(page, *repair_tables())
    for row in rows:
        for errors in row["score_errors"]:  # "the lower score entropy at every time"
            assert errors["score_entropy"]["projected"] < errors["score_entropy"]["as it is"]
        for steps in row["steps"][:2]:  # "After 600 steps it removes"
            assert row["state"] == 200 or steps["differences"]["projected - as it is"]["value"] < 0
    means = [one for row in rows for one in row["mean_scores"]]
    assert max(one["as it is"] - one["projected"] for one in means if one["t"] >= 0.3) < 0.03
    assert max(one["projected"] - one["as it is"] for one in means) < 0  # "Projection lowers the mean score"


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


SEDD = "score (SEDD), fused"
LABELS = {f"free {SEDD}": f"unconstrained {SEDD}"}  # files of older versions have the first name


@pytest.mark.parametrize(("name", "wanted"), [("fid-mnist", 4.56), ("fid-cifar10", 3.15)])
def test_fid_of_data_against_data(name: str, wanted: float) -> None:
    assert round(experiment(name)["fid"], 2) == wanted


# -------------------------------------------------------------------------------------------------------------- pages of docs


@functools.cache
def all_results() -> list[float]:
    """The numbers of every result file."""
    paths = [path for folder in ("benchmarks", "experiments") for path in sorted((ROOT / folder / "results").iterdir())]
    files = [load(str(path.relative_to(ROOT))) for path in paths if path.suffix in (".json", ".txt")]
    files.append(load("docs/demo.json"))
    return [*numbers(files), *(value for values in DERIVED.values() for value in values())]


# Numbers of the pages that are settings of networks and problems, dates of papers or hyperparameters of others.
PAGES = {
    "README.md": {"2605.22765"},
    "docs/kernels.md": {"32,768", "4.2"},
    "docs/training.md": {"161,800", "28,427,520", "125,000"},  # the paper's steps and parameters
    "docs/many-gpus.md": {"131.2", "161,800", "460,400"},
    "docs/faq.md": {"16.6", "50,000"},  # the largest Gumbel number of float32; a tail of tokens
    "docs/comparing.md": {"50,000"},  # samples of another protocol
    "docs/samplers.md": set(),
    "docs/evaluation.md": set(),
}


def test_table_of_the_papers_head() -> None:
    page = (ROOT / "docs/training.md").read_text()
    digits = {row["method"]: statistics.fmean(row["bits"]) for row in experiment("digits")}
    mnist = {row["method"]: row for row in experiment("mnist")["rows"]}
    text = {row["row"]: row["nelbo"]["bound"]["nats"]["value"] for row in experiment("text-recipe")["rows"]}
    text |= {row["row"]: row["nelbo"]["bound"]["nats"]["value"] for row in experiment("text-heads")["rows"]}
    bits = {name: row["bound"]["bound"]["value"] for name, row in mnist.items()}
    long = {name: validations(name)[-1]["bits"] for name in ("m2s", "m2s-offset")}
    fast = {name: nelbo(text_rates()[f"{name}-3e-3"])["nats"]["value"] for name in ("m2s", "m2s-offset")}
    for values in (digits, bits, long, text, fast):
        assert values["m2s"] > values["m2s-offset"]  # "has not caught up"
        has_rows(page, f"| {values['m2s']:.3f} | {values['m2s-offset']:.3f} |")
    paper, offset = (f"{mnist[name]['samples'][-1]['fid']:.2f}" for name in ("m2s", "m2s-offset"))
    assert f"{paper} for `m2s` and {offset} for `m2s-offset`" in page
    assert [row["samples"][-1]["steps"] for row in mnist.values() if row["method"].startswith("m2s")] == [100] * 3


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_the_docs_are_in_result_files(page: str) -> None:
    """460,400 is the rounded speed of the table of the text model, and 131.2 billion tokens are 161,800 steps."""
    text = (ROOT / page).read_text()
    known = all_results()
    assert [number for number in sorted(printed(text) - PAGES[page]) if not any(matches(number, one) for one in known)] == []


def test_distances_of_the_readme_are_those_of_the_demo() -> None:
    """The sentence below the plot, the plot itself, and the command are those of docs/demo.json."""
    text, result = (ROOT / "README.md").read_text(), load("docs/demo.json")
    rows = {row["steps"]: row["distances"] for row in result["steps"]}
    few = [f"{rows[8][name]['value']:.3f}" for name in ("m2s-offset", "m2s", "sedd", "sedd-repaired")]
    few.append(f"{result['reference']['real']['distance']['value']:.3f}")
    many = [f"{rows[32][name]['value']:.3f}" for name in ("sedd-repaired", "sedd")]
    number = r"([\d.]+\d)"
    sentence = rf"it is {number} for M2S with .*?, {number} for M2S as .*?, {number} for SEDD, and {number} for.*?have {number}"
    found = re.search(rf"{sentence}.*?hurts, {number}\s+against {number},", text, re.S)
    assert found is not None and list(found.groups()) == [*few, *many]
    home = (ROOT / "docs" / "index.md").read_text()
    assert f"the distance is {few[0]} for M2S with the exact offset and {few[2]} for SEDD. Real\nimages have {few[4]}." in home
    assert result["projection"]["parts"]["differences"]["lowered - as it is"]["low"] > 0
    assert " ".join(result["command"]) in text
    for dark, name in ((False, "docs/demo.svg"), (True, "docs/demo-dark.svg")):
        assert colors(svg_text(plot_distances(result), dark)) == colors((ROOT / name).read_text())


def colors(drawing: str) -> list[str]:
    """The colors of a drawing, which do not depend on the fonts of a machine."""
    return sorted(set(re.findall(r"#[0-9a-f]{6}", drawing.lower())))
