"""The autoregressive law, in the terms of everything else: a process that loses nothing, and a head for what comes next."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.heads.base import Head
from m2s.ops.last_layer import Output
from m2s.process import Process


class Shifted(Process):
    """Nothing is corrupted, whatever the time: the network is shown the sequence moved on by one site, behind a start token.

    The start token is the state `vocab`. As the mask it also stands for a token that is yet to be drawn.
    """

    def __init__(self, vocab: int) -> None:
        validation.positive_int("vocab", vocab, low=2)
        self.vocab, self.states, self.mask = vocab, vocab + 1, vocab

    def network_input(self, x: Int[Tensor, "*b L"]) -> Int[Tensor, "*b L"]:
        """(start, x^1, ..., x^{L-1})."""
        return torch.nn.functional.pad(x[..., :-1], (1, 0), value=self.vocab)

    def corrupt(
        self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"], generator: torch.Generator | None = None
    ) -> Int[Tensor, "*site"]:
        validation.tokens("x_0", x_0, self.vocab)
        return self.network_input(x_0.long())

    def rows(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """All of the law on the token before."""
        validation.align("t", t, x_0)
        return torch.nn.functional.one_hot(self.network_input(x_0.long()), self.states).to(t.dtype)

    def reference(self) -> Float[Tensor, "S"]:
        """Every token is yet to be drawn."""
        return torch.nn.functional.one_hot(torch.tensor(self.vocab), self.states).double()

    def prior_kl(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        """0: no law stands in for what was lost."""
        return torch.zeros(x_0.shape, dtype=torch.float64, device=x_0.device)

    def kernel(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        raise TypeError(f"{self} corrupts nothing and has neither kernels nor rates: use sampler='autoregressive'")

    def step_kernel(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return self.kernel(t)

    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return self.kernel(t)

    def __repr__(self) -> str:
        return f"Shifted({self.vocab})"


class NextToken(Head):
    """Autoregressive: the output at a site is the logits of its token's law given the tokens before, Pr(X^i = . | X^{<i}).

    The network must be causal: what it says at a site depends on what it is shown there and before alone.
    """

    has_posterior = True
    exact = True
    sampler = "autoregressive"

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        if not isinstance(process, Shifted):
            raise TypeError(f"the next token is predicted where nothing is corrupted: by m2s.heads.Shifted, not {process}")

    def network_input(self, x: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        assert isinstance(self.process, Shifted)
        return self.process.network_input(x)

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        return self._logits(output, x_t, t)[..., : self.process.vocab]

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log Pr(X^i = . | X^{<i}): nothing is lost, so that this is all of the likelihood."""
        log_law = torch.log_softmax(self.posterior_logits(output, x_t, t), -1)
        return torch.nn.functional.pad(log_law, (0, 1), value=-torch.inf)

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self.last_step(output, x_t, t).exp()

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        raise TypeError(f"{self} has no score, for nothing is corrupted: its loss is likelihood, its sampler autoregressive")
