"""Heads: what a network's output means.

Every head states the same three things of an output [*sites, >= states]: `posterior`, `log_score`, and `last_step`, the law
from which the clean token is drawn when the noise is all but gone.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import apply_transition, gather_at, safe_log, scatter_at, site_coefficients
from m2s.conversions.inverse import affine_inverse
from m2s.dtypes import to_float64
from m2s.heads.output import logits
from m2s.ops.last_layer import Output
from m2s.process import Absorbing, Process, RankOne
from m2s.process.base import select_rows


class Head(ABC):
    """A meaning for the output of a network under a forward process."""

    has_posterior: ClassVar[bool] = False  # a true posterior stands behind every output
    predicts_score: ClassVar[bool] = False  # the output is a score: its posterior is found by inverting the noise of its time
    open_start: ClassVar[bool] = False  # t = 1 has no answer
    exact: ClassVar[bool] = False  # the likelihood itself is known, and is what `last_step` says: there is no noise
    generates_left_to_right: ClassVar[bool] = False  # the head predicts the next token, not the reverse process

    def __init__(self, process: Process) -> None:
        if not isinstance(process, Process):
            raise TypeError(f"process must be a process such as m2s.Uniform(256, m2s.Linear()), not {process!r}")
        self.process = process

    @abstractmethod
    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """mu = Pr(X_0 = . | X_t); for a free score, the signed affine inverse."""

    @abstractmethod
    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log s_y = log p_t(x^{i->y}) / p_t(x) of every candidate y, from the network's output at (x_t, t); 0 at x_t.

        In float32 at least. The score that `m2s.classify` and `m2s.project` take is its exponential,
        `head.log_score(network(x_t, t), x_t, t).exp()`.
        """

    @abstractmethod
    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log of the law from which x_0 is drawn at a small t; -inf at the mask."""

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        """Unnormalised log mu over the clean tokens, where there is a posterior."""
        raise TypeError(f"{self} is a free score, which need not have a posterior: m2s.Projected(head) has the nearest one")

    def log_network_distribution(
        self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*site K"]:
        """log of the law that the network itself gives of the clean tokens, where it does: mu, or nu with an exact offset."""
        raise TypeError(f"the output under {self} is no law of the clean token")

    def network_input(self, x: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        """What the network is shown of a sequence that is being drawn: all of it as it is."""
        return x

    def _logits(self, output: Output, x_t: Tensor, t: Tensor) -> Tensor:
        validation.tokens("x_t", x_t, self.process.states)
        validation.times("t", t)
        validation.align("t", t, x_t)
        return logits(output, x_t, self.process.states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.process})"


class Posterior(Head):
    """M2S: the output is the logits of the posterior mu (`offset="none"`, the paper) or of the leave-one-out law nu
    (`"exact"`).

    The two are one family: posterior logits are leave-one-out logits plus log P_t(k|z), for a rank-one process
    log1p(alpha/m_t(k)) at z = k alone. With "exact" the network need not say itself that the token it sees is probably
    right.
    """

    has_posterior = True

    def __init__(self, process: Process, offset: Literal["none", "exact"] = "none") -> None:
        super().__init__(process)
        if offset not in ("none", "exact"):
            raise ValueError(f'offset is {offset!r}, but it must be "none" or "exact"')
        self.offset = offset

    def __repr__(self) -> str:
        return f"Posterior({self.process}, offset={self.offset!r})"

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        """Unnormalised log mu over the clean tokens; infinite offsets (an unmasked site under absorbing) are left out."""
        clean = self._logits(output, x_t, t)[..., : self.process.vocab]
        if isinstance(self.process, RankOne):
            if self.offset == "none":
                return clean
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
            return torch.log_softmax(self.posterior_logits(output, x_t, t), -1)
        return torch.log_softmax(self._logits(output, x_t, t)[..., : self.process.vocab], -1)

    def offset_at_current_token(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        """What is added to the logit of the current token under a rank-one process: log1p(alpha/m_t(k)); 0 without an offset.

        It is 0 too at the mask, and where it would be infinite (an unmasked site under absorbing).
        """
        assert isinstance(self.process, RankOne)
        site = self.process.at(x_t, to_float64(t))
        reached = site.own > 0
        if self.process.mask is not None:
            reached = reached & (x_t.long() != self.process.mask)
        offset = torch.where(reached, torch.log1p(site.alpha / site.own.where(reached, 1)), 0)
        return torch.zeros_like(offset) if self.offset == "none" else offset

    def log_posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log mu, -inf at the mask; log e_k where the current token is certainly clean."""
        log_mu = torch.log_softmax(self.posterior_logits(output, x_t, t), -1)
        log_mu = torch.nn.functional.pad(log_mu, (0, self.process.states - self.process.vocab), value=-torch.inf)
        if isinstance(self.process, RankOne) and self.process.mask is not None:
            known = site_coefficients(self.process, x_t, t, log_mu.dtype).own == 0
            certain = scatter_at(torch.full_like(log_mu, -torch.inf), x_t, 0.0)
            log_mu = torch.where(known.unsqueeze(-1), certain, log_mu)
        return log_mu

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self.log_posterior(output, x_t, t).exp()

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self.log_posterior(output, x_t, t)

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log s_y of every candidate y, by the bridge; 0 at x_t. The score itself is its exponential.

        In logarithms, log(b mu_y + m(y) [off/m(k) + mu_k/(alpha+m(k))]), so that no small mu_y is rounded away.
        """
        if not isinstance(self.process, RankOne):
            return self._tabulated_log_score(output, x_t, t)
        log_mu = self.log_posterior(output, x_t, t)
        site = site_coefficients(self.process, x_t, t, log_mu.dtype)
        reached = site.own > 0
        divisor = torch.where(reached, site.own, 1)
        mu = log_mu.exp()
        off = torch.where(reached, scatter_at(mu, x_t, 0.0).sum(-1) / divisor, 0)
        common = off + gather_at(mu, x_t).squeeze(-1) / site.stay
        own_term = torch.where(reached, torch.log(site.alpha / divisor), 0).unsqueeze(-1) + log_mu
        mixed = torch.where(site.clean > 0, torch.log((site.clean * common).where(site.clean > 0, 1)), -torch.inf)
        clean = torch.logaddexp(own_term[..., : self.process.vocab], mixed.unsqueeze(-1))
        clean = torch.where(reached.unsqueeze(-1), clean, mixed.unsqueeze(-1))
        if self.process.mask is not None:
            last = torch.where(site.mask > 0, torch.log((site.mask * common).where(site.mask > 0, 1)), -torch.inf)
            clean = torch.cat([clean, last.unsqueeze(-1)], -1)
        return scatter_at(clean, x_t, 0.0)

    def _tabulated_log_score(self, output: Output, x_t: Tensor, t: Tensor) -> Tensor:
        """log (nu P)_y / (nu P)_k with nu ∝ mu / P_t(k|.), in float64: kernel entries go far below float32's range."""
        logits = self.posterior_logits(output, x_t, t)
        kernel = self.process.kernel(to_float64(t))
        likelihood = select_rows(kernel, x_t, -1)[..., : self.process.vocab]
        log_nu = logits.to(kernel.dtype) - safe_log(likelihood).where(likelihood > 0, 0)
        nu = torch.nn.functional.pad(torch.softmax(log_nu, -1), (0, self.process.states - self.process.vocab))
        distribution = apply_transition(nu, kernel)
        log_law = torch.where(distribution > 0, torch.log(distribution.where(distribution > 0, 1)), -torch.inf)
        return scatter_at(log_law - gather_at(log_law, x_t), x_t, 0.0).to(logits.dtype)


