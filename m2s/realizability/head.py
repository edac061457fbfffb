"""A free score made realizable: every score is replaced by the bridge of the nearest posterior."""

from jaxtyping import Float, Int
from torch import Tensor

from m2s.belief import Head
from m2s.belief.maps import safe_log, score_from_posterior
from m2s.belief.output import Output
from m2s.realizability.projection import project


class Projected(Head):
    """The paper's repair (Eq. 11, Algorithm 4): the same network and sampler, its score projected at every site.

    t = 0 and t = 1 have no projection; samplers ask at 1 - t_min.
    """

    has_posterior = True
    open_start = True

    def __init__(self, head: Head) -> None:
        if not isinstance(head, Head):
            raise TypeError(f"head must be a head such as m2s.LogScore(process), not {head!r}")
        super().__init__(head.process)
        self.head = head

    def __repr__(self) -> str:
        return f"Projected({self.head})"

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return project(self.head.log_score(output, x_t, t).exp(), x_t, t, self.process)

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        return safe_log(self.posterior(output, x_t, t)[..., : self.process.vocab])

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return safe_log(score_from_posterior(self.posterior(output, x_t, t), x_t, t, self.process))

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return safe_log(self.posterior(output, x_t, t))
