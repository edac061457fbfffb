"""One token from the posterior of each row of logits, and the step of a sampler that goes by it.

Everything a rank-one step needs of a belief is a draw z ~ mu and two masses: mu_k of the current token, and `off`, the sum of
mu over the others, never 1 - mu_k. A row whose offset is infinite is one whose current token is certainly the clean one.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.dtypes import float64_dtype

BLOCK = 256


class TokenDraw(NamedTuple):
    """One draw from the posterior at every site, and the two masses that say how sure it is of the current token k."""

    token: Tensor
    share: Tensor  # the token's probability
    own: Tensor  # mu_k
    off: Tensor  # sum of mu over the other tokens, never 1 - mu_k


def draw_token(
    rows: Float[Tensor, "N V"],
    k: Int[Tensor, "N"],
    offset: Float[Tensor, "N"],
    u: Float[Tensor, "N"],
    vocab: int,
    other: bool,
) -> TokenDraw:
    """One token for each u from the softmax of `rows` with `offset` added at k, or, if `other`, from it without k.

    Weights of the other tokens in blocks of float64 sums; the current one is held apart, whatever its size. Where k >= vocab
    it is none of the tokens.
    """
    logits, double = rows[:, :vocab], float64_dtype(rows)
    known = offset == torch.inf
    clean = k < vocab
    index = k.clamp(max=vocab - 1).unsqueeze(-1)
    own = logits.gather(-1, index)
    weights = torch.empty(len(k), -(-vocab // BLOCK) * BLOCK, dtype=logits.dtype, device=logits.device)
    weights[:, vocab:] = 0
    others = weights[:, :vocab].copy_(logits)
    others.scatter_(-1, index, own.masked_fill(clean.unsqueeze(-1), -torch.inf))
    top = others.amax(-1, keepdim=True)
    top = torch.where(top > -torch.inf, top, own.where(own > -torch.inf, 0))  # where no other token is possible
    others.sub_(top).exp_()
    blocks = weights.unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1, dtype=double)
    others_total = sums.sum(-1)
    own_log = (own.to(double) - top.to(double)).squeeze(-1) + offset.to(double).masked_fill(known, 0)
    own_log = own_log.where(clean, -torch.inf)
    log_odds = own_log - torch.log(others_total)
    mu_k, off = torch.sigmoid(log_odds), torch.sigmoid(-log_odds)
    own_weight = torch.zeros_like(own_log) if other else own_log.clamp(max=600).exp()
    token = invert_cdf(blocks, sums, u, index.squeeze(-1), own_weight).clamp(max=vocab - 1)
    weight = torch.where(clean & (token == k), own_weight, weights.gather(-1, token.unsqueeze(-1)).squeeze(-1).to(double))
    total = others_total + own_weight
    share = weight / total.where(total > 0, 1)
    return TokenDraw(
        torch.where(known, k, token),
        torch.where(known, 0.0 if other else 1.0, share),
        torch.where(known, 1.0, mu_k),
        torch.where(known, 0.0, off),
    )


class BayesRoutes(NamedTuple):
    """The numbers of a Bayes step at every site: to z ~ mu with weight `go`, by the mixing law at s with weight
    `jump` (off / m_t(k) + mu_k / P_t(k|k)), or stay."""

    go: Tensor
    jump: Tensor
    own: Tensor  # m_t(k); infinite where it is zero
    stay: Tensor  # P_t(k|k)
    mask: Tensor  # the mask's share of the mixing law at s

    @property
    def other(self) -> bool:
        """Whether z is drawn without k."""
        return False

    def take(self, drawn: TokenDraw, k: Tensor, v: Tensor, u: Tensor, vocab: int, mask: int | None) -> tuple[Tensor, Tensor]:
        """The next token, where u chooses the route and v the landing; and the weight of the two routes that leave."""
        landing = uniform_integer((v - self.mask) / (1 - self.mask).clamp(min=1e-300), vocab)
        if mask is not None:
            landing = torch.where(v < self.mask, mask, landing)
        leave = self.go + self.jump * (drawn.off / self.own + drawn.own / self.stay)
        return torch.where(u < self.go, drawn.token, torch.where(u < leave, landing, k)), leave


class EulerRoutes(NamedTuple):
    """The numbers of an Euler step at every site: with c = off / m(k) + mu_k / P(k|k), to z ~ mu without k at the rate
    n(k) `token` off, else by the mixing law without k at the rate n(k) c m(y)."""

    token: Tensor  # alpha / m(k); zero where m(k) is
    own: Tensor  # m(k); infinite where it is zero
    stay: Tensor  # P(k|k)
    clean: Tensor  # m(y) of a clean y
    mask: Tensor  # m(mask)
    rate: Tensor  # n(k)
    span: Tensor  # t - s

    @property
    def other(self) -> bool:
        """Whether z is drawn without k."""
        return True

    def take(self, drawn: TokenDraw, k: Tensor, v: Tensor, u: Tensor, vocab: int, mask: int | None) -> tuple[Tensor, Tensor]:
        """The next token, where u says whether to leave and v where to; and E, which may exceed one."""
        masked = torch.eq(k, -1 if mask is None else mask)
        common = drawn.off / self.own + drawn.own / self.stay
        to_token = self.token * drawn.off
        to_clean = common * self.clean * (vocab - 1 + masked.to(common.dtype))
        to_mask = torch.where(masked, 0, common * self.mask)
        total = to_token + to_clean + to_mask
        v = v * total
        w = ((v - to_token) / to_clean.where(to_clean > 0, 1)).clamp(0, 1)
        landing = uniform_integer(w, vocab - 1)
        landing = torch.where(masked, uniform_integer(w, vocab), landing + (landing >= k))  # any clean token but k
        if mask is not None:
            landing = torch.where(v < to_token + to_clean, landing, mask)
        leave = self.span * (self.rate * total)
        return torch.where(u < leave, torch.where(v < to_token, drawn.token, landing), k), leave


Routes = BayesRoutes | EulerRoutes


class Counter(NamedTuple):
    """What the uniforms of a step are a function of, for each site of some samples (`m2s.samplers.Noise`)."""

    samples: Tensor  # [B]: their numbers
    length: int  # sites of each
    key: tuple[int, int]
    step: int
    words: tuple[int, ...]  # one for each purpose: the last word of its counters


def invert_cdf(
    blocks: Float[Tensor, "*site N 256"],
    sums: Float[Tensor, "*site N"],
    u: Float[Tensor, "*site"],
    at: Int[Tensor, "*site"] | None = None,
    more: Float[Tensor, "*site"] | None = None,
) -> Int[Tensor, "*site"]:
    """The index at which the sums of the weights in `blocks`, `more` added at the index `at`, first exceed u times their
    total; the sum of each block is at hand."""
    if at is not None and more is not None:
        sums = sums.scatter_add(-1, (at // BLOCK).unsqueeze(-1), more.unsqueeze(-1))
    cumulative = sums.cumsum(-1)
    target = u.to(sums.dtype) * cumulative[..., -1]
    block = _first_above(cumulative, sums, target)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1), 0)
    index = block[..., None, None].expand(*block.shape, 1, BLOCK)
    inside = blocks.gather(-2, index).squeeze(-2).to(sums.dtype)
    if at is not None and more is not None:
        here = torch.where(at // BLOCK == block, more, 0)
        inside = inside.scatter_add(-1, (at % BLOCK).unsqueeze(-1), here.unsqueeze(-1))
    return block * BLOCK + _first_above(inside.cumsum(-1), inside, target - before)


def _first_above(cumulative: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds the target; where rounding leaves none, the last of positive weight."""
    found = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(found, last)


def uniform_integer(u: Float[Tensor, "*site"], count: int) -> Int[Tensor, "*site"]:
    """One of 0, ..., count - 1, each with the same probability."""
    return (u * count).long().clamp(max=count - 1)
