"""The available memory of a machine with and without control groups (`m2s.devices`)."""

import pytest
import torch

from m2s.devices import available_memory


def fake_root(folder, available: int | None, groups: str = "", files: dict[str, str] | None = None):
    """A folder with the files from which the available memory is read."""
    (folder / "proc" / "self").mkdir(parents=True)
    if available is not None:
        (folder / "proc" / "meminfo").write_text(f"MemTotal:  999 kB\nMemAvailable: {available} kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in (files or {}).items():
        (folder / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sys/fs/cgroup" / name).write_text(text)
    return folder


V1 = "4:memory:/job\n2:cpu:/job\n"
MEMORY = {
    "no group": (1000, "", {}, 1000 * 1024),
    "nothing known": (None, "", {}, None),
    "no limit": (1000, "0::/job\n", {"job/memory.max": "max\n", "job/memory.current": "5\n"}, 1000 * 1024),
    "limit": (1000, "0::/job\n", {"job/memory.max": "5000\n", "job/memory.current": "2000\n"}, 3000),
    "caches": (
        1000,
        "0::/job\n",
        {"job/memory.max": "5000\n", "job/memory.current": "2000\n", "job/memory.stat": "anon 1\ninactive_file 500\n"},
        3500,
    ),
    "limit above": (1000, "0::/a/b\n", {"a/memory.max": "5000\n", "a/memory.current": "1000\n"}, 4000),
    "container": (1000, "0::/not/visible\n", {"memory.max": "7000\n", "memory.current": "1000\n"}, 6000),
    "used up": (1000, "0::/\n", {"memory.max": "5000\n", "memory.current": "6000\n"}, 0),
    "version 1": (
        1000,
        V1,
        {"memory/job/memory.limit_in_bytes": "9000\n", "memory/job/memory.usage_in_bytes": "1000\n"},
        8000,
    ),
    "larger than the machine": (1, "0::/\n", {"memory.max": "5000\n", "memory.current": "0\n"}, 1024),
}


@pytest.mark.parametrize("name", MEMORY)
def test_available_memory_of_a_cpu(name, tmp_path):
    available, groups, files, expected = MEMORY[name]
    assert available_memory(torch.device("cpu"), fake_root(tmp_path, available, groups, files)) == expected


def test_available_memory_of_this_machine():
    found = available_memory(torch.device("cpu"))
    assert found is None or 2**20 < found < 2**50
