"""Heads by name, as `m2s train --head.kind` takes them.

An entry is a function of a process that builds the head. Its keyword-only arguments are the options that it reads.

    @HEADS.register("my-head")
    def my_head(process: Process, *, temperature: float = 1.0) -> MyHead:
        return MyHead(process, temperature)
"""

from collections.abc import Callable
from typing import Literal

from m2s.heads.base import Head
from m2s.heads.factorized_rate import FactorizedRate
from m2s.heads.log_score import LogScore
from m2s.heads.next_token import NextToken, Shifted
from m2s.heads.ordinal import Ordinal
from m2s.heads.posterior import Posterior
from m2s.process import Process
from m2s.process.registry import PROCESSES
from m2s.registry import Registry

HEADS: Registry[Callable[..., Head]] = Registry("head")
Offset = Literal["none", "exact"]
Scale = Literal["none", "sigma"]


@PROCESSES.register("none")
def none(vocab: int) -> Shifted:
    """Build the process of an autoregressive model, which corrupts nothing.

    Args:
        vocab: The number of clean tokens.

    Returns:
        The process.
    """
    return Shifted(vocab)


@HEADS.register("posterior")
def posterior(process: Process, *, offset: Offset = "none") -> Posterior:
    """Build a head whose output is the logits of the posterior of the clean token.

    Args:
        process: The process.
        offset: "exact": the output is the logits of the leave-one-out distribution. "none": of the posterior itself.

    Returns:
        The head.
    """
    return Posterior(process, offset)


@HEADS.register("ordinal")
def ordinal(process: Process, *, offset: Offset = "none") -> Ordinal:
    """Build a posterior over ordered levels, given by a mean and a scale.

    Args:
        process: The process.
        offset: As for "posterior".

    Returns:
        The head.
    """
    return Ordinal(process, offset)


@HEADS.register("log-score")
def log_score(process: Process, *, scale: Scale = "none") -> LogScore:
    """Build a head whose output is unconstrained log scores (SEDD).

    Args:
        process: The process.
        scale: "sigma": subtract log(expm1 sigma) + log K from the output, as SEDD's release does under a mask.

    Returns:
        The head.
    """
    return LogScore(process, scale)


@HEADS.register("factorized-rate")
def factorized_rate(process: Process) -> FactorizedRate:
    """Build a head whose output is an exit rate and a jump distribution (Neural CTMC).

    Args:
        process: The process.

    Returns:
        The head.
    """
    return FactorizedRate(process)


@HEADS.register("next-token")
def next_token(process: Process) -> NextToken:
    """Build the head of an autoregressive model.

    Args:
        process: The process "none".

    Returns:
        The head.
    """
    return NextToken(process)
