"""Definition of rotary positions: from the joint product of an attention layer to queries, keys and values."""

from jaxtyping import Float
from torch import Tensor

from m2s.dtypes import at_least_float32


def rotate(
    x: Float[Tensor, "*batch L H D"], cos: Float[Tensor, "L D"], sin: Float[Tensor, "L D"]
) -> Float[Tensor, "*batch L H D"]:
    """Rotate the pairs (x_i, x_{i + D/2}) by the angles of their position.

    Args:
        x: Queries or keys.
        cos: (cos, cos) of the angles.
        sin: (-sin, sin) of the angles.

    Returns:
        The rotated tensor in the dtype of x; computed in float32 or float64.
    """
    wide = at_least_float32(x)
    swapped = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (wide * cos.unsqueeze(-2) + swapped * sin.unsqueeze(-2)).to(x.dtype)


def rotary(
    qkv: Float[Tensor, "B L W"], cos: Float[Tensor, "L D"], sin: Float[Tensor, "L D"], heads: int
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L D"], Float[Tensor, "B H L D"]]:
    """Split the joint product into queries, keys and values, and rotate queries and keys.

    Args:
        qkv: Joint product, W = 3 H D columns in the order queries, keys, values.
        cos: (cos, cos) of the angles.
        sin: (-sin, sin) of the angles.
        heads: Number of heads H.

    Returns:
        Rotated queries, rotated keys, and values. Positions come before heads in memory, so the result of attention has this
        layout too, and joining its heads copies nothing.
    """
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    return rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
