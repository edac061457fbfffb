"""The NELBO of a finite chain, and the training loss of D3PM (Austin et al. 2021).

    -log p(x_0) <= KL(q(x_T|x_0) || reference) + sum_{n=2}^T E KL(q(x_{n-1}|x_n, x_0) || p(x_{n-1}|x_n)) + E[-log p(x_0|x_1)],

    p(x_{n-1}|x_n) = sum_z q(x_{n-1}|x_n, z) mu_z

In `m2s.elbo(model, head, x_0)` the sum is the integral and the last term is the reconstruction.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import Head
from m2s.heads.output import logits
from m2s.losses.matrix_terms import log_leave_one_out, other_tokens, sum_of_terms
from m2s.ops.last_layer import Output
from m2s.process import Chain

AUXILIARY = 1e-3  # lambda


def chain_kl(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute T KL(q(x_{n-1}|x_n, x_0) || p(x_{n-1}|x_n)), n the step of t; 0 at n = 1, which is the reconstruction term.

    Args:
        head: A head with a posterior, over `m2s.Chain`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].
    """
    divergence = chain(head, output, x_0, x_t, t)
    return torch.where(validation.align("t", _chain(head).index(t), x_t) > 1, divergence, 0)


def chain(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute `chain_kl` plus the first step, T (-log p(x_0|x_1)): the NELBO that is trained.

    Args:
        head: A head with a posterior, over `m2s.Chain`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].
    """
    return _chain(head).steps * _divergence(head, output, x_0, x_t, t)


def d3pm(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute `chain` plus the auxiliary cross entropy T lambda (-log nu_{x_0}), lambda = 0.001; for training, not an NELBO.

    nu is the distribution that the network itself predicts, as in the paper: the leave-one-out distribution, or mu for
    a head without offset.

    Args:
        head: A head with a posterior, over `m2s.Chain`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].
    """
    values = logits(output, x_t, _chain(head).states)
    log_nu = head.log_network_distribution(values, x_t, t)
    entropy = -gather_at(log_nu, x_0).squeeze(-1).to(values.dtype)
    return chain(head, values, x_0, x_t, t) + _chain(head).steps * AUXILIARY * entropy


def _chain(head: Head) -> Chain:
    """Return the chain of a head, or raise TypeError where the head is not a posterior over a chain."""
    process = head.process.chain
    if not head.has_posterior or process is None:
        raise UnsupportedError("the NELBO of a finite chain", head, "a posterior", Chain)
    return process


def _divergence(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """Compute KL(q(x_{n-1}|x_n, x_0) || p(x_{n-1}|x_n)), which at n = 1 is -log mu_{x_0}.

    With nu proportional to mu / P_n(k|.), both distributions are Q_n(k|y) times another one, normalized: P_{n-1}(y|x_0) for
    q and (nu P_{n-1})_y for p. So it is a sum of `m2s.losses.matrix_terms`.

    It is computed in the dtype of the output where the network's softmax is nu, and else in float64: mu / P_n(k|.), and the
    tails of an ordinal head, exceed the range of float32. For K = 256, over all steps of D3PM's three chains, the error in
    float32 is below 2e-5 of the loss plus 2e-9 nats.
    """
    process = _chain(head)
    validation.tokens("x_0", x_0, process.vocab)
    validation.tokens("x_t", x_t, process.states)
    validation.same_shape("x_0", x_0, "x_t", x_t)
    validation.times("t", t, low=1e-6)
    validation.align("t", t, x_t)
    output, given = logits(output, x_t, process.states), to_float64(t)
    values = output if head.softmax_is_leave_one_out else output.to(given.dtype)
    t, before = given.to(values.dtype), process.previous_time(given).to(values.dtype)
    likelihood = process.columns(x_t, t)[..., : process.vocab]
    log_nu = log_leave_one_out(head, values, likelihood, x_t, t)
    step_likelihood, clean = process.last_step_columns(x_t, t), process.rows(x_0, before)
    others, log_nu_clean = other_tokens(log_nu, likelihood, x_0, process.transition_matrix(before))
    others_total, clean_total = ((step_likelihood * part).sum(-1, keepdim=True) for part in (others, clean))
    return sum_of_terms(others, others_total, clean, clean_total, log_nu_clean, step_likelihood).to(output.dtype)
