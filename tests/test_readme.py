"""The code in README and docs runs, in order, as a reader would paste it."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from m2s.method.page import page as methods_page

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run(page: Path) -> None:
    namespace: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
    assert namespace


def test_readme_leads_from_a_process_to_a_loss_in_ten_lines() -> None:
    first = [line for line in blocks(ROOT / "README.md", "python")[0].splitlines() if line.strip() and "import" not in line]
    assert len(first) <= 10
    namespace: dict = {}
    exec("\n".join(blocks(ROOT / "README.md", "python")[0].splitlines()), namespace)
    assert namespace["loss"].shape == namespace["x_0"].shape
    assert all(p.grad.abs().sum() > 0 for p in namespace["network"].parameters())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `m2s ...` line of a shell block."""
    from m2s.cli import main

    monkeypatch.chdir(tmp_path)
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["m2s"]:
            monkeypatch.setattr("sys.argv", words)
            assert main() in (None, 0)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_that_take_too_long_are_at_least_understood(page: Path) -> None:
    """Every `m2s ...` line of a text block, also behind torchrun."""
    from m2s.cli import parse

    text = "\n".join(blocks(page, "text")).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if "m2s.cli" in words:
            words = words[words.index("m2s.cli") :]
        if words[:1] in (["m2s"], ["m2s.cli"]) and not {"--help", "--version", "..."} & set(words):
            assert parse(words[1:]) is not None, line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_map_of_the_paper_names_what_exists() -> None:
    """Every name in docs/paper.md is an attribute of the library, every test there is one that pytest would find."""
    text = (ROOT / "docs" / "paper.md").read_text()
    names, tests = re.findall(r"`(m2s\.[\w.]+)`", text), re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", text)
    assert len(names) > 15 and len(tests) > 15
    for name in names:
        parts = name.split(".")
        found: object = importlib.import_module("m2s")
        for depth, part in enumerate(parts[1:], 2):
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:depth]))
    for file, test in tests:
        source = (ROOT / "tests" / file).read_text()
        assert f"def {test}" in source if test else "def test_" in source, f"{file}::{test}"


def says(page: str, *texts: str) -> None:
    """Each text stands on the page; the texts are compared, not the page, over which pytest would take minutes."""
    assert [text for text in texts if text not in page] == []


def test_the_page_of_methods_is_what_they_say() -> None:
    assert (ROOT / "docs" / "methods.md").read_text() == methods_page(), "python -m m2s.method.page > docs/methods.md"


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


def shares(profile: str) -> dict[str, float]:
    """Milliseconds of an update by kind of kernel, of a profile of three."""
    scale = {"us": 1e-3, "ms": 1.0}
    found, counted_twice = dict.fromkeys(GROUPS, 0.0), 0.0
    for cells in (re.split(r"\s{2,}", line.strip()) for line in profile.splitlines()):
        if len(cells) > 8 and cells[-1].isdigit():
            ms = float(cells[-3][:-2]) * scale[cells[-3][-2:]] / 3
            group = next((name for name, pattern in GROUPS.items() if re.search(pattern, cells[0])), "")
            if group == "products of the body" and int(cells[-1]) < LAYERS * 3:
                group = "products of the last layer"
            if group:
                found[group] += ms
            counted_twice += ms if cells[0].startswith("aten::") else 0
    whole = re.search(r"Self CUDA time total: ([\d.]+)ms", profile)
    assert whole
    return found | {"several hundred small kernels": float(whole.group(1)) / 3 - counted_twice - sum(found.values())}


