"""A GPU's clock and power while it is timed: at its power limit it lowers its clock, and all kernels take longer."""

import contextlib
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "clocks_throttle_reasons.active")
POWER_CAP = 0x4  # of the reasons: the limit of power, which software keeps
EVERY = 50  # milliseconds


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[dict[str, Any]]:
    """Filled in at the end by what `nvidia-smi` saw meanwhile; empty without it, or on another device than a GPU."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            with contextlib.suppress(OSError, RuntimeError):  # no such program; a GPU that has no number there
                which = torch.cuda._get_nvml_device_index(device)
                stack.enter_context(_told(which, found))
        yield found


@contextlib.contextmanager
def _told(which: int, found: dict[str, Any]) -> Iterator[None]:
    query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", str(EVERY), "-i", str(which)]
    with tempfile.TemporaryFile("w+") as lines:
        process = subprocess.Popen(["nvidia-smi", *query], stdout=lines, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            lines.seek(0)
            found |= summary(lines.read())


def summary(lines: str) -> dict[str, Any]:
    """Medians over the moments when it was at work: at more than half of the greatest power seen."""
    seen = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):  # the last line may be cut off, and some GPUs do not tell
            *numbers, reasons = line.split(",")
            clock, most, power, limit = map(float, numbers)
            seen.append((clock, most, power, limit, bool(int(reasons, 16) & POWER_CAP)))
    at_work = [row for row in seen if row[2] > max(power for _, _, power, _, _ in seen) / 2]
    if not at_work:
        return {}
    clock, most, power, limit, _ = (statistics.median(column) for column in zip(*at_work, strict=True))
    capped = statistics.fmean(row[-1] for row in at_work)
    return {"mhz": clock, "mhz_at_most": most, "watt": power, "watt_at_most": limit, "share_at_the_power_limit": capped}
