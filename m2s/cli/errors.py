"""Error messages for the command line: options as they are typed, and what to type instead."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from m2s.cli.options import flag
from m2s.errors import UserError

GENERAL = ("bayes", "analytic", "euler", "tau_leaping")  # the general samplers, which error messages offer first

if TYPE_CHECKING:
    from m2s.heads import Head
    from m2s.process import Process
    from m2s.samplers import Sampler


def message(error: UserError, options: Collection[str]) -> str:
    """Return the message of an error, with an argument's name replaced by the option that sets it.

    Args:
        error: The error. Its attribute `option` may name a Python argument, such as "top_k".
        options: The options of the command, such as "--top-k".

    Returns:
        The message with "--top-k" in place of "top_k". It is the plain message where the command has no such option.
    """
    typed = None if error.option is None else flag(error.option)
    return error.describe(typed) if typed in options else str(error)


def supports(sampler: "str | Sampler", head: "Head") -> bool:
    """Return whether a sampler can draw from a head.

    Args:
        sampler: The sampler, or its name.
        head: The head.
    """
    from m2s.samplers.options import SamplingOptions

    try:
        SamplingOptions(head, (1, 2), sampler=sampler)
    except (TypeError, ValueError):
        return False
    return True


def unsupported_sampler(sampler: "Sampler", head: "Head", checkpoint: str, project: str) -> UserError:
    """Return the error for a sampler that cannot draw from a checkpoint, with the samplers that can.

    Args:
        sampler: The sampler that was chosen.
        head: The head of the checkpoint.
        checkpoint: The checkpoint, as it was typed.
        project: What to type to project scores, "--project" or "m2s sample --project".

    Returns:
        The error. Its hint names the samplers that support the head, the processes that the sampler supports where the process
        is what it does not support, and projection where the head predicts an unconstrained score.
    """
    from m2s.realizability import Projected
    from m2s.samplers.registry import SAMPLERS, default_sampler

    output = "a posterior" if head.has_posterior else "an unconstrained score"
    reason = f"sampler {sampler.name!r} does not support {checkpoint}, which predicts {output}, {head}"
    kinds = {name: process for name, process in _processes().items() if supports(sampler, _like(head, process))}
    if kinds and type(head.process) not in {type(process) for process in kinds.values()}:
        reason += f"; it needs a model trained with --process.kind {_either(list(kinds))}"
    supported = [name for name in SAMPLERS if supports(name, head)] or [default_sampler(head)]
    first = [name for name in GENERAL if name in supported] or supported
    others = [name for name in supported if name not in first]
    advice = f"use --sampler {_either(first)}"
    if not head.has_posterior and head.process.chain is None and supports(sampler, Projected(head)):
        advice += f", or {project}, which gives the score a posterior"
    return UserError(f"{reason}: {advice}" + (f"; also supported: {', '.join(others)}" if others else ""))


def _processes() -> "dict[str, Process]":
    """A small process of each kind that samplers distinguish, by its --process.kind."""
    import m2s

    return {
        "uniform": m2s.Uniform(2, m2s.Linear()),
        "absorbing": m2s.Absorbing(2, m2s.Linear()),
        "hybrid": m2s.Hybrid(2, p_uniform=0.1),
        "gaussian": m2s.RateMatrix.uniform(2, m2s.Linear()),
    }


def _like(head: "Head", process: "Process") -> "Head":
    """A head of the same kind over another process."""
    import m2s

    return m2s.Posterior(process) if head.has_posterior else m2s.LogScore(process)


def _either(names: list[str]) -> str:
    """Names as a choice: "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
