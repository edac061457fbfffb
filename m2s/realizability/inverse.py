"""The affine inverse at the door of the library: of scores, not of their logarithms."""

from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions import inverse
from m2s.conversions.bridge import validate_inputs
from m2s.process import Process


def affine_inverse(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """The signed vector mu~ with sum one whose bridged score is `score` (appendix D.1), or nearest to it; in float32 at least.

    Uniform: exact and unique. Where the bridged scores fill less than the whole space (a mask adds an equation) it is the
    least-squares solution; where several vectors have the same score, the least of them.
    """
    validate_inputs("score", score, x_t, t, process, open_ends=True)
    validation.score("score", score, x_t)
    return inverse.affine_inverse(score, x_t, t, process)
