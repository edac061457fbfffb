"""From the joint product of an attention layer to its queries, keys and values."""

from jaxtyping import Float
from torch import Tensor

from m2s.dtypes import at_least_float32


def rotate(
    x: Float[Tensor, "*batch L H D"], cos: Float[Tensor, "L D"], sin: Float[Tensor, "L D"]
) -> Float[Tensor, "*batch L H D"]:
    """(x_i, x_{i + D/2}) turned by the angle of its position, in float32 at least; the dtype of x is kept."""
    wide = at_least_float32(x)
    swapped = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (wide * cos.unsqueeze(-2) + swapped * sin.unsqueeze(-2)).to(x.dtype)


def rotary(
    qkv: Float[Tensor, "B L W"], cos: Float[Tensor, "L D"], sin: Float[Tensor, "L D"], heads: int
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L D"], Float[Tensor, "B H L D"]]:
    """Queries and keys, turned, and values, of W = 3 heads D columns in this order; sites lie before heads in memory: so does
    the result of attention then, and joining its heads copies nothing."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    return rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
