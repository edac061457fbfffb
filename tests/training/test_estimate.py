"""The estimate of memory and time: what it counts, how it compares with measured peaks, and the advice that it gives."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2s.distributed import World
from m2s.errors import UserError
from m2s.methods import METHODS
from m2s.models import build
from m2s.presets import PRESETS
from m2s.training import estimate as module
from m2s.training import resolve, step_trace, train
from m2s.training.build import describe_network
from m2s.training.config import replace
from m2s.training.estimate import estimate
from m2s.training.memory_check import advice, check_memory, describe_estimate, divisors, format_bytes
from m2s.training.step_time import Pace, format_seconds
from m2s.training.step_trace import trace_step
from small_runs import InMemorySource, random_rows, small

ROOT = Path(__file__).parents[2]
CPU, GPU = World(0, 1, torch.device("cpu")), World(0, 1, torch.device("cuda"))
GIB = 2**30


def data(vocab: int, length: int, shape: tuple[int, ...] | None = None) -> InMemorySource:
    rows = InMemorySource(torch.zeros(1, length, dtype=torch.long).expand(64, length), vocab)
    rows.shape = shape  # type: ignore[assignment]
    return rows


OWT, CIFAR10, MNIST = data(50_257, 512), data(256, 3072, (32, 32, 3)), data(256, 784, (28, 28))


def preset(name: str, **changes: object):
    config = PRESETS[name]
    for key, value in changes.items():
        config = replace(config, key.replace("__", "."), value)
    return resolve(config)


@pytest.fixture
def available(monkeypatch):
    """Sets the available memory of every device in bytes, and lets kernels seem to run on a GPU."""

    def set_memory(count: float | None) -> None:
        monkeypatch.setattr(module, "available_memory", lambda device: count)
        monkeypatch.setattr(module, "why_unavailable", lambda device: "")

    return set_memory


def test_counted_parameters_and_operations():
    """A linear layer of a position takes 2 operations for each weight; attention takes 4 L for each feature."""
    config = small(Path("run"), network__dropout=0.0)
    rows = random_rows()
    found = trace_step(resolve(config), rows)
    parts = METHODS[config.method].build(rows.vocab)
    model = build(describe_network(resolve(config).network, parts.head.process, rows))
    assert found.parameters == sum(weight.numel() for weight in model.parameters()) and not found.why
    width, length, states = 16, rows.length, 64  # the last layer has a multiple of 64 rows
    linear = 2 * length * (12 * width**2 + width * states)  # qkv 3, out 1, mlp 8
    attention = 4 * length**2 * width
    assert linear + attention <= found.operations <= 1.5 * (linear + attention) + 2 * 300 * 128 * 4  # and the time's layers


def test_activations_are_those_that_autograd_keeps():
    """The bytes of the tensors that a real forward pass saves are at most those of the trace, and most of them."""
    config, rows = (
        resolve(small(Path("run"), network__width=64, network__depth=2, network__dropout=0.0)),
        random_rows(64, 32, 5),
    )
    parts = METHODS[config.method].build(rows.vocab)
    model = build(describe_network(config.network, parts.head.process, rows)).train()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def saved(examples: int) -> int:
        kept: dict[int, int] = {}

        def pack(value: torch.Tensor) -> torch.Tensor:
            storage = value.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            output = model(rows.rows[:examples], torch.full((examples,), 0.5), None)
        del output
        return sum(kept.values())

    per_example = saved(4) - saved(3)
    found = trace_step(config, rows).activations
    logits = 4 * 32 * 64
    assert per_example <= found <= 1.1 * per_example + 2 * logits


def test_recomputing_and_bf16_take_less():
    config = preset("owt", network__size="tiny")
    full, recomputed, bf16 = (trace_step(config, data(257, 64), **more) for more in ({}, {"recomputed": True}, {"bf16": True}))
    assert recomputed.activations < full.activations and bf16.activations < full.activations
    assert full.activations > 2 * 4 * 64 * 128 * 4  # at least two tensors of features for each of four blocks


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_an_estimate(method: str):
    found = estimate(preset("digits", method=method), data(17, 64, (8, 8)), CPU)
    assert not found.step.why and found.loss > 0 and found.operations > 0
    assert found.total > found.weights >= 20 * found.step.parameters


def test_network_that_reads_values_is_estimated_without_activations(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no values")

    monkeypatch.setattr(step_trace, "_trace_activations", fail)
    found = estimate(preset("digits", network__width=12), data(17, 64, (8, 8)), CPU)
    assert found.activations == 0 and "cannot be traced" in describe_estimate(found, preset("digits"), CPU.device)


@pytest.mark.parametrize(
    ("name", "changes", "rows", "file", "entry", "factor"),
    [
        ("owt", {"method": "m2s", "batch": 32}, OWT, "train-owt", "m2s", 1.2),
        ("owt", {"method": "m2s", "batch": 32, "kernels": "reference"}, OWT, "steps", "kernels reference", 1.2),
        ("cifar10", {"method": "m2s", "batch": 128}, CIFAR10, "train-cifar10", "m2s", 1.3),
    ],
)
def test_estimate_for_a_gpu_against_the_recorded_peaks(available, name, changes, rows, file, entry, factor):
    """Peaks of an H200, in result files of benchmarks; the estimate needs no GPU."""
    available(None)
    found = estimate(preset(name, **changes), rows, GPU).total / GIB
    recorded = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    peak = peak_gib(recorded, entry)
    assert peak / factor <= found <= peak * factor, (found, peak)


def peak_gib(recorded: dict, entry: str) -> float:
    if "peak_gib" in recorded:
        return recorded["peak_gib"][entry]
    return recorded["parts"]["train"]["contenders"][entry]["peak_gib"]


@pytest.mark.parametrize(("method", "factor"), [("m2s", 1.3), ("m2s-offset", 1.3), ("m2s-gaussian", 1.5), ("tauldr", 1.5)])
def test_estimate_for_mnist_on_a_gpu(available, method, factor):
    available(None)
    rows = json.loads((ROOT / "experiments" / "results" / "mnist.json").read_text())["rows"]
    peak = next(row["peak_gib"] for row in rows if row["method"] == method)
    found = estimate(preset("mnist", method=method), MNIST, GPU).total / GIB
    assert peak / factor <= found <= peak * factor, (found, peak)


def test_measured_peaks_on_a_cpu_are_within_the_stated_factor():
    """The file of benchmarks/memory.py is read. Nothing is measured here."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())
    assert len(recorded["rows"]) >= 8
    for row in recorded["rows"]:
        assert 1 / recorded["factor"] <= row["estimate"] / row["peak"] <= recorded["factor"], row


