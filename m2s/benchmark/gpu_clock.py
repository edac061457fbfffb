"""The clock and the power of a GPU during a measurement.

At its power limit a GPU lowers its clock, and all kernels take longer. Results hold the clock, so that they can be compared.
"""

import contextlib
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "clocks_throttle_reasons.active")
POWER_CAP = 0x4  # bit of the throttle reasons: the power limit
INTERVAL = 50  # milliseconds between readings


@contextlib.contextmanager
def monitor_clock(device: torch.device) -> Iterator[dict[str, Any]]:
    """Monitor the clock of a GPU by nvidia-smi inside a `with` block.

    Args:
        device: The device.

    Yields:
        A dictionary that `summarize_readings` fills when the block ends. It stays empty on a CPU, and without nvidia-smi.
    """
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            with contextlib.suppress(OSError, RuntimeError):  # there is no such program, or it does not list this GPU
                index = torch.cuda._get_nvml_device_index(device)
                stack.enter_context(_readings(index, found))
        yield found


@contextlib.contextmanager
def _readings(index: int, found: dict[str, Any]) -> Iterator[None]:
    """Run nvidia-smi inside a `with` block, and summarize its readings."""
    query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", str(INTERVAL), "-i", str(index)]
    with tempfile.TemporaryFile("w+") as lines:
        process = subprocess.Popen(["nvidia-smi", *query], stdout=lines, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            lines.seek(0)
            found |= summarize_readings(lines.read())


def summarize_readings(lines: str) -> dict[str, Any]:
    """Summarize readings of nvidia-smi.

    Args:
        lines: Its output, one reading of `FIELDS` a line.

    Returns:
        Medians over the readings at more than half of the highest power, when the GPU was busy; empty without any.
    """
    readings = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):  # the last line may be cut off, and some GPUs report [N/A]
            *numbers, reasons = line.split(",")
            clock, most, power, limit = map(float, numbers)
            readings.append((clock, most, power, limit, bool(int(reasons, 16) & POWER_CAP)))
    busy = [row for row in readings if row[2] > max(power for _, _, power, _, _ in readings) / 2]
    if not busy:
        return {}
    clock, most, power, limit, _ = (statistics.median(column) for column in zip(*busy, strict=True))
    capped = statistics.fmean(row[-1] for row in busy)
    return {"mhz": clock, "mhz_at_most": most, "watt": power, "watt_at_most": limit, "share_at_the_power_limit": capped}
