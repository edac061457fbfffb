"""Next-token prediction: a process that corrupts nothing, and the head of an autoregressive network."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.errors import UnsupportedError
from m2s.heads.base import Head, missing
from m2s.ops.last_layer import Output
from m2s.process import Process


class Shifted(Process):
    """The input of next-token prediction: the sequence shifted by one site, behind a start token, at any time.

    The start token is the state `vocab`. It is also the mask: during generation it stands for a token that has not been drawn.
    There are no transition matrices and no rates (`has_transitions` is False).

    Args:
        vocab: The number of tokens.
    """

    has_transitions = False
    transition_matrix = step_transition_matrix = rates = None  # type: ignore[assignment]  # there are none: see `has_transitions`

    def __init__(self, vocab: int) -> None:
        validation.positive_int("vocab", vocab, low=2)
        self.vocab, self.states, self.mask = vocab, vocab + 1, vocab

    def network_input(self, x: Int[Tensor, "*b L"]) -> Int[Tensor, "*b L"]:
        """Return (start, x^1, ..., x^{L-1}).

        Args:
            x: Tokens, [*b, L].

        Returns:
            The tokens shifted by one position after the start token `vocab`, [*b, L].
        """
        return torch.nn.functional.pad(x[..., :-1], (1, 0), value=self.vocab)

    def corrupt(
        self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"], generator: torch.Generator | None = None
    ) -> Int[Tensor, "*site"]:
        """Return the network's input; nothing is random."""
        validation.tokens("x_0", x_0, self.vocab)
        return self.network_input(x_0.long())

    def rows(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the distribution of the network's input: probability 1 at the previous token."""
        validation.align("t", t, x_0)
        return torch.nn.functional.one_hot(self.network_input(x_0.long()), self.states).to(t.dtype)

    def reference(self) -> Float[Tensor, "S"]:
        """Return probability 1 at the mask: no token has been drawn."""
        return torch.nn.functional.one_hot(torch.tensor(self.vocab), self.states).double()

    def prior_kl(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        """Return 0, because nothing is corrupted."""
        return torch.zeros(x_0.shape, dtype=torch.float64, device=x_0.device)

    def __repr__(self) -> str:
        return f"Shifted({self.vocab})"


class NextToken(Head):
    """The output at a site is the logits of its token given the tokens before, Pr(X^i = . | X^{<i}).

    The network must be causal: its output at a site depends only on the input at that site and before. Samples are drawn by
    `m2s.samplers.autoregressive.generate_autoregressive`.

    Args:
        process: `Shifted(vocab)`.

    Raises:
        TypeError: The process is another one.
    """

    has_posterior = True
    has_score = False
    exact = True
    generates_left_to_right = True

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        if not isinstance(process, Shifted):
            raise UnsupportedError(
                "next-token prediction", process, process=Shifted, hint="next-token prediction has no corruption"
            )

    def network_input(self, x: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        assert isinstance(self.process, Shifted)
        return self.process.network_input(x)

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        return self._logits(output, x_t, t)[..., : self.process.vocab]

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log Pr(X^i = . | X^{<i}), [*site, S]. Nothing is corrupted, so this is the exact likelihood."""
        log_probabilities = torch.log_softmax(self.posterior_logits(output, x_t, t), -1)
        return torch.nn.functional.pad(log_probabilities, (0, 1), value=-torch.inf)

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self.last_step(output, x_t, t).exp()

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        raise missing(self, "score")
