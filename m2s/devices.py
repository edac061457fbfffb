"""The choice of a device, checked before anything is computed, and its available memory."""

from pathlib import Path
from typing import NoReturn

import torch

from m2s.errors import UserError


def resolve_device(device: str) -> str:
    """Check that a device can be used, and choose one if none is named.

    Args:
        device: A device such as "cpu", "cuda" or "cuda:1". The empty string stands for a GPU if there is one, else the CPU.

    Returns:
        The name of the device.

    Raises:
        UserError: The name is not that of a device, or torch cannot compute on it.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if why := _why_unusable(device):
        invalid_device(device, why)
    return device


def invalid_device(device: str, why: str) -> NoReturn:
    """Raise the error for a device that cannot be used.

    Args:
        device: Name of the device.
        why: The reason.

    Raises:
        UserError: Always.
    """
    raise UserError(f"device is {device!r}, but {why}: leave it out for the best there is, or give cpu", option="device")


def _why_unusable(device: str) -> str:
    """Return why torch cannot compute on a device; empty if it can."""
    try:
        kind = torch.device(device)
    except RuntimeError:
        return "it must be cpu, cuda, or one of several as in cuda:1"
    if kind.type == "meta":
        return "it has no values"
    if kind.type == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU"
    if kind.type == "mps" and not torch.backends.mps.is_available():
        return "torch sees no Apple GPU"
    try:
        # torch.device accepts indices of GPUs that do not exist and backends that are not built in: only an allocation tells.
        torch.zeros(1, device=kind)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).strip().split("\n")[0].rstrip(".")
    return ""


def available_memory(device: torch.device, root: Path = Path("/")) -> float | None:
    """Return the bytes that a process can still allocate on a device.

    Args:
        device: A CPU or a CUDA device.
        root: The folder that holds proc and sys.

    Returns:
        For CUDA the free memory of the GPU, with what torch has reserved and does not use. For a CPU the available memory of
        the machine, or what the limit of a control group (a container, a batch job) leaves. None where this is unknown.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    known = [value for value in (_machine_memory(root), *_group_memory(root)) if value is not None]
    return min(known, default=None)


def _machine_memory(root: Path) -> float | None:
    """MemAvailable of /proc/meminfo, which counts the caches that can be dropped."""
    values = _table(root / "proc/meminfo")
    return None if "MemAvailable:" not in values else 1024.0 * values["MemAvailable:"]


def _group_memory(root: Path) -> list[float | None]:
    """What the memory limits of this process's control groups leave, for both versions of control groups."""
    left: list[float | None] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        group = top / path.strip("/")
        # A limit of a group holds for all groups below it. In a container the group itself may not be visible.
        for folder in (group, *group.parents):
            if folder == top or top in folder.parents:
                left.append(_left_of(folder, *names))
    return left


def _left_of(folder: Path, limit: str, used: str, cache: str) -> float | None:
    """The limit of a control group less what it uses, without caches that can be dropped; None where it has no limit."""
    limits, uses = _lines(folder / limit), _lines(folder / used)
    if not limits or not uses or not limits[0].isdecimal():  # the word "max" is no limit
        return None
    return max(0.0, float(limits[0]) - float(uses[0]) + _table(folder / "memory.stat").get(cache, 0))


def _lines(path: Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return path.read_text().split("\n")
    except OSError:
        return []


def _table(path: Path) -> dict[str, int]:
    """The first number of each line of a file, by the word before it."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