def test_a_run_that_does_not_fit_stops_before_anything_is_written(tmp_path, available):
    available(10 * 2**20)
    with pytest.raises(UserError, match=r"needs about .* MiB of memory, and 10 MiB are available"):
        train(small(tmp_path / "run", network__width=256, network__depth=4), random_rows())
    assert list(tmp_path.iterdir()) == []
    train(small(tmp_path / "run", network__width=64, steps=1, on_low_memory="warn"), random_rows())
    assert (tmp_path / "run" / "train.json").is_file()


def test_unknown_memory_does_not_stop(tmp_path, available):
    available(None)
    train(small(tmp_path / "run", steps=1), random_rows())


@pytest.mark.parametrize("gib", [8, 20, 60])
def test_the_advice_fits(available, gib):
    available(gib * GIB)
    config = preset("owt", network__size="tiny", data__length=512)
    with pytest.raises(UserError) as raised:
        check_memory(config, OWT, CPU)
    words = str(raised.value).replace(",", " ").split()
    size = int(words[words.index("--micro-batch") + 1])
    changed = replace(replace(config, "micro_batch", size), "recompute", "--recompute" in words)
    found = estimate(changed, OWT, CPU)
    assert config.run.batch % size == 0 and found.fits and found.total < 0.9 * gib * GIB
    larger = min((n for n in range(size + 1, config.run.batch + 1) if config.run.batch % n == 0), default=None)
    assert larger is not None and not estimate(replace(changed, "micro_batch", larger), OWT, CPU).total <= 0.9 * gib * GIB


