"""Capabilities of a head that samplers need, and the default sampler of a head."""

from enum import Enum

from m2s.heads import Head

AUTOREGRESSIVE = "autoregressive"


class Need(Enum):
    """A capability of a head, or of its process, that a sampler uses.

    A sampler lists its needs in `Sampler.needs`. `check_need` raises an error where a head does not have one of them.
    """

    POSTERIOR = "posterior"
    """The head predicts a posterior over clean tokens, not an unconstrained score."""
    RATES = "rates"
    """The process runs in continuous time, so that it has rates."""
    RANK_ONE = "rank one"
    """The process is `m2s.Uniform`, `m2s.Absorbing`, `m2s.Hybrid` or another rank-one process."""
    PURE_MASK = "pure mask"
    """The only noise is an absorbing mask (`m2s.Absorbing`)."""
    TRANSITIONS = "transitions"
    """The process has transition matrices, so that there is a reverse process. Every `Sampler` needs it."""
    NEXT_TOKEN = "next token"
    """The head predicts the next token, given the tokens before it."""


class Preserves(Enum):
    """For which sequences a step from t to s turns p_t into p_s, given the exact posterior or score at t.

    A sampler declares it as `NamedSampler.preserves_marginal`, for its default options. `tests/samplers/test_marginals.py`
    proves each declaration by enumeration.
    """

    ALL_SITES = "any number of sites"
    """Sequences of any length."""
    ONE_SITE = "one site"
    """Sequences of one token. In longer ones, sites that move in the same step are drawn independently of each other."""
    NOTHING = "no"
    """Not even sequences of one token, or tokens one at a time."""


def has_capability(head: Head, need: Need) -> bool:
    """Return whether a head has a capability.

    Args:
        head: The head.
        need: The capability.

    Returns:
        True where the head, or its process, has it.
    """
    process = head.process
    if need is Need.POSTERIOR:
        return head.has_posterior
    if need is Need.RATES:
        return process.has_rates
    if need is Need.RANK_ONE:
        return process.rank_one is not None
    if need is Need.PURE_MASK:
        return process.rank_one is not None and process.rank_one.is_pure_mask
    if need is Need.TRANSITIONS:
        return process.has_transitions
    return head.generates_left_to_right


def check_need(sampler: str, need: Need, head: Head) -> None:
    """Raise an error where a head does not have a capability that a sampler needs.

    Args:
        sampler: The name of the sampler, for the message.
        need: The capability.
        head: The head.

    Raises:
        TypeError: The head does not have it. The message says which sampler to use instead.
    """
    if has_capability(head, need):
        return
    process, kind = head.process, type(head).__name__
    reason = {
        Need.POSTERIOR: f"draws from a posterior, but {kind} predicts an unconstrained score, which need not have one",
        Need.RATES: f"needs the rates of a process in continuous time, but the process is {process}",
        Need.RANK_ONE: f"supports rank-one processes (Uniform, Absorbing, Hybrid), but the process is {process}",
        Need.PURE_MASK: f"supports m2s.Absorbing only, but the process is {process}",
        Need.TRANSITIONS: f"simulates a reverse process, but {head} has none: it generates from left to right",
        Need.NEXT_TOKEN: f"draws the next token, which {kind} does not predict",
    }[need]
    raise TypeError(f"sampler {sampler!r} {reason}; {alternative(head)}")


def alternative(head: Head) -> str:
    """Return the advice of an error message: which sampler, or which head, to use.

    Args:
        head: The head that a sampler does not support.

    Returns:
        A clause that starts with "use".
    """
    if head.process.chain is not None and not head.has_posterior:
        return "use m2s.Posterior: a finite chain has no rates, so no sampler draws from a score over it"
    projected = "" if head.has_posterior else ", or m2s.Projected(head), which has a posterior"
    return f"use sampler={default_sampler(head)!r}{projected}"


def default_sampler(head: Head, for_audit: bool = False) -> str:
    """Return the name of the sampler that `sampler="auto"` stands for.

    | head | sampler |
    |---|---|
    | predicts the next token | autoregressive |
    | has a posterior | bayes, the exact finite step |
    | unconstrained score, rank-one process | analytic, as in SEDD's release |
    | unconstrained score, other process | tau_leaping |

    Args:
        head: The head to draw from.
        for_audit: An audit looks at scores, so it uses the samplers of an unconstrained score for every head. It uses euler in
            place of tau_leaping.

    Returns:
        A name in `m2s.samplers.SAMPLERS`.
    """
    if head.generates_left_to_right:
        return AUTOREGRESSIVE
    if head.has_posterior and not for_audit:
        return "bayes"
    if head.process.rank_one is not None:
        return "analytic"
    return "euler" if for_audit else "tau_leaping"
