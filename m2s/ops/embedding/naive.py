"""The rows of a table that tokens stand for."""

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding


def embed(tokens: Int[Tensor, "*sites"], weight: Float[Tensor, "V D"]) -> Float[Tensor, "*sites D"]:
    """weight[tokens]."""
    return embedding(tokens, weight)
