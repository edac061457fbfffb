"""The numbers of RESULTS.md, and of the docs where they repeat one, are those of the files that commands wrote."""

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS, TRAINING, KERNELS, METHODS = (
    (ROOT / name).read_text() for name in ("RESULTS.md", "docs/training.md", "docs/kernels.md", "docs/methods.md")
)
GROUPS = {
    "products of the body": r"nvjet_|splitKreduce",
    "products of the last layer": r"$^",  # those among them that are called for each chunk, not for each layer
    "norms and gelu": r"^_(forward|backward)$",
    "attention": r"cudnn",
    "rows of the loss": r"^_bridged$",
    "AdamW, with clipping and average": r"^_adamw$",
    "rotary positions": r"^_turn$",
}
LAYERS, AGAINST = 12, "kernels reference / kernels fused"


def benchmark(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def experiment(name: str) -> Any:
    return json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())


def profile(name: str) -> str:
    return (ROOT / "benchmarks" / "results" / f"{name}.txt").read_text()


def says(page: str, *texts: str) -> None:
    """Each text stands on the page, wherever its lines break; pytest would take minutes to compare with the page itself."""
    flat = " ".join(page.split())
    assert [text for text in texts if " ".join(text.split()) not in flat] == []


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", RESULTS, re.MULTILINE | re.DOTALL)
    return found