class _UnconstrainedScore(Head):
    """A score that no posterior need stand behind."""

    predicts_score = True

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return affine_inverse(self.log_score(output, x_t, t).exp(), x_t, t, self.process)

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log of s_y P_t(k|y), normalised over clean y: positive where the score is, the posterior itself as t tends to 0."""
        log_score = self.log_score(output, x_t, t)
        joint = log_score + safe_log(self.process.columns(x_t, to_float64(t))).to(log_score.dtype)
        if self.process.mask is not None:
            joint = torch.nn.functional.pad(joint[..., : self.process.vocab], (0, 1), value=-torch.inf)
        return torch.log_softmax(joint, -1)


class LogScore(_UnconstrainedScore):
    """SEDD: the output is log s itself, any real number for any candidate.

    With `scale="sigma"`, for an absorbing mask and as in SEDD's release, log s = output - log(expm1 sigma) - log K, where
    expm1(sigma) = (1 - alpha)/alpha. There the truth is log mu_y - log(expm1 sigma), so the output itself says log(K mu_y).
    """

    def __init__(self, process: Process, scale: Literal["none", "sigma"] = "none") -> None:
        super().__init__(process)
        if scale not in ("none", "sigma"):
            raise ValueError(f'scale is {scale!r}, but it must be "none" or "sigma"')
        if scale == "sigma" and not isinstance(process, Absorbing):
            raise TypeError(f'scale "sigma" is for m2s.Absorbing, not for {process}')
        self.scale = scale

    def __repr__(self) -> str:
        return super().__repr__() if self.scale == "none" else f"LogScore({self.process}, scale={self.scale!r})"

    def shift(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        """What is taken from the output, at every site; float64 where the device has it."""
        time = validation.align("t", to_float64(t), x_t).expand(x_t.shape)
        if self.scale == "none":
            return torch.zeros_like(time)
        assert isinstance(self.process, Absorbing)
        schedule = self.process.schedule
        return torch.log(schedule.beta(time) / schedule.alpha(time)) + math.log(self.process.vocab)

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log s_y of every candidate y: the output itself, less SEDD's shift where `scale` says so; 0 at x_t. The score that
        `m2s.classify` and `m2s.project` take is its exponential."""
        values = self._logits(output, x_t, t)
        if self.scale == "sigma":
            values = values - self.shift(x_t, t).to(values.dtype).unsqueeze(-1)
        return scatter_at(values, x_t, 0.0)


class FactorizedRate(_UnconstrainedScore):
    """Neural CTMC: total exit rate and jump law predicted apart.

    Of the output at a site with current token k, the entries off k are the logits of the jump law J over the candidates
    that have a forward rate into k, and the entry at k is the log of the exit rate in units of the forward rates into k:

        exit = e^{output_k} sum_y Q_t(y -> k),    reverse rate k -> y = exit J_y,    s_y = exit J_y / Q_t(y -> k).
    """

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log s_y of every candidate y, from exit rate and jump law; 0 at x_t. The score itself is its exponential."""
        values = self._logits(output, x_t, t)
        rates = self.process.rates_into(x_t, to_float64(t))
        total = rates.sum(-1, keepdim=True)
        counted = torch.where(total > 0, rates > 0, True)  # where nothing leads into k the score carries no weight
        log_jump = torch.log_softmax(scatter_at(values.where(counted, -torch.inf), x_t, -torch.inf), -1)
        if isinstance(self.process, RankOne):
            share = torch.full_like(rates, self.process.states - 1)  # the same rate from everywhere, infinite or not
        else:
            share = torch.where(rates > 0, total / rates.where(rates > 0, 1), 1)
        return scatter_at(gather_at(values, x_t) + log_jump + torch.log(share).to(values.dtype), x_t, 0.0)
