"""Definition of the operation between two convolutions of a U-Net: shift, group norm, SiLU."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import group_norm, silu


def group_norm_silu(
    x: Float[Tensor, "B C H W"],
    shift: Float[Tensor, "B C"] | None,
    weight: Float[Tensor, "C"],
    bias: Float[Tensor, "C"],
    groups: int,
    eps: float,
) -> Float[Tensor, "B C H W"]:
    """Compute silu(norm(x + shift)).

    Args:
        x: Features.
        shift: A number for each channel of each image, added to all its positions; None: no shift.
        weight: Weight of the norm.
        bias: Bias of the norm.
        groups: The number of groups of channels, which are normalized separately.
        eps: Number added to the variance.

    Returns:
        The result, in the memory format of `x`.
    """
    if shift is not None:
        x = x + shift[:, :, None, None]
    return silu(group_norm(x, groups, weight, bias, eps))
