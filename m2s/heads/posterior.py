"""The head of M2S: the output is the logits of a posterior."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import apply_transition, gather_at, safe_log, scatter_at, site_coefficients
from m2s.dtypes import to_float64
from m2s.heads.base import Head
from m2s.ops.last_layer import Output
from m2s.process import Process, RankOne
from m2s.process.base import select_rows


class Posterior(Head):
    """M2S: the output is the logits of the posterior mu, or of the leave-one-out distribution nu.

    The two are one family: posterior logits are leave-one-out logits plus log P_t(k|z). For a rank-one process the difference
    is log1p(alpha_t/m_t(k)) at z = k alone. With the exact offset the network need not learn that the token it sees is probably
    right, which takes log-odds of up to log(K (1-t)/t).

    Args:
        process: The forward process.
        offset: "none": the output is the logits of mu, as in the paper. "exact": the output is the logits of nu, and the offset
            log P_t(k|z) is added.

    Raises:
        ValueError: There is no such offset.

    Example:
        >>> head = m2s.Posterior(m2s.Uniform(256, m2s.Linear()), offset="exact")
        >>> mu = head.posterior(model(x_t, t), x_t, t)     # [B, L, 256]
    """

    has_posterior = True

    def __init__(self, process: Process, offset: Literal["none", "exact"] = "none") -> None:
        super().__init__(process)
        validation.choice("offset", offset, ("none", "exact"))
        self.offset = offset

    @property
    def softmax_is_leave_one_out(self) -> bool:
        return self.offset == "exact"

    def __repr__(self) -> str:
        return f"Posterior({self.process}, offset={self.offset!r})"

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        """Return the unnormalized log mu of the clean tokens, [*site, K].

        Infinite offsets (an unmasked site under masking noise) are left out; `log_posterior` treats those sites.
        """
        clean = self._logits(output, x_t, t)[..., : self.process.vocab]
        if self.process.rank_one is not None:
            if self.offset == "none":
                return clean
            # At the mask the offset is 0, so that any index within the clean tokens will do.
            index = x_t.long().clamp(max=self.process.vocab - 1).unsqueeze(-1)
            return clean.scatter_add(-1, index, self.offset_at_current_token(x_t, t).to(clean.dtype).unsqueeze(-1))
        log_likelihood = safe_log(self.process.columns(x_t, to_float64(t))[..., : self.process.vocab]).to(clean.dtype)
        if self.offset == "none":
            return clean.where(log_likelihood > -torch.inf, -torch.inf)
        return clean + log_likelihood

    def log_network_distribution(
        self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*site K"]:
        if self.offset == "none":
            return super().log_network_distribution(output, x_t, t)
        return torch.log_softmax(self._logits(output, x_t, t)[..., : self.process.vocab], -1)

    def offset_at_current_token(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        """Return what a rank-one process adds to the logit of the current token: log1p(alpha_t/m_t(k)), or 0 without an offset.

        It is also 0 at the mask, and where it would be infinite (an unmasked site under masking noise).

        Args:
            x_t: Current tokens k, [*site].
            t: Times, [*b].

        Returns:
            The offset, [*site], in float64 where the device has it.
        """
        process = self.process.rank_one
        assert process is not None
        site = process.at(x_t, to_float64(t))
        reached = site.m_k > 0
        if process.mask is not None:
            reached = reached & (x_t.long() != process.mask)
        offset = torch.where(reached, torch.log1p(site.alpha / site.m_k.where(reached, 1)), 0)
        return torch.zeros_like(offset) if self.offset == "none" else offset

    def log_posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log mu, [*site, S]: -inf at the mask, and log e_k where the current token is certainly clean.

        Args:
            output: The network's output at (x_t, t), [*site, V].
            x_t: Current tokens k, [*site].
            t: Times, [*b].
        """
        log_mu = torch.log_softmax(self.posterior_logits(output, x_t, t), -1)
        log_mu = torch.nn.functional.pad(log_mu, (0, self.process.states - self.process.vocab), value=-torch.inf)
        rank_one = self.process.rank_one
        if rank_one is not None and rank_one.mask is not None:
            # m_t(k) = 0 at a clean k: no other token becomes k, so that the site is certainly untouched.
            known = site_coefficients(rank_one, x_t, t, log_mu.dtype).m_k == 0
            certain = scatter_at(torch.full_like(log_mu, -torch.inf), x_t, 0.0)
            log_mu = torch.where(known.unsqueeze(-1), certain, log_mu)
        return log_mu

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self.log_posterior(output, x_t, t).exp()

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log mu, [*site, S]: the last step is a draw from the posterior."""
        return self.log_posterior(output, x_t, t)

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log s_y of every candidate y by the bridge (Eq. 6), [*site, S]; 0 at x_t. The score is its exponential."""
        if self.process.rank_one is not None:
            return self._rank_one_log_score(output, x_t, t, self.process.rank_one)
        return self._matrix_log_score(output, x_t, t)

    def _rank_one_log_score(self, output: Output, x_t: Tensor, t: Tensor, process: RankOne) -> Tensor:
        """Return the bridge of a rank-one process in logarithms, so that no small mu_y is rounded away.

        log s_y = log(alpha/m(k) mu_y + m(y) [off/m(k) + mu_k/(alpha + m(k))]),    off = sum_{z != k} mu_z
        """
        log_mu = self.log_posterior(output, x_t, t)
        site = site_coefficients(process, x_t, t, log_mu.dtype)
        reached = site.m_k > 0
        divisor = torch.where(reached, site.m_k, 1)  # `where` before the division keeps NaN out of gradients
        mu = log_mu.exp()
        off = torch.where(reached, scatter_at(mu, x_t, 0.0).sum(-1) / divisor, 0)
        common = off + gather_at(mu, x_t).squeeze(-1) / site.stay
        linear = torch.where(reached, torch.log(site.alpha / divisor), 0).unsqueeze(-1) + log_mu
        mixes, linear = (site.clean > 0).unsqueeze(-1), linear[..., : process.vocab]
        mixed = torch.log((site.clean * common).unsqueeze(-1).where(mixes, 1))
        clean = torch.where(mixes, torch.logaddexp(linear, mixed), linear)  # the second derivative of logaddexp fails at -inf
        clean = torch.where(reached.unsqueeze(-1), clean, mixed.where(mixes, -torch.inf))
        if process.mask is not None:
            last = torch.where(site.mask > 0, torch.log((site.mask * common).where(site.mask > 0, 1)), -torch.inf)
            clean = torch.cat([clean, last.unsqueeze(-1)], -1)
        return scatter_at(clean, x_t, 0.0)

    def _matrix_log_score(self, output: Output, x_t: Tensor, t: Tensor) -> Tensor:
        """Return log (nu P_t)_y / (nu P_t)_k with nu ∝ mu / P_t(k|.).

        In float64, since transition probabilities go far below float32's range.
        """
        logits = self.posterior_logits(output, x_t, t)
        transition = self.process.transition_matrix(to_float64(t))
        likelihood = select_rows(transition, x_t, -1)[..., : self.process.vocab]
        # A logit of -inf (unreachable) stays -inf: subtract 0 there and not -inf.
        log_nu = logits.to(transition.dtype) - safe_log(likelihood).where(likelihood > 0, 0)
        nu = torch.nn.functional.pad(torch.softmax(log_nu, -1), (0, self.process.states - self.process.vocab))
        log_marginal = safe_log(apply_transition(nu, transition))
        return scatter_at(log_marginal - gather_at(log_marginal, x_t), x_t, 0.0).to(logits.dtype)
