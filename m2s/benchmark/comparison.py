"""The benchmark harness: time and memory of competing calls, on a GPU and on a CPU, and the bars they must meet."""

import ctypes
import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from m2s.benchmark.setting import Setting
from m2s.ops import use_backend
from m2s.ops.backend import Backend

Call = Callable[[], Any]
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
COUNTED_BYTES = 1 << 16  # allocations from this size on are counted exactly on a CPU
FLUSH_BYTES, FLUSHES = 1 << 28, 16  # written before a call on a GPU: more than its cache holds, and for about 1 ms


class Stopwatch:
    """Time stamps on the clock of a device: CUDA events, which do not make the host wait, or the clock of the host.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stamps: list[Any] = []

    def stamp(self) -> None:
        """Record a time stamp."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.stamps.append(event)
        else:
            self.stamps.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Return the milliseconds between each stamp and the next."""
        synchronize(self.device)
        pairs = zip(self.stamps, self.stamps[1:], strict=False)
        if self.device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [1e3 * (second - first) for first, second in pairs]


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work.

    Args:
        device: The device; nothing happens on a CPU.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(calls: dict[str, Call], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Time calls round robin, so that other load on the machine affects all of them alike.

    On a GPU the cache is flushed before every call. The flush takes long enough for the host to queue the call meanwhile, so
    that the time is that of the device and not that of the launches.

    Args:
        calls: The calls by name.
        device: The device they run on.
        repeats: Number of rounds.

    Returns:
        Milliseconds of each call, `repeats` of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    scratch = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for _ in range(repeats):
        watches = {}
        for name, call in calls.items():
            watch = watches[name] = Stopwatch(device)
            for _ in range(FLUSHES if device.type == "cuda" else 0):
                scratch.zero_()
            watch.stamp()
            call()
            watch.stamp()
        for name, watch in watches.items():
            times[name] += watch.intervals()
    return times


def peak_gib(call: Call, device: torch.device, excluded: int = 0) -> float | None:
    """Return the peak memory of a call above what was in use before it.

    On a GPU: memory of tensors, as torch counts it. On Linux without a GPU: the rise of the high-water mark of the resident set
    (VmHWM) above the resident set before the call (VmRSS).

    Args:
        call: The call.
        device: The device it runs on.
        excluded: Bytes that do not count.

    Returns:
        The peak in GiB; None where the system does not report it.
    """
    release()
    if device.type != "cuda":
        peak = _resident_peak(call)
        return None if peak is None else (peak - excluded) / 2**30
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before - excluded) / 2**30


def _resident_peak(call: Call) -> int | None:
    """Return the bytes by which a call raises the resident set of this process; None where /proc does not report it."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

    try:
        allocator = ctypes.CDLL(None)
        # glibc keeps memory that earlier calls freed, and would serve this call from it uncounted. Return it, and let every
        # larger tensor have pages of its own meanwhile, which the system counts.
        allocator.malloc_trim(0)
        allocator.mallopt(M_MMAP_THRESHOLD, COUNTED_BYTES)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = status("VmRSS")
    except (AttributeError, OSError, StopIteration):
        call()
        return None
    try:
        call()
        return max(0, status("VmHWM") - before)
    finally:
        # The values that glibc itself arrives at once large tensors have been freed, so that the timed calls are not affected.
        allocator.mallopt(M_MMAP_THRESHOLD, 1 << 25)
        allocator.mallopt(M_TRIM_THRESHOLD, 1 << 26)


