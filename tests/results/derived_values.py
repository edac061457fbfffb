"""Values of RESULTS.md that follow from several numbers of its files: differences, ratios, means."""

import functools
import math
import re
import statistics
from typing import Any

from result_files import (
    anchored,
    benchmark,
    experiment,
    load,
    nelbo,
    percentages,
    printed,
    script,
    summary_rows,
)


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
    found = {number for text in linked for number in printed(text)}
    return [float(each.rstrip("%").replace(",", "")) / (100 if each.endswith("%") else 1) for each in found]


def projected_steps() -> list[float]:
    """How many times as fast the best fused step is as the best step of the reference."""
    steps = benchmark("analytic")["parts"]["sample-projected"]["contenders"]
    return [steps["m2s.sample, reference"]["best_ms"] / steps["m2s.sample, fused"]["best_ms"]]


def text_methods() -> list[float]:
    printed_audit = load("experiments/results/text-audit-sedd-printed.txt")
    outside, material, boundary, *others = percentages(printed_audit)
    return [outside, material, boundary, *others, material + boundary]


def fused_losses() -> list[float]:
    """Ratios to the floor, of the training steps, and the milliseconds of the rows of `ar`."""
    losses = benchmark("fused-losses")["parts"]["loss"]["contenders"]
    times = {name: each["median_ms"] for name, each in losses.items()}
    steps = benchmark("train-neural-ctmc")["parts"]["train"]["contenders"]
    ratio = steps["kernels reference"]["median_ms"] / steps["kernels fused"]["median_ms"]
    rows = times["next token (AR), fused"] - times["three GEMMs in chunks, float32 logits"]
    return [ratio, rows, *(each / times["three GEMMs (floor)"] for each in times.values())]


DERIVED = {
    "Text methods, six minutes each": text_methods,
    "The fused loss of every head": fused_losses,
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
