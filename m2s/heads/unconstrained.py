"""The base of heads whose score need not have a posterior."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.bridge import safe_log
from m2s.conversions.inverse import affine_inverse
from m2s.dtypes import to_float64
from m2s.heads.base import Head
from m2s.ops.last_layer import Output


class UnconstrainedScore(Head):
    """A head that predicts a positive score for each candidate, without the constraint that a posterior exists.

    Args:
        process: The forward process.
    """

    predicts_score = True

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the signed posterior (`m2s.affine_inverse`), [*site, S], which can be negative."""
        return affine_inverse(self.log_score(output, x_t, t).exp(), x_t, t, self.process)

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the log of s_y P_t(k|y), normalized over clean y, [*site, S].

        It is positive wherever the score is, and tends to the posterior as t tends to 0.
        """
        log_score = self.log_score(output, x_t, t)
        joint = log_score + safe_log(self.process.columns(x_t, to_float64(t))).to(log_score.dtype)
        if self.process.mask is not None:
            joint = torch.nn.functional.pad(joint[..., : self.process.vocab], (0, 1), value=-torch.inf)
        return torch.log_softmax(joint, -1)