def numbers(found: Any) -> Iterator[float]:
    """All that a file holds, however deep."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            yield from numbers(one)
    elif isinstance(found, int | float):
        yield found


def shares(text: str) -> dict[str, float]:
    """Milliseconds of an update by kind of kernel, of a profile of three."""
    scale = {"us": 1e-3, "ms": 1.0}
    found, counted_twice = dict.fromkeys(GROUPS, 0.0), 0.0
    for cells in (re.split(r"\s{2,}", line.strip()) for line in text.splitlines()):
        if len(cells) > 8 and cells[-1].isdigit():
            ms = float(cells[-3][:-2]) * scale[cells[-3][-2:]] / 3
            group = next((name for name, pattern in GROUPS.items() if re.search(pattern, cells[0])), "")
            if group == "products of the body" and int(cells[-1]) < LAYERS * 3:
                group = "products of the last layer"
            if group:
                found[group] += ms
            counted_twice += ms if cells[0].startswith("aten::") else 0
    whole = re.search(r"Self CUDA time total: ([\d.]+)ms", text)
    assert whole
    return found | {"several hundred small kernels": float(whole.group(1)) / 3 - counted_twice - sum(found.values())}


def test_a_section_is_found_and_a_missing_number_is_missed() -> None:
    assert "experiments/results/mnist.json" in section("Every method on MNIST, one budget")
    with pytest.raises(AssertionError):
        says(RESULTS, "no such text")
    assert sorted(numbers({"a": [1, {"b": 2.5}], "c": "3", "d": None})) == [1, 2.5]


def test_score_entropy_against_the_direct_form() -> None:
    loss = benchmark("loss")
    for form, times in loss["times"].items():
        says(RESULTS, f"| {times['median_ms']:.1f} | {times['best_ms']:.1f} | {loss['peak_mib'][form]:.0f} |")
    faster, less = loss["times_faster"], loss["times_less_memory"]["m2s"]
    says(RESULTS, f"{faster['m2s, compiled']:.1f} times compiled, {faster['m2s']:.1f} times eager")
    says(RESULTS, f"Memory: {less:.1f} times less", f"`{loss['command']}`")


def test_projection_against_bisection() -> None:
    projection = benchmark("projection")
    for mean in projection["mean_best_ms"].values():
        says(RESULTS, f"| {mean:.1f} |")
    says(RESULTS, f"`{projection['command']}`")


def test_a_step_of_the_sampler() -> None:
    sampler = benchmark("sampler")
    for form, times in sampler["times"].items():
        says(RESULTS, f"| {times['median_ms']:.0f} | {times['best_ms']:.0f} | {sampler['peak_mib'][form]:.0f} |")
    faster, less = sampler["times_faster"]["m2s"], sampler["times_less_memory"]["m2s"]
    says(RESULTS, f"{faster:.0f} times as fast and takes {less:.0f} times less memory", f"`{sampler['command']}`")


def test_kernels_of_a_tabulated_process() -> None:
    ladder = benchmark("ladder")
    for name, one in ladder["times"].items():
        error = "-" if name == "doubling" else f"{ladder['relative_error'][name]:.1e}"
        says(RESULTS, f"| {one['median_ms']:,.0f} | {error} |")
    faster = ladder["tables_times_faster_than"]
    says(
        RESULTS, f"{faster['doubling']:.1f} times as fast as doubling and {faster['matrix_exp']:.1f} times as fast as PyTorch's"
    )
    before = experiment("mnist-tauldr-no-offset")["last_record_of_log.jsonl"]
    since = next(row for row in experiment("mnist")["rows"] if row["method"] == "tauldr")
    says(RESULTS, f"trains on {since['images_per_second']:,.0f} images", f"went at {before['tokens_per_second'] / 784:,.0f}")


def test_an_update_of_the_text_model() -> None:
    update = benchmark("train-owt")
    speed, memory, share = update["tokens_per_second"], update["peak_gib"], update["mfu"]
    for form, ms in update["median_ms"].items():
        says(RESULTS, f"| {ms:.1f} | {speed[form]:,.0f} | {memory[form]:.1f} | {share[form]:.1%} |")
    says(RESULTS, f"{update['times_faster']:.1f} times the speed", f"at {update['times_less_memory']:.1f} times less memory")
    says(RESULTS, f"`{update['command']}`", f"the {update['matrix_rate'] / 1e12:.0f} Tflop/s")
    hours = 161_800 * 1584 * 512 / speed["m2s"] / 3600
    says(TRAINING, f"the {round(speed['m2s'], -2):,.0f} tokens per second", f"{hours:.0f} GPU-hours", f"{hours / 24:.1f} hours")
    images = benchmark("train-cifar10")
    for form, ms in images["median_ms"].items():
        says(RESULTS, f"| {ms:.1f} | {images['rows_per_second'][form]:.0f} | {images['peak_gib'][form]:.1f} |")
    says(RESULTS, f"`{images['command']}`")


@pytest.mark.parametrize("name", ["kernels", "kernels-projection", "steps"])
def test_kernels_against_their_bars(name: str) -> None:
    found = benchmark(name)
    says(RESULTS, f"`{' '.join(found['command'])}`")
    for kind, part in found["parts"].items():
        if name == "kernels" and kind in ("projection", "audit"):  # measured again
            continue
        for contender, one in part["contenders"].items():
            more = f"{one['median_ms']:.1f} | {one['tokens_per_second']:,.0f}" if "mfu" in one else f"{one['median_ms']:.2f}"
            says(RESULTS, f"| {contender} | {more} |")
        for bar in part["bars"]:
            says(RESULTS, f"| {bar['measured']:.3g} | {'met' if bar['met'] else '**missed**'} |")


def test_what_the_kernels_were_found_to_take() -> None:
    loss, drawn = benchmark("kernels")["parts"]["loss"], benchmark("kernels")["parts"]["draw"]["contenders"]
    floor, fused = (loss["contenders"][name]["median_ms"] for name in ("three GEMMs (floor)", "m2s, fused"))
    says(KERNELS, f"{fused:.2f} ms: {loss['bars'][0]['measured']:.2f} times", f"a floor that was {floor:.2f}")
    says(KERNELS, f"found {drawn['bayes, fused']['median_ms']:.2f} ms with it")
    chunked = loss["ratios"]["three GEMMs in chunks, float32 logits / floor"]
    says(RESULTS, f"make {chunked:.2f} of the {loss['bars'][0]['measured']:.2f}")
    circles = benchmark("kernels")["parts"]["projection"]["contenders"]["m2s, reference"]["median_ms"]
    says(RESULTS, f"The reference of the projection took {circles:.1f} ms")
    again = benchmark("kernels-projection")["parts"]
    project, audit = (again[name]["contenders"]["m2s, fused"] for name in ("projection", "audit"))
    says(KERNELS, f"{project['median_ms']:.2f} ms, best {project['best_ms']:.2f}", f"found {audit['median_ms']:.2f} ms for all")


def test_versions_of_the_kernels_before() -> None:
    first, second = (benchmark(f"kernels-{name}")["parts"] for name in ("first", "second"))
    loss, project = (first[name]["contenders"]["m2s, fused"]["median_ms"] for name in ("loss", "projection"))
    says(KERNELS, f"loss {loss:.1f} ms in all", f"| {project:.2f} ms |")
    fused, floor = (second["loss"]["contenders"][name]["median_ms"] for name in ("m2s, fused", "three GEMMs (floor)"))
    says(KERNELS, f"{fused:.2f} ms: {fused / floor:.2f} times a floor of {floor:.2f}")
    whole, one, copy = (f"{ms:.3f}" for ms in benchmark("rows")["median_ms"].values())
    says(RESULTS, f"takes {whole} ms for a chunk", f"in the cache, {one} ms", f"must move takes {copy} ms")
    says(KERNELS, f"it takes {one} ms a chunk instead of {whole}")


def test_instructions_of_the_kernels() -> None:
    for name in ("posterior_entropy", "masked_ce", "score_entropy"):
        one = benchmark("resources")["kernels"][f"{name}, no mask"]
        most = max(loop["columns"] for loop in one["loops"])  # the others end a row
        counts = ", ".join(f"{loop['instructions']:g}" for loop in one["loops"] if loop["columns"] == most)
        says(KERNELS, f"| {name} | {counts} | {one['registers']} |")


def test_the_profile_of_an_update() -> None:
    now, before = profile("profile-owt"), profile("profile-owt-before")
    for group, ms in shares(now).items():
        says(RESULTS, f"| {group} | {ms:.1f} |")
    says(RESULTS, f"These add up to {sum(shares(now).values()):.1f} ms")
    says(KERNELS, f"an update's kernels add up to {sum(shares(now).values()):.1f} ms")
    says(KERNELS, f"and to {sum(shares(before).values()):.1f} ms before")
    for text, version in ((before, "36 to 42 us each way | {:.1f} us |"), (now, "24 and 38 us | {:.1f} us on average")):
        (turn,) = re.findall(r"^ +_turn .* (\d+\.\d+)ms +\S+ +(\d+) *$", text, re.MULTILINE)
        says(KERNELS, version.format(1e3 * float(turn[0]) / int(turn[1])))


def test_an_update_with_kernels() -> None:
    whole = benchmark("steps")["parts"]["train"]
    says(RESULTS, f"would take {16_384 * whole['operations_a_token'] / whole['matrix_rate'] * 1e3:.1f} ms")
    says(RESULTS, f"fastest of the 21 updates took {whole['contenders']['kernels fused']['best_ms']:.1f} ms")
    fused, plain = (one["median_ms"] for one in whole["contenders"].values())
    says(KERNELS, f"takes {fused:.1f} ms instead of {plain:.1f}")
    says(TRAINING, f"an update {plain / fused:.2f} times as fast")
    masked, once = (benchmark(name)["parts"]["train"] for name in ("steps-mdlm", "steps-mdlm-first"))
    for contender, one in masked["contenders"].items():
        cells = f"{one['median_ms']:.1f} | {one['tokens_per_second']:,.0f} | {one['peak_gib']:.1f}"
        says(RESULTS, f"| MDLM, {contender} | {cells} |")
    says(KERNELS, f"One update of MDLM: {once['contenders']['kernels fused']['median_ms']:.1f} ms without a graph")
    says(KERNELS, f"found {masked['contenders']['kernels fused']['median_ms']:.1f}.")
    says(TRAINING, f"`mdlm` {masked['ratios'][AGAINST]:.2f} times")


@pytest.mark.parametrize(("name", "share"), [("kernels", ".3%"), ("kernels-warm-50", ".2%")])
def test_updates_with_kernels_against_the_reference(name: str, share: str) -> None:
    runs = experiment(name)
    ours, seeds = runs["mean_difference"].values()
    says(RESULTS, f"{ours:.4f} nats", f"{seeds:.2f}", f"{runs['ratio']:{share}}")


def test_drawing_times_by_importance() -> None:
    drawn = experiment("importance")
    for row in drawn:
        says(RESULTS, f"| {row['variance']:,.0f} | {row['median']:.1f} | {row['greatest']:.1f} |")
    less = drawn[0]["variance"] / min(row["variance"] for row in drawn)
    tenth = next(row["variance"] for row in drawn if row["importance"] == 0.1)
    says(RESULTS, f"Up to {less:.1f} times less variance, {drawn[0]['variance'] / tenth:.1f} times at 1/(t + 0.1)")
    says(TRAINING, f"up to {less:.1f} times smaller")


def test_seven_methods_on_digits() -> None:
    for row in experiment("digits"):
        found, mean = " ".join(f"{bits:.3f}" for bits in row["bits"]), sum(row["bits"]) / len(row["bits"])
        says(RESULTS, f"| `{row['method']}` | {row['limit']:.2f} | {found} | {mean:.3f} |")
        assert max(row["bits"]) < row["limit"]


def test_every_method_on_digits() -> None:
    methods = experiment("methods")
    for row in methods["rows"]:
        bits = f"{row['bits']:.4f}" + ("" if row["error"] is None else f" ± {row['error']:.4f}")
        says(RESULTS, f"| `{row['method']}` | {bits} | {row['distance']:.3f} | {row['samples_per_second']:.1f} |")
    says(RESULTS, f"images is {methods['held_out_distance']:.3f})")
    old, new = ({row["method"]: row for row in found["rows"]} for found in (experiment("methods-first"), methods))
    far, near = (found["neural-ctmc"]["distance"] for found in (old, new))
    says(RESULTS, f"`neural-ctmc` at a distance of {far:.3f} ([methods-first.json]", f"where `euler` has {near:.3f}")
    says(RESULTS, f"without the offset `tauldr` was at {old['tauldr']['bits']:.3f} bits")


def test_every_method_on_mnist() -> None:
    from m2s.methods import METHODS as NAMES

    page, rows = section("Every method on MNIST, one budget"), experiment("mnist")["rows"]
    assert [row["method"] for row in rows] == [name for name in NAMES if name != "m2s-hybrid"]  # that one is gidd
    for row in rows:
        bits, distances = row["bound"]["bound"], [f"{each['fid']:.2f}" for each in row["samples"]]
        if len(distances) == 1:
            distances = ["-", "-", f"{distances[0]} ({row['samples'][0]['steps']} steps)"]
        speed = f"{row['images_per_second']:,.0f} | {row['peak_gib']:.1f} | {row['samples'][-1]['samples_per_second']:,.1f}"
        line = f"{bits['value']:.4f} ± {bits['rows_error']:.4f} | {' | '.join(distances)} | {speed} | {row['sampler']}"
        says(page, f"| `{row['method']}` | {line} |")
    files = [rows, experiment("mnist-first"), experiment("mnist-tauldr-no-offset"), experiment("fid-mnist")]
    known = list(numbers(files))
    prose = re.sub(r"^\|.*\|$|\]\([^)]*\)", "", page, flags=re.MULTILINE)
    for number in set(re.findall(r"(?<![\d.])\d+\.\d+", prose)) - {"5.9", "1.5"}:  # million weights; half as long again
        places = len(number.partition(".")[2])
        assert any(f"{value:.{places}f}" == number for value in known), number


def test_what_is_said_of_rows_on_mnist() -> None:
    page = section("Every method on MNIST, one budget")
    rows = {row["method"]: row for row in experiment("mnist")["rows"]}
    for name, text in (
        ("m2s", "{:.2f} of its {:.2f} bits are the reconstruction"),
        ("m2s-gaussian", "{:.2f} of its {:.2f} bits are the reconstruction"),
        ("d3pm-gaussian", "{:.2f} of its {:.2f} bits there"),
    ):
        says(page, text.format(*(rows[name]["bound"][term]["value"] for term in ("reconstruction", "bound"))))
    assert rows["ar"]["parameters"] == 872_384 and 5.7e6 < rows["radd"]["parameters"] < rows["m2s"]["parameters"] < 5.95e6
    lowest = min((name for name in rows if name != "ar"), key=lambda name: rows[name]["bound"]["bound"]["value"])
    assert lowest == "md4" and rows["ar"]["bound"]["bound"]["value"] < rows["md4"]["bound"]["bound"]["value"]
    others = [each["fid"] for name, row in rows.items() if name != "m2s-gaussian" for each in row["samples"]]
    assert rows["m2s-gaussian"]["samples"][0]["fid"] < min(others)
    near = ("m2s", "m2s-gaussian", "tauldr", "ar")
    most = max(row["bound"]["reconstruction"]["value"] for name, row in rows.items() if name not in near and "d3pm" not in name)
    says(page, f"have {most:.3f} at most")
    broke = experiment("mnist-tauldr-no-offset")
    last = broke["last_record_of_log.jsonl"]
    says(page, f"{last['bits']:.1f} bits after {last['step']} updates, and a loss of infinity at update 765")
    says(METHODS, f"{last['bits']:.1f} bits a pixel after {last['step']} updates")
    assert "at step 765 the loss is inf" in broke["error"]
    speed = [
        rows["m2s-offset"]["images_per_second"] / rows[f"d3pm-{kind}"]["images_per_second"] for kind in ("uniform", "absorbing")
    ]
    assert 1.45 < speed[0] < speed[1] < 2


def test_the_first_ablation_on_text() -> None:
    page, found = section("A recipe for text: first ablation"), experiment("text-recipe")
    rows = {row["row"]: row for row in found["rows"]}
    nats = {name: row["nelbo"]["bound"]["nats"]["value"] for name, row in rows.items()}
    for name, row in rows.items():
        bits, trace = row["nelbo"]["bound"]["bits_per_byte"]["value"], row["trace"]
        way = " | ".join(f"{point['nats']:.3f}" for point in row["validation"][:-1])
        norms = f"{statistics.median(trace['grad_norm']):,.0f} | {max(trace['grad_norm_max']):,.0f}"
        speed = f"{row['tokens_per_second']:,.0f} | {row['seconds']['train']:.0f}"
        error = row["nelbo"]["bound"]["nats"]["rows_error"]
        says(page, f"| `{name}` | {nats[name]:.3f} ± {error:.3f} | {bits:.3f} | {way} | {norms} | {speed} |")
    gap, masked = nats["m2s-offset-0.1"] - nats["sedd-0.1"], nats["mdlm"] - nats["mdlm-0.1"]
    says(page, f"{gap:.2f} nats below `m2s-offset-0.1`", f"`mdlm-0.1` ends {masked:.2f} nats below `mdlm`")
    settings, data, tokens = found["settings"], found["data"], rows["mdlm"]["tokens"]
    assert tokens == settings["steps"] * settings["batch"] * settings["data.length"]
    says(
        page,
        f"{tokens / 1e6:.1f} M tokens",
        f"{data['train_tokens']:,} training tokens, so {tokens / data['train_tokens']:.1f}",
    )
    says(page, f"{rows['mdlm']['parameters']:,} parameters; {rows['ar']['parameters']:,} for `ar`")
    says(page, f"{data['validation_windows']} windows", f"training tokens is {data['unigram_nats']:.3f} nats")

    again = experiment("text-recipe-repeat")["trace"]
    for old, new in zip(again["loss"][:3], rows["mdlm-0.1"]["trace"]["loss"], strict=False):
        assert abs(old - new) < 1e-3
    half = len(again["loss"]) - 1
    assert {row["trace"]["tokens"][half] for row in rows.values()} == {again["tokens"][half]} and again["tokens"][
        2
    ] == 2_457_600
    says(page, f"At {again['tokens'][half] / 1e6:.1f} M tokens the training loss was {again['loss'][half]:.3f} in the first")
    losses = [rows[name]["trace"]["loss"][half] for name in ("mdlm-0.1", "mdlm")]
    says(page, "and {:.3f} in the second; `mdlm` with uniform t had {:.3f}".format(*losses))
    says(page, f"a gradient norm of {max(again['grad_norm_max']):,.0f} near step 200")
    known = [*numbers(found), tokens / 1e6, again["tokens"][half] / 1e6, again["loss"][half]]
    prose = re.sub(r"^\|.*\|$|\]\([^)]*\)|^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    for number in set(re.findall(r"(?<![\d.])\d+\.\d+", prose)) - {
        "6.90",
        "2.4",
        "2.5",
        "0.001",
        f"{gap:.2f}",
        f"{masked:.2f}",
    }:
        places = len(number.partition(".")[2])
        assert any(f"{value:.{places}f}" == number for value in known), number


@pytest.mark.parametrize(("name", "wanted"), [("fid-mnist", 4.56), ("fid-cifar10", 3.15)])
def test_fid_of_data_against_data(name: str, wanted: float) -> None:
    fid = experiment(name)
    kid = fid["kid"]
    says(RESULTS, f"FID {fid['fid']:.3f} and KID {kid['mean']:.5f} ± {kid['error']:.5f}", f"`{' '.join(fid['command'])}`")
    assert round(fid["fid"], 2) == wanted


def test_the_figure_of_three_tokens() -> None:
    toy = json.loads((ROOT / "docs" / "toy.json").read_text())
    for low, high in (toy["box"], toy["band"]):
        says(RESULTS, f"[{low:.3f}, {high:.3f}]")
