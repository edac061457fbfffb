"""What an estimator of the likelihood is: a sum of terms, and what it lacks for an upper bound on the NLL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.evaluation.likelihood.levels import Levels
from m2s.evaluation.likelihood.touched import Untouched
from m2s.heads import Head
from m2s.losses.elbo import NelboTerms, prior_nats
from m2s.losses.registry import Loss
from m2s.ops.last_layer import Output
from m2s.process.chain import time_interval

TermName = Literal["integral", "prior", "reconstruction"]
Reverse = Literal["continuous", "uniform-last", "shares", "steps", "any-order"]


@dataclass(frozen=True)
class Options:
    """What every estimator may need to know.

    Args:
        t_min: The smallest time that the network sees, and the start of the integral of `nelbo`.
        steps: The number T of steps of the estimators in discrete time. A finite chain (`m2s.Chain`) has its own.

    Raises:
        UserError: A number is out of range.
    """

    t_min: float = 1e-3
    steps: int = 128

    def __post_init__(self) -> None:
        validation.in_interval("t_min", self.t_min, "(0, 0.5)")
        validation.positive_int("steps", self.steps, 2)


@dataclass(frozen=True)
class Term:
    """One term of an estimator: a mean over noise of a function of the network's output.

    Args:
        name: "integral", "prior" or "reconstruction".
        levels: How noise is drawn. None: the prior of `m2s.losses.prior_nats`, which draws none.
        value: A loss, nats per position, at the drawn noise.
        end: The time of the prior; None: the end of the interval of `NelboTerms`.
    """

    name: TermName
    levels: Levels | None = None
    value: Loss | None = None
    end: float | None = None

    @property
    def fixed(self) -> bool:
        """Whether the term draws no noise, so that one pass is enough."""
        return self.levels is None or isinstance(self.levels, Untouched)

    def calls(self, head: Head) -> int:
        """Return how often the network is called in one pass.

        Args:
            head: The head of the network.
        """
        return 1 if self.levels is not None else int(head.process.has_clean_tokens_at_end)

    def prior(
        self, network: NelboTerms, x_0: Int[Tensor, "B L"], condition: Tensor | None = None, shared: bool = False
    ) -> Float[Tensor, "B L"]:
        """Return the prior term in nats per position.

        Args:
            network: The network.
            x_0: Clean tokens, [B, L].
            condition: The network's third argument, [B, ...]; None: it gets none.
            shared: One call of the network for all examples (see `m2s.losses.prior_nats`).

        Returns:
            Nats, [B, L], float64.
        """
        end = network.interval[1] if self.end is None else self.end
        return prior_nats(
            network.head, lambda x_t, t: network.network(x_t, t, condition), x_0, end, shared, network.t_min
        ).double()


@dataclass(frozen=True)
class Estimator:
    """A named estimator of the likelihood.

    Args:
        title: What it is, in a few words.
        source: The publication.
        build: Returns its terms for a head and options.
        missing: Returns the names of what it lacks for an upper bound on the NLL; an empty tuple if it is an upper bound.
        unsupported: Returns why a head cannot be evaluated; an empty string if it can.
        reverse: The reverse process whose NLL it bounds: in continuous time with the last step of the head or a uniform draw,
            over shares of masks, in T steps, or one mask at a time.
        note: What a user should know.
    """

    title: str
    source: str
    build: Callable[[Head, Options], Sequence[Term]]
    missing: Callable[[Head, Options], tuple[str, ...]]
    unsupported: Callable[[Head], str]
    reverse: Reverse = "continuous"
    note: str = ""

    def terms(self, head: Head, options: Options) -> tuple[str, ...]:
        """Return the names of its terms, each once.

        Args:
            head: The head.
            options: The options.
        """
        return tuple(dict.fromkeys(term.name for term in self.build(head, options)))

    def calls(self, head: Head, options: Options, passes: int = 1) -> int:
        """Return the network calls for one example.

        Args:
            head: The head.
            options: The options.
            passes: Draws of noise. A term without noise is computed once.
        """
        return sum(term.calls(head) * (1 if term.fixed else passes) for term in self.build(head, options))


def reconstruction(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> Float[Tensor, "*site"]:
    """Return -log p(x_0^i | x_t), the last step of the reverse process, in nats per position.

    Args:
        head: The head.
        output: The network's output at (x_t, t), [*site, V].
        x_0: Clean tokens, [*site].
        x_t: Noisy tokens, [*site].
        t: Times, [*b].

    Returns:
        Nats per position, [*site].
    """
    return -head.last_step(output, x_t, t).gather(-1, x_0.long().unsqueeze(-1)).squeeze(-1)


def needs_prior(head: Head, end: float) -> bool:
    """Return whether an integral that ends at a time lacks a prior term, because x_t there is not yet the reference.

    Args:
        head: The head.
        end: The end of the integral.
    """
    token, t = torch.zeros(1, dtype=torch.long), torch.full((1,), end, dtype=torch.float64)
    return bool((head.process.prior_kl(token, t) > 1e-12).any())


def lacks_ends(low: float, high: float) -> Callable[[Head, Options], tuple[str, ...]]:
    """Return what a mean over times in [low, high), without other terms, lacks for an upper bound.

    Args:
        low: The smallest time.
        high: The largest time.
    """

    def missing(head: Head, options: Options) -> tuple[str, ...]:
        parts = (("reconstruction", True), ("prior", needs_prior(head, high)), ("length of the interval", high - low < 1))
        return tuple(name for name, absent in parts if absent)

    return missing


def no_terms_missing(head: Head, options: Options) -> tuple[str, ...]:
    """Return nothing: the estimator is an upper bound.

    Args:
        head: The head.
        options: The options.
    """
    return ()


def needs_masks(head: Head) -> str:
    """Return why an estimator for masking noise and posteriors does not support a head.

    Args:
        head: The head.
    """
    process = head.process.rank_one
    if process is None or not process.is_pure_mask:
        return "it needs masking noise"
    return "" if head.has_posterior else "it needs a head with a posterior"


def needs_rates(head: Head) -> str:
    """Return why an estimator in continuous time does not support a head.

    Args:
        head: The head.
    """
    if not head.has_score:
        return "it needs a reverse process"
    return "" if head.process.has_rates else "it needs a process in continuous time"


def needs_reverse_process(head: Head) -> str:
    """Return why the NELBO does not support a head.

    Args:
        head: The head.
    """
    if not head.has_score:
        return "it needs a reverse process"
    return "it needs a head with a posterior" if head.process.chain is not None and not head.has_posterior else ""


def discrete_steps(head: Head, options: Options) -> int:
    """Return the number of steps T of estimators in discrete time: a finite chain has its own.

    Args:
        head: The head.
        options: The options.
    """
    return options.steps if head.process.chain is None else head.process.chain.steps


def interval(head: Head, options: Options) -> tuple[float, float]:
    """Return the ends of the integral of `nelbo`.

    Args:
        head: The head.
        options: The options.
    """
    return time_interval(head.process, options.t_min)
