"""What stands between two branches of a transformer: the residual of the last, the norm, the shift and scale of the next."""

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
    """x + gate branch, and norm(x + gate branch) (1 + scale) + shift; what is None is left out. The norm ends with its weight
    and bias."""
    if branch is not None:
        x = x + (branch if gate is None else gate * branch)
    y = layer_norm(x, x.shape[-1:], weight, bias, eps)
    return x, y if scale is None or shift is None else y * (1 + scale) + shift
