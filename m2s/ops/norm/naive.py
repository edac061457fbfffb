"""Definition of the operation that connects two branches of a transformer: residual, norm, shift and scale."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import layer_norm


def add_norm(
    x: Float[Tensor, "B L D"],
    branch: Float[Tensor, "B L D"] | None,
    gate: Float[Tensor, "B 1 D"] | None,
    weight: Float[Tensor, "D"],
    eps: float,
    shift: Float[Tensor, "B 1 D"] | None,
    scale: Float[Tensor, "B 1 D"] | None,
    bias: Float[Tensor, "D"] | None = None,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
    """Compute x + gate branch, and norm(x + gate branch) (1 + scale) + shift; an argument that is None is left out.

    Args:
        x: Residual stream.
        branch: Output of the previous branch, or None.
        gate: Factor of the branch, or None for 1.
        weight: Weight of the norm.
        eps: Number added to the variance.
        shift: Shift of the modulation, or None.
        scale: Scale of the modulation, or None.
        bias: Bias of the norm, or None.

    Returns:
        The new residual stream, and the modulated norm.
    """
    if branch is not None:
        x = x + (branch if gate is None else gate * branch)
    y = layer_norm(x, x.shape[-1:], weight, bias, eps)
    return x, y if scale is None or shift is None else y * (1 + scale) + shift
