"""The interface of every head: what a network's output means under a forward process."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.errors import explain_arguments
from m2s.heads.output import logits
from m2s.ops.last_layer import Output
from m2s.process import Process

LACKS = {
    "posterior": "is an unconstrained score, which need not have a posterior: m2s.Projected(head) has the nearest one",
    "score": "has no score, because nothing is corrupted: use the loss likelihood and sampler='autoregressive'",
}


def missing(head: "Head", capability: str) -> TypeError:
    """Return the error for a capability that a head declares not to have.

    Args:
        head: The head.
        capability: "posterior" where `has_posterior` is False, "score" where `has_score` is False.
    """
    return TypeError(f"{head} {LACKS[capability]}")


class Head(ABC):
    """What the output of a network means under a forward process.

    Every head turns an output into three things: `posterior`, `log_score`, and `last_step`, the distribution from which the
    clean token is drawn at the last step. An output is a tensor [*site, V] with V >= `process.states` columns, of which those
    past `process.states` are padding, or an `m2s.Unprojected`.

    Args:
        process: The forward process.

    Attributes:
        has_posterior: Whether every output has a true posterior, so that `posterior_logits` exists.
        has_score: Whether `log_score` exists. Next-token prediction has none, because nothing is corrupted.
        predicts_score: Whether the output is a score, whose posterior is found by inverting the noise of its time.
        excludes_t_one: Whether t = 1 is excluded: samplers evaluate the head at 1 - t_min there.
        exact: Whether `last_step` is the exact likelihood, as for an autoregressive model: there is no noise.
        generates_left_to_right: Whether the head predicts the next token, and not the reverse process.

    Raises:
        TypeError: `process` is not a process.
    """

    has_posterior: ClassVar[bool] = False
    has_score: ClassVar[bool] = True
    predicts_score: ClassVar[bool] = False
    excludes_t_one: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    generates_left_to_right: ClassVar[bool] = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        explain_arguments(cls)

    def __init__(self, process: Process) -> None:
        validation.instance("process", process, Process, "a process such as m2s.Uniform(256, m2s.Linear())")
        self.process = process

    @abstractmethod
    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the posterior mu = Pr(X_0 = . | X_t), or the signed affine inverse of an unconstrained score.

        Args:
            output: The network's output at (x_t, t), [*site, V].
            x_t: Current tokens, [*site].
            t: Times, [*b].

        Returns:
            Probabilities, [*site, S], 0 at the mask. For an unconstrained score they can be negative.
        """

    @abstractmethod
    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log s_y = log p_t(x^{i->y}) / p_t(x) of every candidate y. Only heads with `has_score` have one.

        The score that `m2s.classify` and `m2s.project` take is its exponential, `head.log_score(output, x_t, t).exp()`.

        Args:
            output: The network's output at (x_t, t), [*site, V].
            x_t: Current tokens, [*site].
            t: Times, [*b].

        Returns:
            Log-scores, [*site, S], in float32 or wider; 0 at x_t.

        Raises:
            TypeError: The head has no score.
        """

    @abstractmethod
    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the log of the distribution from which x_0 is drawn at a small t.

        Args:
            output: The network's output at (x_t, t), [*site, V].
            x_t: Current tokens, [*site].
            t: Times, [*b].

        Returns:
            Log-probabilities, [*site, S]; -inf at the mask.
        """

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        """Return the unnormalized log-posterior of the clean tokens. Only heads with `has_posterior` have one.

        Args:
            output: The network's output at (x_t, t), [*site, V].
            x_t: Current tokens, [*site].
            t: Times, [*b].

        Returns:
            Logits, [*site, K].

        Raises:
            TypeError: The head has no posterior.
        """
        raise missing(self, "posterior")

    def log_network_distribution(
        self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*site K"]:
        """Return the log of the distribution of the clean token that the network itself predicts.

        It is mu, or nu for a head with an exact offset. Only heads with `has_posterior` have one.

        Args:
            output: The network's output at (x_t, t), [*site, V].
            x_t: Current tokens, [*site].
            t: Times, [*b].

        Returns:
            Log-probabilities, [*site, K].
        """
        return torch.log_softmax(self.posterior_logits(output, x_t, t), -1)

    @property
    def softmax_is_leave_one_out(self) -> bool:
        """Whether the softmax of the output is the leave-one-out distribution nu. Losses from transition matrices are then
        computed in float32, and otherwise in float64."""
        return False

    def network_input(self, x: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        """Return the tokens that the network sees while `x` is sampled: `x` itself, except for autoregressive heads.

        Args:
            x: Tokens during sampling, [B, L].

        Returns:
            Tokens, [B, L].
        """
        return x

    def _logits(self, output: Output, x_t: Tensor, t: Tensor) -> Tensor:
        """Validate the arguments and return the output without padding, [*site, S], in float32 or wider."""
        validation.tokens("x_t", x_t, self.process.states)
        validation.times("t", t)
        validation.align("t", t, x_t)
        return logits(output, x_t, self.process.states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.process})"
