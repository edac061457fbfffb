"""Blocks of rows: torch versions of the losses work on some rows at a time, so that their buffers stay in the cache."""

from torch import Tensor

CPU_BLOCK = 1 << 18  # logits per block on a CPU, so that the buffers stay in cache
GPU_BLOCK = 1 << 26


def block_rows(logits: Tensor) -> int:
    """Return how many rows to work on at once.

    Args:
        logits: Rows `[N, V]`; their width and device decide.

    Returns:
        The number of rows of a block, at least 1.
    """
    return max(1, (CPU_BLOCK if logits.device.type == "cpu" else GPU_BLOCK) // logits.shape[-1])
