"""`m2s benchmark ablation`: each operation runs without its kernel, the others with theirs, and the loss is the same."""

from collections.abc import Callable

import pytest
import torch

from m2s.benchmark import Setting
from m2s.benchmark.ablation import REPLACEMENTS, make_without, measure, without
from m2s.benchmark.train import RandomTokens, configuration
from m2s.training.config import replace

pytest.importorskip("triton")

from m2s.ops.adamw.triton import Tables
from m2s.ops.norm import triton as norm
from m2s.ops.philox import triton as philox
from m2s.ops.rotary import triton as rotary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = Setting(DEVICE, rows=8, vocab=20, width=16, repeats=2, depth=1)
LAUNCHES = {
    "adamw": (Tables, "step"),
    "norm": (norm, "backward"),
    "rotary": (rotary, "backward"),
    "philox": (philox, "uniforms"),
}


def counted(call: Callable, name: str, launched: set[str]) -> Callable:
    """A function that notes that it was called."""

    def inner(*given, **options):
        launched.add(name)
        return call(*given, **options)

    return inner


@pytest.fixture
def launched(monkeypatch) -> set[str]:
    """The operations whose kernels were launched."""
    names: set[str] = set()
    for name, (owner, attribute) in LAUNCHES.items():
        monkeypatch.setattr(owner, attribute, counted(getattr(owner, attribute), name, names))
    return names


def losses(*operations: str) -> list[float]:
    """The losses of two steps without the kernels of some operations."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:  # the shape checker of the tests cannot be compiled
        patch.setattr("m2s.benchmark.ablation.configuration", lambda *given: replace(configuration(*given), "compile", "no"))
        step, _ = make_without(TINY, RandomTokens(TINY.vocab, TINY.length, rows=8), *operations)
    return [step(), step()]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of two steps with all kernels."""
    return losses()


def test_step_with_all_kernels(launched, expected):
    assert losses() == expected
    assert launched == LAUNCHES.keys()


@pytest.mark.parametrize("operation", LAUNCHES)
def test_step_without_one_kernel(operation, launched, expected):
    assert losses(operation) == pytest.approx(expected, rel=1e-2 if DEVICE.type == "cuda" else 1e-5)
    assert launched == LAUNCHES.keys() - {operation}


def test_every_replacement_is_undone():
    places = [(owner, name) for parts in REPLACEMENTS.values() for owner, name, _ in parts]
    before = [getattr(owner, name) for owner, name in places]
    with without(*REPLACEMENTS):
        assert all(getattr(*place) is not value for place, value in zip(places, before, strict=True))
    assert before == [getattr(owner, name) for owner, name in places]


def test_part_compares_each_operation_with_all_kernels(monkeypatch):
    """Steps that do nothing take the place of training steps."""
    monkeypatch.setattr("m2s.benchmark.ablation.ROUNDS", 2)
    monkeypatch.setattr("m2s.benchmark.ablation.GROUP", 3)
    monkeypatch.setattr("m2s.benchmark.ablation.trainer", lambda *_: (float, torch.nn.Linear(1, 1)))
    found = measure(TINY)
    assert found["skipped"] == []
    assert found["saved"].keys() >= {*REPLACEMENTS, "nothing (1)", "nothing (2)"}
    below = [name for name in REPLACEMENTS if found["saved"][name]["time"] < 0.02]
    assert (found["below"] or "") == ", ".join(below)
    assert ("all below" in found["saved"]) == ("without all below" in found["contenders"]) == bool(below)
    all_kernels, again, step = (
        found["contenders"][name]["rounds_ms"] for name in ("all kernels (2)", "all kernels, again (2)", "without philox")
    )
    base = [(all_kernels[number] + again[number]) / 2 for number in (0, 1)]
    saved = found["saved"]["philox"]
    assert saved["time"] == pytest.approx((step[0] / base[0] + step[1] / base[1]) / 2 - 1)
    assert saved["milliseconds"] == pytest.approx(saved["time"] * (base[0] + base[1]) / 2)
    assert saved["error"] == pytest.approx(1.4826 * 1.2533 * abs(step[0] / base[0] - step[1] / base[1]) / 2 / 2**0.5)
