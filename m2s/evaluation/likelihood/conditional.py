"""The likelihood of a continuation given a context: tokens of the context are clamped, those of the continuation are noised.

The estimate is an upper bound on -log p(continuation | context), where p generates with the context clamped, as
`m2s.sample(..., clamp=...)` does. Requests are batched by their length, so that no network sees padding, and the noise of a
request is a function of its tokens: neither order nor batch changes an estimate.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from m2s import validation
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError
from m2s.evaluation.likelihood.base import Options, Term
from m2s.evaluation.likelihood.design import draw_group, efficient, supports_designs
from m2s.evaluation.likelihood.masks import time_of_mask_share
from m2s.evaluation.likelihood.measure import draw_term
from m2s.evaluation.likelihood.nelbo import NELBO
from m2s.evaluation.likelihood.registry import ESTIMATORS
from m2s.heads import Head
from m2s.losses.elbo import NelboTerms
from m2s.losses.objective import Model
from m2s.modes import evaluation_mode
from m2s.ops.last_layer import Output


@dataclass(frozen=True)
class Request:
    """Tokens whose likelihood is asked for.

    Args:
        context: Tokens that are given.
        continuation: Tokens that are predicted, at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens."""
        return (*self.context, *self.continuation)

    @property
    def number(self) -> int:
        """The number of the request for random numbers: a function of its tokens."""
        data = np.array([len(self.context), *self.tokens], dtype=np.int64).tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """Tokenize a context and its continuation together, so that the boundary is tokenized as in running text.

    Spaces at the end of the context belong to the continuation. Without a context, the end token is the context, where the
    tokenizer has one.

    Args:
        tokenizer: The tokenizer.
        context: The given text.
        continuation: The predicted text.

    Returns:
        The request.

    Raises:
        UserError: The continuation has no tokens.
    """
    stripped = context.rstrip(" ")
    continuation, context = context[len(stripped) :] + continuation, stripped
    every, given = tokenizer.encode(context + continuation), tokenizer.encode(context)
    if len(every) <= len(given):
        raise UserError(f"the continuation {continuation!r} of {context[-40:]!r} has no tokens")
    start = [] if context or tokenizer.end is None else [tokenizer.end]
    return Request((*start, *every[: len(given)]), tuple(every[len(given) :]))


def windows(request: Request, length: int) -> Iterator[Request]:
    """Cut a request into requests of at most a number of tokens, in which every token is predicted exactly once.

    Context is dropped from the left. A continuation that is too long is predicted in windows: each is given the token before
    it, and the last one is given as many as fit.

    Args:
        request: The request.
        length: The greatest number of tokens.

    Yields:
        Requests, whose continuations together are that of the request.
    """
    tokens, first = request.tokens, len(request.context)
    if len(tokens) <= length:
        yield request
        return
    while first < len(tokens):
        given = min(first, max(1, length - (len(tokens) - first)))
        end = min(len(tokens), first - given + length)
        yield Request(tokens[first - given : first], tokens[first:end])
        first = end


@torch.no_grad()
def conditional_nats(
    model: Model,
    head: Head,
    requests: Sequence[Request],
    passes: int = 16,
    seed: int = 0,
    batch_size: int = 16,
    estimator: str = "nelbo",
    options: Options | None = None,
    device: torch.device | str = "cpu",
    done: Callable[[int], None] = lambda count: None,
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Estimate -log p(continuation | context) of requests, in nats.

    The NELBO under uniform, masking or hybrid noise is estimated by the design `efficient`, which needs fewer network calls for
    the same standard error (`m2s.evaluation.likelihood.design`). The times of other estimators are stratified.

    Args:
        model: The network, called as model(x_t, t). It must take sequences of any length.
        head: What its output means.
        requests: The requests.
        passes: Draws of noise for each request.
        seed: The seed of the noise.
        batch_size: Requests of one length in a call of the network.
        estimator: A name in `ESTIMATORS`.
        options: t_min, and the number of steps in discrete time.
        device: Where the network is.
        done: Called with the number of requests of a finished batch.

    Returns:
        Nats, and an estimate of their standard error by noise, as of independent passes; [n] each. By the design `efficient`
        all passes share the reconstruction, whose noise the error leaves out.

    Raises:
        UserError: The head is not supported by the estimator, or there is no such estimator.
    """
    validation.positive_int("passes", passes)
    chosen, options = ESTIMATORS.find(estimator, "estimator"), options or Options()
    if reason := chosen.unsupported(head):
        raise UserError(option="estimator", value=estimator, reason=f"it does not support {head}: {reason}")
    efficiently = chosen is NELBO and supports_designs(head)
    terms = [Term("prior")] if efficiently else chosen.build(head, options)
    found = torch.zeros(2, len(requests), dtype=torch.float64)
    by_length = sorted(range(len(requests)), key=lambda place: (len(requests[place].tokens), place))
    with evaluation_mode(model):
        for places in _batches([len(requests[place].tokens) for place in by_length], batch_size):
            chosen_places = [by_length[place] for place in places]
            batch = [requests[place] for place in chosen_places]
            x_0 = torch.tensor([each.tokens for each in batch], device=device)
            given = torch.tensor([len(each.context) for each in batch], device=device)
            free = torch.arange(x_0.shape[1], device=device) >= given.unsqueeze(-1)
            rows = torch.tensor([each.number for each in batch], device=device)
            network = NelboTerms(_clamped(model, x_0, free), head, options.t_min)
            total = torch.zeros(passes, len(batch), dtype=torch.float64, device=device)
            if efficiently:
                total += draw_group(network, efficient(head, passes), x_0, rows, passes, seed, 0, options, free)
            for term in terms:
                count = 1 if term.fixed else passes
                drawn = [draw_term(network, term, x_0, rows, seed, number, free, strata=count) for number in range(count)]
                total += torch.stack(drawn)
            error = total.std(0) / passes**0.5 if passes > 1 else torch.full_like(total[0], torch.nan)
            found[:, chosen_places] = torch.stack([total.mean(0), error]).cpu()
            done(len(batch))
    return found[0], found[1]


