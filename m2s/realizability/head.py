"""The head that makes an unconstrained score realizable: every score is replaced by the bridge of the nearest posterior."""

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
from m2s.realizability.projection import project, project_log
from m2s.transforms import is_transformed


class Projected(Head):
    """The paper's repair (Eq. 11, Algorithm 4): the same network and sampler, with the score projected at every site.

    t = 0 and t = 1 have no projection: samplers evaluate the head at 1 - t_min. Hidden states (`m2s.Unprojected`) with very
    many logits are multiplied out for some sites at a time.

    Args:
        head: The head to repair, usually `m2s.LogScore(process)`.

    Raises:
        TypeError: `head` is not a head.

    Example:
        >>> checkpoint = m2s.load("runs/sedd")
        >>> samples = m2s.sample(checkpoint.model, m2s.Projected(checkpoint.head), (16, 784), sampler="analytic")
    """

    has_posterior = True
    predicts_score = True
    excludes_t_one = True

    def __init__(self, head: Head) -> None:
        validation.instance("head", head, Head, "a head such as m2s.LogScore(process)")
        super().__init__(head.process)
        self.head = head

    def __repr__(self) -> str:
        return f"Projected({self.head})"

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the nearest posterior, [*site, S]."""
        return self._by_chunks(self._nearest, output, x_t, t)

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        """Return the log of the nearest posterior over the clean tokens, [*site, K]."""
        return self._by_chunks(lambda *site: safe_log(self._nearest(*site)[..., : self.process.vocab]), output, x_t, t)

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log s_y of every candidate y by the bridge of the nearest posterior, [*site, S]; 0 at x_t."""

        def repaired(output: Output, x_t: Tensor, t: Tensor) -> Tensor:
            return safe_log(score_from_posterior(self._nearest(output, x_t, t), x_t, t, self.process))

        return self._by_chunks(repaired, output, x_t, t)

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the log of the nearest posterior, [*site, S]."""
        return self._by_chunks(lambda *site: safe_log(self._nearest(*site)), output, x_t, t)

    def _nearest(self, output: Output, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the nearest posterior of one chunk."""
        rank_one = self.process.rank_one
        if rank_one is None:
            return project(self.head.log_score(output, x_t, t).exp(), x_t, t, self.process)
        if type(self.head) is LogScore and self.head.scale == "none":
            # The output is the log-score: project it with its padding, without a copy. A subclass may transform it.
            validation.tokens("x_t", x_t, rank_one.states)
            validation.align("t", t, x_t)
            return project_log(padded_logits(output, x_t, rank_one.states), x_t, t, rank_one)
        return project_log(self.head.log_score(output, x_t, t), x_t, t, rank_one)

    def _by_chunks(self, function: Callable[..., Tensor], output: Output, x_t: Tensor, t: Tensor) -> Tensor:
        """Return function(output, x_t, t), computed for some sites at a time where hidden states have very many logits."""
        if not isinstance(output, Unprojected) or self.process.rank_one is None:
            return function(output, x_t, t)
        if output.hidden.shape[:-1] != x_t.shape or x_t.numel() * len(output.weight) <= CHUNK:
            return function(output, x_t, t)
        if is_transformed() or (torch.is_grad_enabled() and (output.hidden.requires_grad or output.weight.requires_grad)):
            return function(output, x_t, t)  # chunks have no gradient
        times = validation.align("t", t, x_t).expand(x_t.shape).reshape(-1)
        # Autocast would round the float32 logits to bf16.
        with torch.no_grad(), torch.autocast(x_t.device.type, enabled=False):
            layer, k = Layer.of(output), x_t.reshape(-1)
            found = None
            for at in layer.chunks():
                part = function(layer.logits(at), k[at], times[at])
                if found is None:
                    found = part.new_empty(len(k), part.shape[-1])
                found[at] = part
        assert found is not None
        return found.reshape(*x_t.shape, found.shape[-1])
