"""What a network says of every site, in the form samplers ask for: a draw from the posterior, the posterior, the score.

Large vocabularies are worked on some rows at a time, so that no K-vector exists for every site at once, and a draw from a
posterior head is one pass over them. Hidden states (`m2s.Unprojected`) are multiplied out for those rows only. On a GPU that
pass, and the step by its outcome, is one kernel (`m2s.ops.reverse_step`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at, safe_log, scatter_at
from m2s.conversions.reverse_step import denoising_weights
from m2s.dtypes import float64_dtype as wide_dtype
from m2s.dtypes import to_float64
from m2s.heads import Head, Posterior, leave_one_out_from_posterior, score_from_posterior
from m2s.ops import uses_triton
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.last_layer import Output, Unprojected
from m2s.ops.last_layer_chunks import Layer
from m2s.ops.reverse_step import Routes, TokenDraw, cpu, draw_token
from m2s.ops.reverse_step.cpu import BLOCK
from m2s.process import RankOne

__all__ = ["LogitsProcessor", "Prediction", "TokenDraw"]

UNLIKELY = 1e-9  # probability of having become the current token, below which a candidate is left out
CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 26  # entries of K-vectors alive at once


@dataclass(frozen=True)
class LogitsProcessor:
    """How a belief is sharpened before it is used, and how a conditional and an unconditional one are combined.

    Temperature, then top-k, then top-p, on the posterior or on the leave-one-out distribution. Guidance g combines what is
    predicted with the condition (c) and without (u): posteriors, mu ∝ mu_c^g mu_u^(1-g); reverse rates, R = R_c^g R_u^(1-g); or
    the distributions of one step, p(x_s) ∝ p_c(x_s)^g p_u(x_s)^(1-g). g = 1 is the condition alone.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    on: Literal["posterior", "leave_one_out"] = "posterior"
    guidance: float = 1.0
    guide: Literal["posterior", "rates", "step"] = "posterior"

    @property
    def sharpens(self) -> bool:
        return self.temperature != 1 or self.top_k is not None or self.top_p < 1

    def __call__(self, logits: Float[Tensor, "*site K"]) -> Float[Tensor, "*site K"]:
        """Temperature, top-k and top-p, in that order; what is cut off is -inf. Ties with the k-th are kept."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.where(logits >= logits.topk(self.top_k, -1).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            ordered, order = torch.softmax(logits, -1, dtype=wide_dtype(logits)).sort(dim=-1, descending=True, stable=True)
            kept = ordered.cumsum(-1) - ordered < self.top_p  # the smallest set that holds top_p, the token that crosses too
            logits = logits.where(torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)
        return logits


class Prediction:
    """The network's output at the sites of x_t, and at which time t it holds; `[B, L]`, or flat for a part of the sites."""

    def __init__(
        self,
        head: Head,
        output: Output,
        x_t: Int[Tensor, "*site"],
        t: Float[Tensor, "*b"],
        logits_processor: LogitsProcessor = LogitsProcessor(),  # noqa: B008
        without: Output | None = None,
        free: Bool[Tensor, "*site"] | None = None,
    ) -> None:
        self.head, self.process, self.output, self.without = head, head.process, output, without
        self.x_t, self.t, self.logits_processor = x_t, to_float64(t), logits_processor
        self.free = free  # the sites that are not clamped
        self.notes: dict[str, Tensor] = {}

    @property
    def has_posterior(self) -> bool:
        """Whether there is a true posterior to draw from: not so for an unconstrained score, nor after guidance on rates."""
        return self.head.has_posterior and (self.without is None or self.logits_processor.guide != "rates")

    @property
    def guides_step(self) -> bool:
        """Whether guidance combines the distributions of one step."""
        return self.without is not None and self.logits_processor.guide == "step"

    def apart(self) -> tuple["Prediction", "Prediction"]:
        """The prediction with the condition and the one without, each by itself."""
        assert self.without is not None
        alone = replace(self.logits_processor, guidance=1.0)
        return tuple(Prediction(self.head, each, self.x_t, self.t, alone) for each in (self.output, self.without))  # type: ignore[return-value]

    def without_sharpening(self) -> "Prediction":
        """The same prediction without temperature, top-k and top-p: by it sites are ranked."""
        plain = replace(self.logits_processor, temperature=1.0, top_k=None, top_p=1.0)
        return Prediction(self.head, self.output, self.x_t, self.t, plain, self.without, self.free)

    def probability(self, token: Int[Tensor, "*site"]) -> Float[Tensor, "*site"]:
        """mu of one token at every site."""
        return self.map(lambda part, token: (gather_at(part.posterior(), token).squeeze(-1),), token)[0]

    @property
    def streams(self) -> bool:
        """Whether one draw from the posterior and a few scalars are all a sampler needs."""
        return self.has_posterior and not self.guides_step and isinstance(self.process, RankOne)

    def __getitem__(self, at: slice | Tensor) -> "Prediction":
        """The belief at some of the sites, counted through the batch."""
        t = validation.align("t", self.t, self.x_t).expand(self.x_t.shape).reshape(-1)[at]
        flat = lambda x: x.reshape(-1, x.shape[-1])[at]  # noqa: E731
        output, without = (None if value is None else _each(value, flat) for value in (self.output, self.without))
        assert output is not None
        return Prediction(self.head, output, self.x_t.reshape(-1)[at], t, self.logits_processor, without)

    def rows(self, at: slice) -> "Prediction":
        """The belief about some of the samples."""
        output, without = (None if value is None else _each(value, lambda x: x[at]) for value in (self.output, self.without))
        assert output is not None
        free = None if self.free is None else self.free[at]
        part = Prediction(
            self.head, output, self.x_t[at], self.t[at] if self.t.ndim else self.t, self.logits_processor, without, free
        )
        part.notes = {name: value[at] for name, value in self.notes.items()}
        return part

    def map(self, function: Callable[..., tuple[Tensor, ...]], *per_site: Tensor) -> tuple[Tensor, ...]:
        """`function` of the belief, and of what else belongs to the sites, some at a time: some sites of a rank-one process,
        else whole samples, whose sites share one kernel."""
        most = (CPU_CHUNK if self.x_t.device.type == "cpu" else GPU_CHUNK) // max(self.process.states, BLOCK)
        if isinstance(self.process, RankOne):
            size, total = max(1, most), self.x_t.numel()
            given = [validation.align("value", value, self.x_t).expand(self.x_t.shape).reshape(-1) for value in per_site]
        else:
            size, total = max(1, most // max(1, self.x_t[0].numel())), len(self.x_t)
            given = list(per_site)
        part = self.__getitem__ if isinstance(self.process, RankOne) else self.rows
        slices = [slice(start, start + size) for start in range(0, total, size)]
        parts = [function(part(at), *(value[at] for value in given)) for at in slices]
        return tuple(torch.cat(column).reshape(self.x_t.shape) for column in zip(*parts, strict=True))

    def log_weights(self) -> Float[Tensor, "*site K"]:
        """Unnormalised log mu over the clean tokens, guided and sharpened."""
        if not self.has_posterior:
            raise TypeError(f"{self.head} has no posterior to draw from: use m2s.Projected({self.head})")
        logits = self.head.posterior_logits(self.output, self.x_t, self.t)
        if self.without is not None:
            logits = _guided(logits, self.head.posterior_logits(self.without, self.x_t, self.t), self.logits_processor.guidance)
        if not self.logits_processor.sharpens:
            return logits
        if self.logits_processor.on == "posterior":
            return self.logits_processor(logits)
        seen = self._log_likelihood().to(logits.dtype)
        return self.logits_processor(logits - seen.where(seen > -torch.inf, 0)) + seen

    def _log_likelihood(self) -> Float[Tensor, "*site K"]:
        """log P_t(k|z) up to a constant: what separates the posterior from the leave-one-out law."""
        if isinstance(self.process, RankOne):
            offset = Posterior(self.process, offset="exact").offset_at_current_token(self.x_t, self.t).unsqueeze(-1)
            zeros = offset.new_zeros(*self.x_t.shape, self.process.vocab)
            return zeros.scatter(-1, self.x_t.long().clamp(max=self.process.vocab - 1).unsqueeze(-1), offset)
        return safe_log(self.process.columns(self.x_t, self.t)[..., : self.process.vocab])

    @property
    def masked(self) -> Bool[Tensor, "*site"]:
        """Where the current token is the mask."""
        return torch.eq(self.x_t, -1 if self.process.mask is None else self.process.mask)

    def known(self) -> Tensor:
        """Where the current token is certainly the clean one: m_t(k) = 0. Left out where rates are tabulated: see `certain`."""
        if not isinstance(self.process, RankOne):
            return torch.zeros_like(self.x_t, dtype=torch.bool)
        return self.process.at(self.x_t, self.t).own == 0

    def certain(self) -> Bool[Tensor, "*site"]:
        """Where the current token is certainly the clean one, of any process: P_t(k|z) = 0 for every other z."""
        if isinstance(self.process, RankOne):
            return self.known()
        others = scatter_at(self.process.columns(self.x_t, self.t), self.x_t, 0.0)[..., : self.process.vocab]
        return (others == 0).all(-1) & ~self.masked

    def posterior(self) -> Float[Tensor, "*site S"]:
        """mu at every site, as a K-vector."""
        mu = torch.softmax(self.log_weights(), -1)
        mu = torch.nn.functional.pad(mu, (0, self.process.states - self.process.vocab))
        return torch.where(self.known().unsqueeze(-1), scatter_at(torch.zeros_like(mu), self.x_t, 1.0), mu)

    def leave_one_out(self) -> Float[Tensor, "*site S"]:
        """nu at every site, as a K-vector."""
        return leave_one_out_from_posterior(self.posterior(), self.x_t, self.t, self.process)

    def score(self) -> Float[Tensor, "*site S"]:
        """s at every site, as a K-vector in float64 where there is one; 1 at x_t."""
        output, without = (self._widened(value) for value in (self.output, self.without))
        assert output is not None
        return Prediction(self.head, output, self.x_t, self.t, self.logits_processor, without)._score()

    def _widened(self, output: Output | None) -> Tensor | None:
        """The logits, multiplied out in their own precision and then widened: scores of near-certain beliefs need it."""
        if output is None:
            return None
        logits = output.project() if isinstance(output, Unprojected) else output
        return logits.to(wide_dtype(logits))

    def _score(self) -> Float[Tensor, "*site S"]:
        if self.head.has_posterior and (self.logits_processor.sharpens or (self.without is not None and self.has_posterior)):
            return score_from_posterior(self.posterior(), self.x_t, self.t, self.process)
        log_score = self.head.log_score(self.output, self.x_t, self.t)
        if self.without is not None:
            log_score = _guided(log_score, self.head.log_score(self.without, self.x_t, self.t), self.logits_processor.guidance)
        return log_score.exp()

    def denoising_weights(self) -> Float[Tensor, "*site S"]:
        """Weights of the clean tokens, 0 at the mask: the posterior, or for an unconstrained score those of SEDD's denoiser, of
        which some can be negative."""
        if self.has_posterior:
            return self.posterior()
        if self.guides_step:
            with_condition, without = (part.denoising_weights().clamp(min=0) for part in self.apart())
            return guided_step(with_condition, without, self.logits_processor.guidance)
        score = self.score()
        weights = denoising_weights(score, self.x_t, self.t, self.process)
        if not isinstance(self.process, RankOne):
            weights = torch.where(self._determined().unsqueeze(-1), weights, self.last_step().to(weights.dtype))
        return weights if self.process.mask is None else torch.nn.functional.pad(weights[..., : self.process.vocab], (0, 1))

    def _determined(self) -> Bool[Tensor, "*site"]:
        """Whether the score is known of every clean token that may have become the current one. A candidate without a rate into
        it has no weight in the loss: a network says anything of it."""
        vocab = self.process.vocab
        counted = scatter_at(self.process.rates_into(self.x_t, self.t), self.x_t, 1.0)[..., :vocab] > 0
        return (counted | (self.process.columns(self.x_t, self.t)[..., :vocab] < UNLIKELY)).all(-1)

    def last_step(self) -> Float[Tensor, "*site S"]:
        """The posterior, or for an unconstrained score s_y P_t(k|y) over the candidates with a rate into k, and k: without
        negative weights, but at a wrong token it stays there half of the time."""
        if self.has_posterior:
            return self.posterior()
        counted = scatter_at(self.process.rates_into(self.x_t, self.t), self.x_t, 1.0) > 0
        distribution = torch.where(counted, self.score() * self.process.columns(self.x_t, self.t), 0)
        distribution = (
            distribution
            if self.process.mask is None
            else torch.nn.functional.pad(distribution[..., : self.process.vocab], (0, 1))
        )
        return distribution / distribution.sum(-1, keepdim=True)

    def draw(self, u: Float[Tensor, "*site"], other: bool = False) -> TokenDraw:
        """One token from the posterior for each u, or, if `other`, from the posterior without the current token."""
        if not self.fuses:
            return TokenDraw(*self.map(lambda part, v: part._draw(v, other), u))
        k, u, vocab = self.x_t.reshape(-1), u.reshape(-1), self.process.vocab
        offset = self._offset()
        return TokenDraw(*self._by_rows(lambda rows, at: draw_token(rows, k[at], offset[at], u[at], vocab, other)))

    def step(self, routes: Routes, noise: CounterNoise) -> tuple[Tensor, Tensor]:
        """The next token by `routes`, and the weight of those that leave; a fused step has it right where it exceeds one."""
        counter = noise.counter("token", "jump", "route") if type(noise) is CounterNoise else None
        vocab, mask, k = self.process.vocab, self.process.mask, self.x_t.long()
        if counter is None or not self.fuses:
            drawn = self.draw(noise("token"), routes.other)
            return routes.take(drawn, k, noise("jump"), noise("route"), vocab, mask)
        from m2s.ops.reverse_step import triton

        k, offset = k.reshape(-1), self._offset()
        flat = [value.expand(self.x_t.shape).reshape(-1) for value in routes]

        def take(rows: Tensor, at: slice) -> tuple[Tensor, Tensor]:
            part = type(routes)(*(value[at] for value in flat))
            return triton.step(rows, k[at], offset[at], part, counter, at.start, vocab, mask)

        token, leave = self._by_rows(take)
        return token, leave

    @property
    def fuses(self) -> bool:
        """Whether draws and steps take the fused form: the output is the posterior's logits, in float32, but for an offset."""
        if isinstance(self.output, Unprojected):
            narrow = self.output.hidden.dtype != torch.float64
        else:
            narrow = self.output.dtype == torch.float32
        plain = type(self.head) is Posterior and self.without is None and not self.logits_processor.sharpens
        return narrow and plain and self.streams and uses_triton(self.x_t)

    def _by_rows(self, function: Callable[[Tensor, slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`function` of rows of logits, which may be wider than the vocabulary, and of which rows they are."""
        x_t, states = self.x_t, self.process.states
        validation.tokens("x_t", x_t, states)
        validation.times("t", self.t)
        if not isinstance(self.output, Unprojected):
            validation.probabilities("output", self.output, x_t, states, wider=True)
            parts = [function(self.output.reshape(x_t.numel(), -1), slice(0, x_t.numel()))]
        else:
            parts = []
            with torch.autocast(x_t.device.type, enabled=False):
                layer = Layer.of(self.output)
                for at in layer.chunks():
                    rows = layer.logits(at)
                    validation.probabilities("output", rows, x_t.reshape(-1)[at], states, wider=True)
                    parts.append(function(rows, at))
                    del rows  # before the next are made
        return tuple(torch.cat(column).reshape(x_t.shape) for column in zip(*parts, strict=True))

    def _offset(self) -> Float[Tensor, "N"]:
        """What is added to the logit of the current token; infinite where that is certainly the clean one."""
        assert isinstance(self.head, Posterior)
        return self.head.offset_at_current_token(self.x_t, self.t).masked_fill(self.known(), torch.inf).reshape(-1)

    def _draw(self, u: Float[Tensor, "*site"], other: bool) -> TokenDraw:
        vocab = self.process.vocab
        logits, k = self.log_weights().reshape(-1, vocab), self.x_t.long().reshape(-1)
        offset = torch.where(self.known().reshape(-1), torch.inf, 0.0)
        drawn = cpu.draw_token(logits, k, offset, u.reshape(-1), vocab, other)
        return TokenDraw(*(value.reshape(u.shape) for value in drawn))


def _each(output: Output, function: Callable[[Tensor], Tensor]) -> Output:
    """`function` of what belongs to the sites, logits or hidden states."""
    if isinstance(output, Unprojected):
        return Unprojected(function(output.hidden), output.weight, output.bias)
    return function(output)


def guided_step(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """p_c^g p_u^(1-g), normalised, of weights of the next token; p_c where no token has weight in both."""
    mixed = _guided(safe_log(conditional), safe_log(unconditional), guidance)
    nothing = (mixed == -torch.inf).all(-1, keepdim=True)
    return torch.where(nothing, conditional, torch.softmax(mixed.masked_fill(nothing, 0), -1))


def _guided(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """g log mu_c + (1 - g) log mu_u; what either rules out stays ruled out, unless it has no say (g = 0)."""
    if guidance == 0:
        return unconditional
    ruled_out = (conditional == -torch.inf) | (unconditional == -torch.inf)
    mixed = guidance * conditional + (1 - guidance) * unconditional
    return mixed.masked_fill(ruled_out, -torch.inf)
