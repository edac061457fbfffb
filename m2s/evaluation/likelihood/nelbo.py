"""The NELBO of m2s with all of its terms, and its integral alone, which most papers report.

The integral of a finite chain is the sum over its steps 2..T, and its first step is the reconstruction (`m2s.losses.d3pm`).

Times have the density 1/(t + 0.1), and are uniform under masking: so each had the smaller variance in
`experiments/variance.py` where passes are independent. Under uniform, masking and hybrid noise the reconstruction term is
split: the case that no token was replaced at t_min is exact, and the rest, whose probability is about L t_min, is sampled.
"""

from jaxtyping import Float
from torch import Tensor

from m2s.evaluation.likelihood.base import (
    Estimator,
    Options,
    Term,
    interval,
    needs_prior,
    needs_reverse_process,
    no_terms_missing,
    reconstruction,
)
from m2s.evaluation.likelihood.levels import Point, Steps, Times
from m2s.evaluation.likelihood.touched import Touched, Untouched
from m2s.heads import Head
from m2s.losses.d3pm import chain_kl
from m2s.losses.score_entropy import score_entropy
from m2s.ops.last_layer import Output

IMPORTANCE = 0.1  # c of the density 1/(t + c) of times


def integral_terms(head: Head, options: Options) -> list[Term]:
    """Return the integral of the score entropy over [t_min, T], without its ends.

    Args:
        head: The head.
        options: The options.
    """
    if head.process.chain is not None:
        return [Term("integral", Steps(head.process.chain.steps, first=2), _one_step)]
    low, high = interval(head, options)
    return [Term("integral", Times(low, high, importance=importance_of(head)), score_entropy)]


def importance_of(head: Head) -> float | None:
    """Return c of the density 1/(t + c) of times; None for uniform times, under masking.

    Args:
        head: The head.
    """
    return None if is_masking(head) else IMPORTANCE


def is_masking(head: Head) -> bool:
    """Return whether the process only masks, and the head has a posterior.

    Args:
        head: The head.
    """
    process = head.process.rank_one
    return process is not None and process.is_pure_mask and head.has_posterior


def nelbo_terms(head: Head, options: Options) -> list[Term]:
    """Return integral, prior and reconstruction.

    Args:
        head: The head.
        options: The options.
    """
    chain = head.process.chain
    first = interval(head, options)[0] if chain is None else 1 / chain.steps
    return [*integral_terms(head, options), Term("prior"), *last_terms(head, first)]


def _one_step(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> Float[Tensor, "*site"]:
    """The divergence of a step of a finite chain, in nats per position: `chain_kl` has the mean over steps, times T."""
    assert head.process.chain is not None
    return chain_kl(head, output, x_0, x_t, t) / head.process.chain.steps


def last_terms(head: Head, t: float) -> list[Term]:
    """Return the reconstruction term at a time, split where the process is rank-one.

    Under masking, a sequence without masks is certain: that part is 0 and left out.

    Args:
        head: The head.
        t: The time.
    """
    process = head.process.rank_one
    if process is None:
        return [Term("reconstruction", Point(t), reconstruction)]
    sampled = Term("reconstruction", Touched(t), reconstruction)
    return [sampled] if is_masking(head) else [sampled, Term("reconstruction", Untouched(t), reconstruction)]


def _missing(head: Head, options: Options) -> tuple[str, ...]:
    """The integral lacks the last step, and the prior unless the process is at its reference at the end of the integral."""
    return ("reconstruction", "prior") if needs_prior(head, interval(head, options)[1]) else ("reconstruction",)


NELBO = Estimator(
    title="NELBO of m2s: integral, prior and reconstruction",
    source="Theorem 4.2 of the paper",
    build=nelbo_terms,
    missing=no_terms_missing,
    unsupported=needs_reverse_process,
)
INTEGRAL = Estimator(
    title="integral over [t_min, T] alone",
    source="what most papers report",
    build=integral_terms,
    missing=_missing,
    unsupported=needs_reverse_process,
)