def test_the_advice_names_the_least_time(available, monkeypatch):
    """The matrix products of all steps, at a speed of a teraflop per second."""
    available(8 * GIB)
    monkeypatch.setattr("m2s.training.memory_check.matrix_speed", lambda device, bf16: 1e12)
    config = preset("owt", network__size="tiny", data__length=512, steps=100)
    found = estimate(config, OWT, CPU)
    text = advice(config, OWT, CPU)
    again = 4 / 3 if "--recompute" in text else 1
    seconds = again * found.operations / 1e12
    assert f"(a step then takes at least {format_seconds(seconds)}, the run of 100 steps at least " in text
    assert f"at least {format_seconds(100 * seconds)}: fewer --steps" in text


@given(st.integers(1, 3000))
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_advice_for_a_very_large_batch(available):
    """A search over all smaller batches would not end."""
    available(10**17)
    text = advice(preset("owt", batch=10**12, network__size="tiny"), OWT, CPU)
    size = int(text.split("--micro-batch ")[1].split(",")[0])
    assert size > 0 and 10**12 % size == 0


def test_advice_for_a_batch_that_fits_in_no_micro_batches(available):
    """All its tokens and times are in memory, those of the next step too: 2 (8 * 512 + 40) bytes for each example."""
    available(8 * GIB)
    config = preset("owt", batch=10**9, micro_batch=1, network__size="tiny")
    found = estimate(config, OWT, CPU)
    assert found.batch == 10**9 * 8272 and not found.fits
    with pytest.raises(UserError, match=r"^batch is 1000000000, but .* on 1 example at a time needs about") as raised:
        check_memory(config, OWT, CPU)
    advised = "give a smaller --batch: the 1,000,000,000 examples of a step alone take about 7703.9 GiB. --on-low-memory"
    assert advised in str(raised.value)
    assert " of 1 example; batch 7703.9 GiB)" in describe_estimate(found, config, CPU.device)
    four = estimate(preset("owt", batch=4), OWT, dataclasses.replace(CPU, size=4))
    assert four.batch == 8272 and "batch" not in describe_estimate(four, config, CPU.device)


@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize(("mib", "start"), [(8 * 2**10, "give --micro-batch"), (100, "give a smaller network")])
def test_the_advice_names_the_smallest_network_unless_the_run_has_it(available, size, mib, start):
    """Where a micro-batch fits that takes long, and where none fits."""
    available(mib * 2**20)
    text = advice(preset("owt", network__size=size), OWT, CPU)
    assert text.startswith(start) or text.startswith("give --recompute --micro-batch")
    assert ("--network.size tiny" in text) is (size != "tiny")


def test_advice_where_no_micro_batch_fits(available):
    available(1 * GIB)
    text = advice(preset("owt"), OWT, CPU)
    assert "--network.size tiny" in text and "--data.length" in text and "--micro-batch 1 still needs" in text


def test_estimate_changes_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    estimate(preset("digits", network__width=20), data(17, 64, (8, 8)), CPU)
    assert torch.equal(torch.rand(3), expected)


def test_sharded_weights_and_processes(available):
    available(None)
    config = preset("owt", batch=32)
    one, four = (estimate(config, OWT, dataclasses.replace(GPU, size=size)) for size in (1, 4))
    assert four.examples == 8 and four.activations == pytest.approx(one.activations / 4) and four.weights == one.weights
    sharded = estimate(replace(config, "parallel", "fsdp"), OWT, dataclasses.replace(GPU, size=4))
    assert sharded.weights == one.weights / 4


def test_pace_reports_once_after_the_first_steps():
    pace = Pace(torch.device("cpu"))
    assert pace.add(100.0, 99) is None  # the first step sets things up
    assert pace.add(2.0, 98) is None
    assert pace.add(4.0, 97) == "time: 3 s per step, about 4.85 min for the 97 steps left"
    assert pace.add(4.0, 96) is None
    quick = Pace(torch.device("cpu"))
    assert [quick.add(0.01, 10) for _ in range(20)] == [None] * 20


def test_units():
    assert [format_bytes(n) for n in (3.0 * 2**20, 1.5 * GIB)] == ["3 MiB", "1.5 GiB"]
    seconds = (0.01, 1.5, 600.0, 36_000.0, 1e6)
    assert [format_seconds(n) for n in seconds] == ["10 ms", "1.5 s", "10 min", "10 hours", "12 days"]
