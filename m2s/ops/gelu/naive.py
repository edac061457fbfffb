"""Definition of the first layer of an MLP and its nonlinearity."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu, linear


def linear_gelu(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, "W D"], bias: Float[Tensor, "W"]
) -> Float[Tensor, "*rows W"]:
    """Compute gelu(x weight^T + bias), gelu(h) = h/2 (1 + tanh(sqrt(2/pi) (h + 0.044715 h^3))).

    Args:
        x: Inputs.
        weight: Weight.
        bias: Bias.

    Returns:
        The activations.
    """
    return gelu(linear(x, weight, bias), approximate="tanh")
