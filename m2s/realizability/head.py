"""A free score made realizable: every score is replaced by the bridge of the nearest posterior."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import safe_log, score_from_posterior
from m2s.heads import Head, LogScore
from m2s.heads.output import padded_logits
from m2s.ops.last_layer import Output, Unprojected
from m2s.ops.last_layer_chunks import CHUNK, Layer
from m2s.process import RankOne
from m2s.realizability.projection import project, project_log


class Projected(Head):
    """The paper's repair (Eq. 11, Algorithm 4): the same network and sampler, its score projected at every site.

    t = 0 and t = 1 have no projection; samplers ask at 1 - t_min. Where the logits of all sites would be many, hidden states
    are multiplied out for some of them at a time.
    """

    has_posterior = True
    predicts_score = True
    open_start = True

    def __init__(self, head: Head) -> None:
        if not isinstance(head, Head):
            raise TypeError(f"head must be a head such as m2s.LogScore(process), not {head!r}")
        super().__init__(head.process)
        self.head = head

    def __repr__(self) -> str:
        return f"Projected({self.head})"

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self._each(self._nearest, output, x_t, t)

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        return self._each(lambda *site: safe_log(self._nearest(*site)[..., : self.process.vocab]), output, x_t, t)

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log s_y of every candidate y, by the bridge of the nearest posterior; 0 at x_t. The score is its exponential."""

        def bridged(output: Output, x_t: Tensor, t: Tensor) -> Tensor:
            return safe_log(score_from_posterior(self._nearest(output, x_t, t), x_t, t, self.process))

        return self._each(bridged, output, x_t, t)

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self._each(lambda *site: safe_log(self._nearest(*site)), output, x_t, t)

    def _nearest(self, output: Output, x_t: Tensor, t: Tensor) -> Tensor:
        if not isinstance(self.process, RankOne):
            return project(self.head.log_score(output, x_t, t).exp(), x_t, t, self.process)
        if isinstance(self.head, LogScore):  # its own output, as wide as it comes
            validation.tokens("x_t", x_t, self.process.states)
            validation.align("t", t, x_t)
            return project_log(padded_logits(output, x_t, self.process.states), x_t, t, self.process)
        return project_log(self.head.log_score(output, x_t, t), x_t, t, self.process)

    def _each(self, function: Callable[..., Tensor], output: Output, x_t: Tensor, t: Tensor) -> Tensor:
        """function(output, x_t, t), of some rows at a time where the output is hidden states whose logits are many."""
        if not isinstance(output, Unprojected) or not isinstance(self.process, RankOne):
            return function(output, x_t, t)
        if output.hidden.shape[:-1] != x_t.shape or x_t.numel() * len(output.weight) <= CHUNK:
            return function(output, x_t, t)
        times = validation.align("t", t, x_t).expand(x_t.shape).reshape(-1)
        with torch.no_grad(), torch.autocast(x_t.device.type, enabled=False):  # a projection has no gradient
            layer, k = Layer.of(output), x_t.reshape(-1)
            found = None
            for at in layer.chunks():
                part = function(layer.logits(at), k[at], times[at])
                if found is None:
                    found = part.new_empty(len(k), part.shape[-1])
                found[at] = part
        assert found is not None
        return found.reshape(*x_t.shape, found.shape[-1])