def release() -> None:
    """Free memory that is no longer used, and return cached GPU memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summarize_times(milliseconds: list[float]) -> dict[str, float]:
    """Summarize the times of a call.

    Args:
        milliseconds: The times.

    Returns:
        `median_ms` and `best_ms`.
    """
    return {"median_ms": statistics.median(milliseconds), "best_ms": min(milliseconds)}


class Comparison:
    """Calls that are compared in one part. One that cannot run here, or fails, is left out and listed in `skipped`.

    Args:
        setting: Sizes, device and number of repeats.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.calls: dict[str, Call] = {}
        self.excluded: dict[str, int] = {}
        self.skipped: list[str] = []
        self.results: dict[str, dict[str, Any]] = {}

    def add(self, name: str, call: Call, needs: str | None = None, excluded: int = 0) -> None:
        """Add a call.

        Args:
            name: Its name in the output.
            call: The call.
            needs: What it needs: "fused", "compiled", "liger" or "cce" (`Setting.why_unavailable`).
            excluded: Bytes of its memory that do not count.
        """
        reason = self.setting.why_unavailable(needs) if needs else None
        if reason:
            self.skipped.append(f"{name}: {reason}")
        else:
            self.calls[name], self.excluded[name] = call, excluded

    def run(self) -> None:
        """Warm up every call, measure its memory, and time all of them round robin."""
        self.warm_up()
        self.time(*self.calls)

    def warm_up(self) -> None:
        """Call everything once, then once more to measure its memory."""
        for name in list(self.calls):
            peak = self.attempt(name, lambda name=name: self._peak(name))  # type: ignore[misc]
            if peak is not None:
                self.results[name] = peak
            else:
                self.calls.pop(name)

    def time(self, *names: str) -> None:
        """Time the named calls round robin, `setting.repeats` times.

        Args:
            *names: Names of calls. Those that were left out are skipped.
        """
        calls = {name: self.calls[name] for name in names if name in self.calls}
        for call in calls.values():  # measuring memory has returned the caches, so fill them again
            call()
        for name, times in interleave(calls, self.setting.device, self.setting.repeats).items():
            self.results[name] |= summarize_times(times)

    def output(self, name: str) -> Any:
        """Return what a call returns; None where it was left out.

        Args:
            name: The name of the call.
        """
        return self.attempt(name, self.calls[name]) if name in self.calls else None

    def attempt(self, name: str, call: Call) -> Any:
        """Return what `call` returns; where it fails, None, and list the reason in `skipped`.

        Args:
            name: The name of the call, for `skipped`.
            call: The call.
        """
        try:
            return call()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.skipped.append(f"{name}: failed, {error_summary(error)}")
        release()
        return None

    def _peak(self, name: str) -> dict[str, float | None]:
        """Call once to warm up, and measure the memory of a second call."""
        self.calls[name]()
        return {"peak_gib": peak_gib(self.calls[name], self.setting.device, self.excluded[name])}

    def ratio(self, dividend: str, *divisors: str) -> float | None:
        """Return the median time of one call over the sum of the medians of others; None where one was left out.

        Args:
            dividend: The name of the call whose time is divided.
            *divisors: The names of the calls whose times are added up and divide it.
        """
        if not all("median_ms" in self.results.get(name, {}) for name in (dividend, *divisors)):
            return None
        return float(self.results[dividend]["median_ms"] / sum(self.results[name]["median_ms"] for name in divisors))

    def memory_ratio(self, dividend: str, divisor: str) -> float | None:
        """Return the peak memory of one call over that of another; None where it is not known.

        Args:
            dividend: The name of the call whose memory is divided.
            divisor: The name of the call whose memory divides it.
        """
        above, below = self.value(dividend, "peak_gib"), self.value(divisor, "peak_gib")
        return None if above is None or not below else above / below

    def value(self, name: str, field: str) -> float | None:
        """Return one number of a call; None where it was left out.

        Args:
            name: The name of the call.
            field: The name of the number: "median_ms", "best_ms" or "peak_gib".
        """
        return self.results.get(name, {}).get(field)

    def bar(
        self,
        claim: str,
        measured: float | None,
        at_most: float | None = None,
        at_least: float | None = None,
        judged: bool | None = None,
    ) -> dict[str, Any]:
        """Judge a claim.

        Args:
            claim: What is measured, in words.
            measured: Its number; None where it could not be measured.
            at_most: Upper limit.
            at_least: Lower limit.
            judged: Whether the sizes and the device of this run are those of the claim. By default `setting.full`.

        Returns:
            The claim, its number, its limit, and `met`: True, False, or None where it is not judged.
        """
        met = None
        if (self.setting.full if judged is None else judged) and measured is not None:
            met = (at_most is None or measured <= at_most) and (at_least is None or measured >= at_least)
        limit = {"at_most": at_most} if at_least is None else {"at_least": at_least}
        return {"claim": claim, "measured": measured, **limit, "met": met}

    def result(self, what: str, ratios: dict[str, float | None], bars: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the result of a part.

        Args:
            what: What was measured, with the sizes.
            ratios: Ratios by name.
            bars: Judged claims, from `bar`.
            **more: Other numbers.

        Returns:
            A dictionary that JSON can hold.
        """
        value = {"what": what, "contenders": self.results, "ratios": ratios, "bars": list(bars), "skipped": self.skipped}
        return finite({**value, **more})


def error_summary(error: Exception) -> str:
    """Return the type of an error and the first line of its message.

    Args:
        error: The error.

    Returns:
        One line of at most about 200 characters.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def with_backend(name: Backend, call: Call) -> Call:
    """Return a call that runs with one backend of the operations.

    Args:
        name: The backend.
        call: The call.

    Returns:
        The call inside `use_backend(name)`.
    """

    def inside() -> Any:
        with use_backend(name):
            return call()

    return inside


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have.

    Args:
        value: Any nesting of dictionaries and lists.

    Returns:
        The same with None for NaN and infinities.
    """
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
