"""Times and memory of calls that compete, the same way on a GPU and on a CPU, and the bars they are held to."""

import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from m2s.benchmark.setting import Setting
from m2s.ops import use_backend
from m2s.ops.backend import Backend

Call = Callable[[], Any]
FLUSHED, FLUSHES = 1 << 28, 16  # bytes written before a call on a GPU, more than its cache holds, and how often: about 1 ms


class Watch:
    """Moments on the device's own clock: CUDA events, which make nobody wait, or the time of day."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moments: list[Any] = []

    def tick(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append(event)
        else:
            self.moments.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Milliseconds between each moment and the next."""
        synchronize(self.device)
        pairs = zip(self.moments, self.moments[1:], strict=False)
        if self.device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [1e3 * (second - first) for first, second in pairs]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(calls: dict[str, Call], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, `repeats` times in turns, so that a busy moment hits all alike.

    On a GPU its cache is emptied before every call; meanwhile the call is being queued, so that what is timed is the device.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    scratch = torch.empty(FLUSHED if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for _ in range(repeats):
        watches = {}
        for name, call in calls.items():
            watch = watches[name] = Watch(device)
            for _ in range(FLUSHES if device.type == "cuda" else 0):
                scratch.zero_()
            watch.tick()
            call()
            watch.tick()
        for name, watch in watches.items():
            times[name] += watch.gaps()
    return times


def peak_gib(call: Call, device: torch.device, spared: int = 0) -> float | None:
    """Memory of tensors at its highest during a call, above what was there and `spared` bytes; None where nothing counts it."""
    if device.type != "cuda":
        call()
        return None
    release()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before - spared) / 2**30


def release() -> None:
    """Give back memory that nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summary(milliseconds: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(milliseconds), "best_ms": min(milliseconds)}


class Comparison:
    """Contenders of one part. What cannot run here, or fails, is left out and named."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.calls: dict[str, Call] = {}
        self.spared: dict[str, int] = {}
        self.skipped: list[str] = []
        self.found: dict[str, dict[str, Any]] = {}

    def enter(self, name: str, call: Call, needs: str | None = None, spared: int = 0) -> None:
        """A contender that `needs` "fused", "compiled", "liger" or "cce"; `spared` bytes of its memory do not count."""
        lacking = self.setting.lacks(needs) if needs else None
        if lacking:
            self.skipped.append(f"{name}: {lacking}")
        else:
            self.calls[name], self.spared[name] = call, spared

    def run(self) -> None:
        """Every call once to be warm, its memory, then all in turns."""
        self.warm()
        self.time(*self.calls)

    def warm(self) -> None:
        for name in list(self.calls):
            peak = self.attempt(name, lambda name=name: self._warm(name))  # type: ignore[misc]
            if peak is not None:
                self.found[name] = peak
            else:
                self.calls.pop(name)

    def time(self, *names: str) -> None:
        calls = {name: self.calls[name] for name in names if name in self.calls}
        for call in calls.values():  # memory that was given back is asked for again
            call()
        for name, times in interleave(calls, self.setting.device, self.setting.repeats).items():
            self.found[name] |= summary(times)

    def once(self, name: str) -> Any:
        """What a contender returns; None where it is out."""
        return self.attempt(name, self.calls[name]) if name in self.calls else None

    def attempt(self, name: str, call: Call) -> Any:
        """What `call` returns; where it fails, None, and the reason is kept."""
        try:
            return call()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.skipped.append(f"{name}: failed, {said(error)}")
        release()
        return None

    def _warm(self, name: str) -> dict[str, float | None]:
        self.calls[name]()
        return {"peak_gib": peak_gib(self.calls[name], self.setting.device, self.spared[name])}

    def ratio(self, dividend: str, *divisors: str) -> float | None:
        """The median of one over the sum of others'; None where one is missing."""
        if not all("median_ms" in self.found.get(name, {}) for name in (dividend, *divisors)):
            return None
        return float(self.found[dividend]["median_ms"] / sum(self.found[name]["median_ms"] for name in divisors))

    def value(self, name: str, field: str) -> float | None:
        return self.found.get(name, {}).get(field)

    def bar(
        self, claim: str, measured: float | None, at_most: float | None = None, at_least: float | None = None
    ) -> dict[str, Any]:
        """A claim with its number. It is met or missed where this run can judge it, else None."""
        met = None
        if self.setting.full and measured is not None:
            met = (at_most is None or measured <= at_most) and (at_least is None or measured >= at_least)
        limit = {"at_most": at_most} if at_least is None else {"at_least": at_least}
        return {"claim": claim, "measured": measured, **limit, "met": met}

    def result(self, what: str, ratios: dict[str, float | None], bars: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """What a part hands over, as JSON has it."""
        value = {"what": what, "contenders": self.found, "ratios": ratios, "bars": list(bars), "skipped": self.skipped, **more}
        return plain(value)


def said(error: Exception) -> str:
    """The first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def under(name: Backend, call: Call) -> Call:
    """The call with operations in one form."""

    def inside() -> Any:
        with use_backend(name):
            return call()

    return inside


def plain(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
