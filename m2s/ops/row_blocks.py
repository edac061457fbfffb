"""Shared parts of the torch versions of the row losses: blocks of rows whose buffers stay in the cache, and their layout."""

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


def prepare(x_t: Tensor, x_0: Tensor, row_scalars: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and row scalars unchanged: this backend needs no other layout than that of `m2s.ops.linear_loss`.

    Args:
        x_t: Current tokens `[N]`.
        x_0: Clean tokens `[N]`.
        row_scalars: `[C, N]`.

    Returns:
        The same tensors.
    """
    return x_t, x_0, row_scalars
