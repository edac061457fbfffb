"""The discrete-time NELBO with T steps (D3PM, Austin et al. 2021; VDM), for any process with transition matrices.

    -log p(x_0) <= KL(q(x_1|x_0) || reference) + sum_{n=2}^T E KL(q(x_s|x_t, x_0) || p(x_s|x_t)) + E[-log p(x_0|x_{1/T})],

t = n/T, s = (n-1)/T, p(x_s|x_t) the Bayes step. It bounds the NLL of the reverse process with T Bayes steps. T is an option, or
the number of steps of a finite chain, whose NELBO this is.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import validation
from m2s.conversions.reverse_step import bayes_probabilities
from m2s.dtypes import to_float64
from m2s.evaluation.likelihood.base import (
    Estimator,
    Options,
    Term,
    discrete_steps,
    needs_prior,
    no_terms_missing,
    reconstruction,
)
from m2s.evaluation.likelihood.levels import Point, Steps
from m2s.heads import Head
from m2s.losses.registry import Loss
from m2s.ops.last_layer import Output
from m2s.process.base import kl_terms


def step_divergence(steps: int) -> Loss:
    """Return the loss KL(q(x_s|x_t, x_0) || p(x_s|x_t)), s = t - 1/T, in nats per position.

    Args:
        steps: T.
    """

    def divergence(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> Float[Tensor, "*site"]:
        process, t = head.process, to_float64(t)
        before = (t - 1 / steps).clamp(min=0)
        mu = head.posterior(output, x_t, t).double()
        clean = torch.zeros_like(mu).scatter(-1, x_0.long().unsqueeze(-1), 1.0)
        p, q = (bayes_probabilities(each, x_t, before, t, process) for each in (mu, clean))
        return kl_terms(q, p).sum(-1)

    return divergence


def masked_step(steps: int) -> Loss:
    """Return `step_divergence` in closed form under masking: (alpha_s - alpha_t)/(1 - alpha_t) (-log mu_{x_0}) at masks.

    Args:
        steps: T.
    """

    def divergence(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> Float[Tensor, "*site"]:
        process, t = head.process.rank_one, to_float64(t)
        assert process is not None
        before = (t - 1 / steps).clamp(min=0)
        share = (process.mixing(t).mask - process.mixing(before).mask) / process.mixing(t).mask
        log_mu = torch.log_softmax(head.posterior_logits(output, x_t, t), -1)
        nats = -log_mu.gather(-1, x_0.long().unsqueeze(-1)).squeeze(-1)
        return torch.where(process.is_mask(x_t), validation.align("t", share, x_t) * nats, 0)

    return divergence


def _kl_terms(head: Head, options: Options) -> list[Term]:
    """The divergences of the steps 2..T."""
    rank_one = head.process.rank_one
    pure = rank_one is not None and rank_one.is_pure_mask
    steps = discrete_steps(head, options)
    return [Term("integral", Steps(steps, first=2), (masked_step if pure else step_divergence)(steps))]


def _terms(head: Head, options: Options) -> list[Term]:
    """All three terms."""
    first = 1 / discrete_steps(head, options)
    return [*_kl_terms(head, options), Term("prior", end=1.0), Term("reconstruction", Point(first), reconstruction)]


def _dropped(head: Head, options: Options) -> tuple[str, ...]:
    """The first step, and the prior where it is not 0."""
    return ("reconstruction", "prior") if needs_prior(head, 1.0) else ("reconstruction",)


def _unsupported(head: Head) -> str:
    """It needs a reverse process with a posterior."""
    if not head.has_score:
        return "it needs a reverse process"
    return "" if head.has_posterior else "it needs a head with a posterior"


DISCRETE_TIME = Estimator(
    title="discrete-time NELBO with T steps",
    source="Austin et al. 2021",
    build=_terms,
    missing=no_terms_missing,
    unsupported=_unsupported,
    reverse="steps",
)
DISCRETE_KL = Estimator(
    title="divergences of the steps 2..T alone",
    source='the "discrete ELBO" of some released code',
    build=_kl_terms,
    missing=_dropped,
    unsupported=_unsupported,
    reverse="steps",
)
