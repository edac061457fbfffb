"""Definition of the embedding lookup."""

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding


def embed(tokens: Int[Tensor, "*sites"], weight: Float[Tensor, "V D"]) -> Float[Tensor, "*sites D"]:
    """Look up the rows of a table.

    Args:
        tokens: Token ids.
        weight: The table.

    Returns:
        weight[tokens].
    """
    return embedding(tokens, weight)