def _clamped(model: Model, x_0: Tensor, free: Tensor) -> Model:
    """A network that sees the clean context, whatever it is given there."""

    def network(x_t: Tensor, t: Tensor) -> Output:
        return model(torch.where(free, x_t.long(), x_0), t)

    return network


def _batches(lengths: Sequence[int], size: int) -> Iterator[range]:
    """Ranges of places with equal lengths, at most `size` each; the lengths are sorted."""
    first = 0
    while first < len(lengths):
        end = first
        while end < len(lengths) and end - first < size and lengths[end] == lengths[first]:
            end += 1
        yield range(first, end)
        first = end


@torch.no_grad()
def is_greedy(model: Model, head: Head, request: Request, device: torch.device | str = "cpu", t_min: float = 1e-3) -> bool:
    """Return whether greedy decoding of the context gives the continuation: the most confident mask first, one at a time.

    The network is given the time at which such a share of tokens is masked, as in sampling and in any-order estimates.

    Args:
        model: The network.
        head: A head with a posterior, over masking noise.
        request: The request.
        device: Where the network is.
        t_min: The network sees no times nearer to 0 and 1 than this.
    """
    network, process = NelboTerms(model, head, t_min), head.process
    clean, first = torch.tensor([request.tokens], device=device), len(request.context)
    x_t = clean.clone()
    x_t[:, first:] = process.states - 1
    with evaluation_mode(model):
        for number in range(len(request.continuation), 0, -1):
            share = torch.full((1,), number / len(request.continuation), dtype=torch.float64, device=device)
            t = time_of_mask_share(process, share)
            mu = head.posterior(network.network(x_t, t), x_t, t.clamp(t_min, 1 - t_min))
            confidence, token = mu.max(-1)
            place = int(torch.where(process.is_mask(x_t), confidence, -1.0).argmax())
            if int(token[0, place]) != int(clean[0, place]):
                return False
            x_t[0, place] = token[0, place]
    return True