def test_results_are_those_of_the_files() -> None:
    """The tables of RESULTS.md are what the benchmarks wrote."""
    page, folder = (ROOT / "RESULTS.md").read_text(), ROOT / "benchmarks" / "results"
    loss, projection = (json.loads((folder / f"{name}.json").read_text()) for name in ("loss", "projection"))
    for form, times in loss["times"].items():
        says(page, f"| {times['median_ms']:.1f} | {times['best_ms']:.1f} | {loss['peak_mib'][form]:.0f} |")
    faster, less = loss["times_faster"], loss["times_less_memory"]["m2s"]
    says(page, f"{faster['m2s, compiled']:.1f} times compiled, {faster['m2s']:.1f} times eager")
    says(page, f"Memory: {less:.1f} times less")
    sampler = json.loads((folder / "sampler.json").read_text())
    for form, times in sampler["times"].items():
        says(page, f"| {times['median_ms']:.0f} | {times['best_ms']:.0f} | {sampler['peak_mib'][form]:.0f} |")
    faster, less = sampler["times_faster"]["m2s"], sampler["times_less_memory"]["m2s"]
    says(page, f"{faster:.0f} times as fast and takes {less:.0f} times less memory")
    says(page, f"`{sampler['command']}`")
    for mean in projection["mean_best_ms"].values():
        says(page, f"| {mean:.1f} |")
    says(page, f"`{loss['command']}`", f"`{projection['command']}`")
    update = json.loads((folder / "train-owt.json").read_text())
    speed, memory, share = update["tokens_per_second"], update["peak_gib"], update["mfu"]
    for form, ms in update["median_ms"].items():
        says(page, f"| {ms:.1f} | {speed[form]:,.0f} | {memory[form]:.1f} | {share[form]:.1%} |")
    says(page, f"{update['times_faster']:.1f} times the speed", f"at {update['times_less_memory']:.1f} times less memory")
    says(page, f"`{update['command']}`", f"the {update['matrix_rate'] / 1e12:.0f} Tflop/s")
    images = json.loads((folder / "train-cifar10.json").read_text())
    for form, ms in images["median_ms"].items():
        says(page, f"| {ms:.1f} | {images['rows_per_second'][form]:.0f} | {images['peak_gib'][form]:.1f} |")
    says(page.replace("\n", " "), f"`{images['command']}`")
    profile = (folder / "profile-owt.txt").read_text()
    for group, ms in shares(profile).items():
        says(page, f"| {group} | {ms:.1f} |")
    whole = json.loads((folder / "steps.json").read_text())["parts"]["train"]
    says(page, f"would take {16_384 * whole['operations_a_token'] / whole['matrix_rate'] * 1e3:.1f} ms")
    training, hours = (ROOT / "docs" / "training.md").read_text(), 161_800 * 1584 * 512 / speed["m2s"] / 3600
    says(training, f"the {round(speed['m2s'], -2):,.0f} tokens per second", f"{hours:.0f} GPU-hours", f"{hours / 24:.1f} hours")
    drawn = json.loads((ROOT / "experiments" / "results" / "importance.json").read_text())
    for row in drawn:
        says(page, f"| {row['variance']:,.0f} | {row['median']:.1f} | {row['greatest']:.1f} |")
    less = drawn[0]["variance"] / min(row["variance"] for row in drawn)
    tenth = next(row["variance"] for row in drawn if row["importance"] == 0.1)
    says(page, f"Up to {less:.1f} times less variance, {drawn[0]['variance'] / tenth:.1f} times at 1/(t + 0.1)")
    says(training, f"up to {less:.1f} times smaller")
    digits = json.loads((ROOT / "experiments" / "results" / "digits.json").read_text())
    for row in digits:
        found, mean = " ".join(f"{bits:.3f}" for bits in row["bits"]), sum(row["bits"]) / len(row["bits"])
        says(page, f"| `{row['method']}` | {row['limit']:.2f} | {found} | {mean:.3f} |")
        assert max(row["bits"]) < row["limit"]
    methods = json.loads((ROOT / "experiments" / "results" / "methods.json").read_text())
    for row in methods["rows"]:
        bits = f"{row['bits']:.4f}" + ("" if row["error"] is None else f" ± {row['error']:.4f}")
        says(page, f"| `{row['method']}` | {bits} | {row['distance']:.3f} | {row['samples_per_second']:.1f} |")
    says(page, f"images is {methods['held_out_distance']:.3f})")
    first = json.loads((ROOT / "experiments" / "results" / "methods-first.json").read_text())
    old, new = ({row["method"]: row for row in found["rows"]} for found in (first, methods))
    far, near = (found["neural-ctmc"]["distance"] for found in (old, new))
    says(page, f"`neural-ctmc` at a distance of {far:.3f} ([methods-first.json]")
    says(page, f"where `euler` has {near:.3f}")
    says(page, f"without the offset `tauldr` was at {old['tauldr']['bits']:.3f} bits")
    mnist = json.loads((ROOT / "experiments" / "results" / "mnist.json").read_text())
    for row in mnist["rows"]:
        bits, distances = row["bound"]["bound"], " | ".join(f"{each['fid']:.2f}" for each in row["samples"])
        speed = f"{row['images_per_second']:,.0f} | {row['peak_gib']:.1f} | {row['samples'][-1]['samples_per_second']:,.1f}"
        says(page, f"| `{row['method']}` | {bits['value']:.4f} ± {bits['rows_error']:.4f} | {distances} | {speed} |")
    plain = next(row["bound"] for row in mnist["rows"] if row["method"] == "m2s")
    values = (plain[name]["value"] for name in ("reconstruction", "bound"))
    says(page, "{:.2f} of its {:.2f} bits are the reconstruction".format(*values))
    ladder = json.loads((folder / "ladder.json").read_text())
    for name, one in ladder["times"].items():
        error = "-" if name == "doubling" else f"{ladder['relative_error'][name]:.1e}"
        says(page, f"| {one['median_ms']:,.0f} | {error} |")
    faster = ladder["tables_times_faster_than"]
    says(page, f"{faster['doubling']:.1f} times as fast as doubling and {faster['matrix_exp']:.1f} times as fast as PyTorch's")
    levels = next(row["bound"] for row in mnist["rows"] if row["method"] == "d3pm-gaussian")
    says(page, "{:.2f} of its {:.2f} bits there".format(*(levels[name]["value"] for name in ("reconstruction", "bound"))))
    broke = json.loads((ROOT / "experiments" / "results" / "mnist-tauldr-no-offset.json").read_text())
    last = broke["last_record_of_log.jsonl"]
    says(page, f"{last['bits']:.1f} bits after {last['step']} updates, and a loss of infinity at update 765")
    says((ROOT / "docs" / "methods.md").read_text(), f"{last['bits']:.1f} bits a pixel after {last['step']} updates")
    assert "at step 765 the loss is inf" in broke["error"]
    kernels = json.loads((folder / "resources.json").read_text())["kernels"]
    for name in ("bridged", "masked", "free"):
        one = kernels[f"{name}, no mask"]
        most = max(loop["columns"] for loop in one["loops"])  # the others end a row
        counts = ", ".join(f"{loop['instructions']:g}" for loop in one["loops"] if loop["columns"] == most)
        says((ROOT / "docs" / "kernels.md").read_text(), f"| {name} | {counts} | {one['registers']} |")
    for name in ("kernels", "kernels-projection", "steps"):
        found = json.loads((folder / f"{name}.json").read_text())
        says(page, f"`{' '.join(found['command'])}`")
        for kind, part in found["parts"].items():
            if name == "kernels" and kind in ("projection", "audit"):  # measured again
                continue
            for contender, one in part["contenders"].items():
                more = (
                    f"{one['median_ms']:.1f} | {one['tokens_per_second']:,.0f}" if "mfu" in one else f"{one['median_ms']:.2f}"
                )
                says(page, f"| {contender} | {more} |")
            for bar in part["bars"]:
                says(page, f"| {bar['measured']:.3g} | {'met' if bar['met'] else '**missed**'} |")
    names = ("kernels", "kernels-projection", "steps", "steps-mdlm")
    parts = {name: json.loads((folder / f"{name}.json").read_text())["parts"] for name in names}
    page_of_kernels = (ROOT / "docs" / "kernels.md").read_text()
    loss, drawn = parts["kernels"]["loss"], parts["kernels"]["draw"]["contenders"]
    says(page_of_kernels, f"{loss['contenders']['m2s, fused']['median_ms']:.2f} ms: {loss['bars'][0]['measured']:.2f} times")
    says(page_of_kernels, f"found {drawn['bayes, fused']['median_ms']:.2f} ms with it")
    circles = parts["kernels"]["projection"]["contenders"]["m2s, reference"]["median_ms"]
    says(page, f"The reference of the projection took {circles:.1f} ms")
    project, audit = (parts["kernels-projection"][name]["contenders"]["m2s, fused"] for name in ("projection", "audit"))
    says(
        page_of_kernels,
        f"{project['median_ms']:.2f} ms, best {project['best_ms']:.2f}",
        f"found {audit['median_ms']:.2f} ms for all",
    )
    says(page_of_kernels, f"a floor that was {loss['contenders']['three GEMMs (floor)']['median_ms']:.2f}")
    chunked = loss["ratios"]["three GEMMs in chunks, float32 logits / floor"]
    says(page, f"make {chunked:.2f} of the {loss['bars'][0]['measured']:.2f}")
    first, second = (json.loads((folder / f"kernels-{name}.json").read_text())["parts"] for name in ("first", "second"))
    loss, project = (first[name]["contenders"]["m2s, fused"]["median_ms"] for name in ("loss", "projection"))
    says(page_of_kernels, f"loss {loss:.1f} ms in all", f"| {project:.2f} ms |")
    fused, floor = (second["loss"]["contenders"][name]["median_ms"] for name in ("m2s, fused", "three GEMMs (floor)"))
    says(page_of_kernels, f"{fused:.2f} ms: {fused / floor:.2f} times a floor of {floor:.2f}")
    found = json.loads((folder / "rows.json").read_text())["median_ms"]
    whole, one, copy = (f"{ms:.3f}" for ms in found.values())
    says(page.replace("\n", " "), f"takes {whole} ms for a chunk", f"in the cache, {one} ms", f"must move takes {copy} ms")
    says(page_of_kernels.replace("\n", " "), f"it takes {one} ms a chunk instead of {whole}")
    for contender, one in parts["steps-mdlm"]["train"]["contenders"].items():
        says(page, f"| MDLM, {contender} | {one['median_ms']:.1f} | {one['tokens_per_second']:,.0f} | {one['peak_gib']:.1f} |")
    fastest, masked = parts["steps"]["train"]["contenders"]["kernels fused"], parts["steps-mdlm"]["train"]
    says(page.replace("\n", " "), f"fastest of the 21 updates took {fastest['best_ms']:.1f} ms")
    says(page.replace("\n", " "), f"These add up to {sum(shares(profile).values()):.1f} ms")
    before = (folder / "profile-owt-before.txt").read_text()
    says(page_of_kernels, f"an update's kernels add up to {sum(shares(profile).values()):.1f} ms")
    says(page_of_kernels, f"and to {sum(shares(before).values()):.1f} ms before")
    for text, version in ((before, "36 to 42 us each way | {:.1f} us |"), (profile, "24 and 38 us | {:.1f} us on average")):
        (turn,) = re.findall(r"^ +_turn .* (\d+\.\d+)ms +\S+ +(\d+) *$", text, re.MULTILINE)
        says(page_of_kernels, version.format(1e3 * float(turn[0]) / int(turn[1])))
    once = json.loads((folder / "steps-mdlm-first.json").read_text())["parts"]["train"]["contenders"]["kernels fused"]
    says(page_of_kernels, f"One update of MDLM: {once['median_ms']:.1f} ms without a graph")
    says(page_of_kernels, f"found {masked['contenders']['kernels fused']['median_ms']:.1f}.")
    says(training, f"`mdlm` {masked['ratios'][AGAINST]:.2f} times")
    for name, nats, share in (("kernels", ".4f", ".3%"), ("kernels-warm-50", ".4f", ".2%")):
        runs = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())
        ours, seeds = runs["mean_difference"].values()
        says(page.replace("\n", " "), f"{ours:{nats}} nats", f"{seeds:.2f}", f"{runs['ratio']:{share}}")
    fused, plain = (one["median_ms"] for one in parts["steps"]["train"]["contenders"].values())
    says(page_of_kernels, f"takes {fused:.1f} ms instead of {plain:.1f}")
    says(training, f"an update {plain / fused:.2f} times as fast")
    for name, wanted in (("fid-mnist", 4.56), ("fid-cifar10", 3.15)):
        fid = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())
        kid, line = fid["kid"], page.replace("\n", " ")
        says(line, f"FID {fid['fid']:.3f} and KID {kid['mean']:.5f} ± {kid['error']:.5f}", f"`{' '.join(fid['command'])}`")
        assert round(fid["fid"], 2) == wanted
    toy = json.loads((ROOT / "docs" / "toy.json").read_text())
    for low, high in (toy["box"], toy["band"]):
        says(page, f"[{low:.3f}, {high:.3f}]")
