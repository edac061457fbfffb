"""Counter-based uniform numbers: Philox4x32-10 of (sample, step, position, word), the same bits on both backends."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import uses_triton
from m2s.ops.philox import naive

__all__ = ["uniforms"]


def uniforms(
    samples: Int[Tensor, "B"], step: int | Tensor, first: int, count: int, word: int, key: tuple[int, int]
) -> Float[Tensor, "B L"]:
    """Compute one uniform number per sample and position.

    Args:
        samples: Numbers of the samples; their low 32 bits count.
        step: Number of the step: an integer, or a tensor on the device, [] or `[B, 1]`.
        first: The first position.
        count: Number of positions L.
        word: Last word of the counter, the purpose of the number.
        key: The two 32-bit words of the seed.

    Returns:
        Numbers in [0, 1) in float64, `[B, L]`.
    """
    if not uses_triton(samples):
        return naive.uniforms(samples, step, first, count, word, key)
    if isinstance(step, Tensor):
        return _uniforms(samples, step, 0, first, count, word, *key)
    return _uniforms(samples, None, step, first, count, word, *key)


@torch.library.custom_op("m2s::uniforms", mutates_args=())
def _uniforms(
    samples: Tensor, steps: Tensor | None, step: int, first: int, count: int, word: int, low_key: int, high_key: int
) -> Tensor:
    """The kernel, with `steps` where the step is a tensor, else with `step`."""
    from m2s.ops.philox import triton

    return triton.uniforms(samples, steps, step, first, count, word, low_key, high_key)


@_uniforms.register_fake
def _(
    samples: Tensor, steps: Tensor | None, step: int, first: int, count: int, word: int, low_key: int, high_key: int
) -> Tensor:
    return samples.new_empty((len(samples), count), dtype=torch.float64)
