"""`Prediction`: the network's output at one time, in the forms that samplers use.

K-vectors (posterior, score) of all sites at once can need a lot of memory. `Prediction.map` therefore works on a few sites at a
time, and hidden states (`m2s.Unprojected`) are multiplied out for those sites only. A sampler of a rank-one process needs no
K-vector at all: one draw from the posterior and a few scalars are enough (`Prediction.step`). On a GPU that is one Triton
kernel (`m2s.ops.reverse_step`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at, safe_log, scatter_at
from m2s.conversions.reverse_step import denoising_weights
from m2s.dtypes import float64_dtype, to_float64
from m2s.heads import Head, LogScore, Posterior, leave_one_out_from_posterior, score_from_posterior
from m2s.ops import uses_triton
from m2s.ops.analytic_step import draw_next_token
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.last_layer import Output, Unprojected
from m2s.ops.last_layer_chunks import CHUNK, Layer
from m2s.ops.reverse_step import Routes, TokenDraw, cpu, draw_token
from m2s.ops.reverse_step.cpu import BLOCK
from m2s.realizability import Projected
from m2s.realizability.projection import project_log
from m2s.samplers.logits_processor import LogitsProcessor, guided_logits, guided_step

__all__ = ["LogitsProcessor", "Prediction", "TokenDraw"]

UNLIKELY = 1e-9  # P_t(k|z) below which a clean token z is not considered a possible origin of k
CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 26  # largest number of entries of K-vectors in memory at once


class Prediction:
    """The network's output at the sites of x_t, with the time t at which it holds.

    Sites have the shape [B, L], or are flat, [N], in a part of a prediction (`map`, `[...]`). "*site" stands for both. K is
    the number of clean tokens and S the number of states, S = K + 1 with a mask. Guidance and sharpening are applied to
    everything that the methods return.

    Args:
        head: What the output means.
        output: The network's output, [*site, >= S], or `m2s.Unprojected`.
        x_t: Current tokens, [*site].
        t: Time, [B], [N] or a scalar.
        logits_processor: Temperature, top-k, top-p and guidance.
        unconditional: The output without the condition, where guidance combines two; otherwise None.
        free: True at the sites that are not clamped, [*site]; None where all are free.

    Attributes:
        process: The head's process.
        notes: Counts that a sampler leaves for `m2s.samplers.Diagnostics`, by name, each [*site].
    """

    def __init__(
        self,
        head: Head,
        output: Output,
        x_t: Int[Tensor, "*site"],
        t: Float[Tensor, "*b"],
        logits_processor: LogitsProcessor = LogitsProcessor(),  # noqa: B008
        unconditional: Output | None = None,
        free: Bool[Tensor, "*site"] | None = None,
    ) -> None:
        self.head, self.process, self.output, self.unconditional = head, head.process, output, unconditional
        self.x_t, self.t, self.logits_processor, self.free = x_t, to_float64(t), logits_processor, free
        self.notes: dict[str, Tensor] = {}

    # ------------------------------------------------------------------------------------------------ what kind of prediction

    @property
    def has_posterior(self) -> bool:
        """Whether there is a posterior to draw from: not for an unconstrained score, and not after guidance of rates."""
        return self.head.has_posterior and (self.unconditional is None or self.logits_processor.guide != "rates")

    @property
    def guides_step(self) -> bool:
        """Whether guidance combines the distributions of one step."""
        return self.unconditional is not None and self.logits_processor.guide == "step"

    @property
    def needs_one_draw(self) -> bool:
        """Whether one draw from the posterior and a few scalars determine a step, so that no K-vector is needed."""
        return self.has_posterior and not self.guides_step and self.process.rank_one is not None

    @property
    def fuses(self) -> bool:
        """Whether draws and steps run as one Triton kernel: the output is float32 logits of the posterior, up to an offset."""
        return type(self.head) is Posterior and self.needs_one_draw and self._is_plain() and uses_triton(self.x_t)

    @property
    def fuses_analytic_step(self) -> bool:
        """Whether an analytic step runs as a Triton kernel: the output is float32 log-scores, perhaps to be projected."""
        head = self.head.head if type(self.head) is Projected else self.head
        return type(head) is LogScore and self.process.rank_one is not None and self._is_plain() and uses_triton(self.x_t)

    @property
    def has_log_score_rows(self) -> bool:
        """Whether the output is float32 log-scores, perhaps to be projected, so that `map_log_scores` has rows for kernels."""
        return self.fuses_analytic_step

    # -------------------------------------------------------------------------------------------------- parts of a prediction

    def __getitem__(self, at: slice | Tensor) -> "Prediction":
        """Return the prediction at some sites, [N]; `at` indexes the sites of all samples, flattened."""
        t = validation.align("t", self.t, self.x_t).expand(self.x_t.shape).reshape(-1)[at]
        output, unconditional = self._map_outputs(lambda x: x.reshape(-1, x.shape[-1])[at])
        return Prediction(self.head, output, self.x_t.reshape(-1)[at], t, self.logits_processor, unconditional)

    def samples(self, at: slice) -> "Prediction":
        """Return the prediction of some samples, [b, L], with their notes.

        Args:
            at: A slice of the samples.
        """
        output, unconditional = self._map_outputs(lambda x: x[at])
        free = None if self.free is None else self.free[at]
        t = self.t[at] if self.t.ndim else self.t
        part = Prediction(self.head, output, self.x_t[at], t, self.logits_processor, unconditional, free)
        part.notes = {name: value[at] for name, value in self.notes.items()}
        return part

    def map(self, function: Callable[..., tuple[Tensor, ...]], *per_site: Tensor) -> tuple[Tensor, ...]:
        """Apply a function to a few sites at a time, so that its K-vectors fit into memory.

        Args:
            function: Takes a part of this prediction and the same part of `per_site`. It returns tensors with one entry for
                each site of the part.
            per_site: Tensors that broadcast to [*site]; for a process that is not rank-one, with one row for each sample.

        Returns:
            What the function returns, each put together to [*site].
        """
        limit = (CPU_CHUNK if self.x_t.device.type == "cpu" else GPU_CHUNK) // max(self.process.states, BLOCK)
        part: Callable[[slice], Prediction]
        if self.process.rank_one is not None:
            part, size, total = self.__getitem__, max(1, limit), self.x_t.numel()
            given = [validation.align("value", value, self.x_t).expand(self.x_t.shape).reshape(-1) for value in per_site]
        else:  # all sites of a sample share one transition matrix, so samples are not split
            part, size, total = self.samples, max(1, limit // max(1, self.x_t[0].numel())), len(self.x_t)
            given = list(per_site)
        slices = [slice(start, start + size) for start in range(0, total, size)]
        parts = [function(part(at), *(value[at] for value in given)) for at in slices]
        return tuple(torch.cat(column).reshape(self.x_t.shape) for column in zip(*parts, strict=True))

    def split_guidance(self) -> tuple["Prediction", "Prediction"]:
        """Return the prediction with the condition and the one without, both without guidance."""
        assert self.unconditional is not None
        alone = replace(self.logits_processor, guidance=1.0)
        conditional, unconditional = (
            Prediction(self.head, output, self.x_t, self.t, alone) for output in (self.output, self.unconditional)
        )
        return conditional, unconditional

    def without_sharpening(self) -> "Prediction":
        """Return the same prediction without temperature, top-k and top-p. Samplers rank sites by it."""
        plain = replace(self.logits_processor, temperature=1.0, top_k=None, top_p=1.0)
        return Prediction(self.head, self.output, self.x_t, self.t, plain, self.unconditional, self.free)

    # --------------------------------------------------------------------------------------------------- what is known of x_t

    @property
    def masked(self) -> Bool[Tensor, "*site"]:
        """True where the current token is the mask, [*site]."""
        return torch.eq(self.x_t, -1 if self.process.mask is None else self.process.mask)

    def is_clean_by_mixing(self) -> Bool[Tensor, "*site"]:
        """Return where the current token is certainly the clean one, m_t(k) = 0, [*site].

        False everywhere for a process that is not rank-one: there the transition matrix gives the posterior its zeros. See
        `is_certainly_clean`.
        """
        rank_one = self.process.rank_one
        if rank_one is None:
            return torch.zeros_like(self.x_t, dtype=torch.bool)
        return rank_one.at(self.x_t, self.t).m_k == 0

    def is_certainly_clean(self) -> Bool[Tensor, "*site"]:
        """Return where the current token is certainly the clean one, for any process: P_t(k|z) = 0 for all z != k, [*site]."""
        if self.process.rank_one is not None:
            return self.is_clean_by_mixing()
        others = scatter_at(self.process.columns(self.x_t, self.t), self.x_t, 0.0)[..., : self.process.vocab]
        return (others == 0).all(-1) & ~self.masked

    # -------------------------------------------------------------------------------------------------------------- K-vectors

    def log_weights(self) -> Float[Tensor, "*site K"]:
        """Return unnormalized log mu over the clean tokens, guided and sharpened, [*site, K].

        Raises:
            TypeError: The prediction has no posterior.
        """
        if not self.has_posterior:
            raise TypeError(f"{self.head} has no posterior to draw from: use m2s.Projected({self.head})")
        processor = self.logits_processor
        logits = self.head.posterior_logits(self.output, self.x_t, self.t)
        if self.unconditional is not None:
            logits = guided_logits(logits, self.head.posterior_logits(self.unconditional, self.x_t, self.t), processor.guidance)
        if not processor.sharpens:
            return logits
        if processor.on == "posterior":
            return processor(logits)
        # mu ∝ nu P_t(k|.): divide by the likelihood, sharpen nu, multiply again.
        log_likelihood = self._log_likelihood().to(logits.dtype)
        return processor(logits - log_likelihood.where(log_likelihood > -torch.inf, 0)) + log_likelihood

    def posterior(self) -> Float[Tensor, "*site S"]:
        """Return mu = Pr(X_0 = . | X_t) at every site, [*site, S]; 0 at the mask."""
        mu = torch.softmax(self.log_weights(), -1)
        mu = torch.nn.functional.pad(mu, (0, self.process.states - self.process.vocab))
        return torch.where(self.is_clean_by_mixing().unsqueeze(-1), scatter_at(torch.zeros_like(mu), self.x_t, 1.0), mu)

    def probability(self, token: Int[Tensor, "*site"]) -> Float[Tensor, "*site"]:
        """Return mu of one token at every site, [*site].

        Args:
            token: A token for each site, [*site].
        """
        return self.map(lambda part, token: (gather_at(part.posterior(), token).squeeze(-1),), token)[0]

    def leave_one_out(self) -> Float[Tensor, "*site S"]:
        """Return nu, the distribution of the clean token given all other sites, [*site, S]."""
        return leave_one_out_from_posterior(self.posterior(), self.x_t, self.t, self.process)

    def score(self) -> Float[Tensor, "*site S"]:
        """Return the score s_y = p_t(x^{i->y}) / p_t(x), [*site, S], in float64 where the device has it; 1 at x_t.

        Logits are computed in their own precision and then widened: the score of a near-certain posterior needs float64.
        """
        output, unconditional = (
            _logits_float64(self.output),
            None if self.unconditional is None else _logits_float64(self.unconditional),
        )
        return Prediction(self.head, output, self.x_t, self.t, self.logits_processor, unconditional)._score()

    def denoising_weights(self) -> Float[Tensor, "*site S"]:
        """Return weights of the clean tokens for the last step, [*site, S]; 0 at the mask.

        They are the posterior. For an unconstrained score they are those of SEDD's denoiser, (s P_t^-1)_z P_t(k|z), some of
        which can be negative.
        """
        if self.has_posterior:
            return self.posterior()
        if self.guides_step:
            conditional, unconditional = (part.denoising_weights().clamp(min=0) for part in self.split_guidance())
            return guided_step(conditional, unconditional, self.logits_processor.guidance)
        weights = denoising_weights(self.score(), self.x_t, self.t, self.process)
        if self.process.rank_one is None:
            weights = torch.where(self._score_is_determined().unsqueeze(-1), weights, self.last_step().to(weights.dtype))
        return self._without_mask(weights)

    def last_step(self) -> Float[Tensor, "*site S"]:
        """Return a distribution of the clean token without negative weights, [*site, S].

        It is the posterior. For an unconstrained score it is s_y P_t(k|y), normalized over k and the candidates y with a rate
        into k. At a wrong token it stays there half of the time.
        """
        if self.has_posterior:
            return self.posterior()
        trained = self._has_trained_score()
        weights = torch.where(trained, self.score() * self.process.columns(self.x_t, self.t), 0)
        weights = self._without_mask(weights)
        return weights / weights.sum(-1, keepdim=True)

    # ------------------------------------------------------------------------------------------------------- draws and steps

    def draw_token(self, u: Float[Tensor, "*site"], other: bool = False) -> TokenDraw:
        """Draw one token from the posterior at every site.

        Args:
            u: Uniforms in [0, 1), [*site].
            other: Draw from the posterior without the current token.

        Returns:
            Tokens, their probabilities, mu of the current token and mu of all others, each [*site].
        """
        if not self.fuses:
            return TokenDraw(*self.map(lambda part, v: part._draw(v, other), u))
        k, u, vocab = self.x_t.reshape(-1), u.reshape(-1), self.process.vocab
        offset = self._offset()
        return TokenDraw(*self._by_rows(lambda rows, at: draw_token(rows, k[at], offset[at], u[at], vocab, other)))

    def step(self, routes: Routes, noise: CounterNoise) -> tuple[Int[Tensor, "*site"], Float[Tensor, "*site"]]:
        """Take one step of a rank-one process.

        Args:
            routes: The coefficients of the step at every site (`BayesRoutes` or `EulerRoutes`).
            noise: Uniforms "token", "jump" and "route".

        Returns:
            The next tokens, and the total weight of leaving the current token, both [*site]. The Triton kernel computes the
            second exactly only where it exceeds one.
        """
        # A subclass of CounterNoise may return other numbers than the counter that the kernel would use.
        counter = noise.counter("token", "jump", "route") if type(noise) is CounterNoise else None
        vocab, mask, k = self.process.vocab, self.process.mask, self.x_t.long()
        if counter is None or not self.fuses:
            drawn = self.draw_token(noise("token"), routes.other)
            return routes.take(drawn, k, noise("jump"), noise("route"), vocab, mask)
        from m2s.ops.reverse_step import triton  # triton is optional

        k, offset = k.reshape(-1), self._offset()
        flat = [value.expand(self.x_t.shape).reshape(-1) for value in routes]

        def take(rows: Tensor, at: slice) -> tuple[Tensor, Tensor]:
            part = type(routes)(*(value[at] for value in flat))
            return triton.step(rows, k[at], offset[at], part, counter, at.start, vocab, mask)

        token, leave = self._by_rows(take)
        return token, leave

    def analytic_step(
        self, s: Float[Tensor, "*b"], u: Float[Tensor, "*site"]
    ) -> tuple[Int[Tensor, "*site"], Float[Tensor, "*site"]]:
        """Take a step of SEDD's analytic sampler by a kernel (`fuses_analytic_step`).

        Args:
            s: Time at the end of the step, at most t, [B].
            u: Uniforms in [0, 1), [*site].

        Returns:
            The next tokens, and the negative mass that is dropped, both [*site].
        """
        process, projects = self.process.rank_one, isinstance(self.head, Projected)
        head = self.head.head if isinstance(self.head, Projected) else self.head
        assert process is not None and isinstance(head, LogScore)
        k, u = self.x_t.reshape(-1), u.reshape(-1)
        s, t = (validation.align("s", value, self.x_t).expand(self.x_t.shape).reshape(-1) for value in (s, self.t))
        shift = None if head.scale == "none" else head.shift(k, t)

        def draw(rows: Tensor, at: slice) -> tuple[Tensor, Tensor]:
            if not projects:
                here = None if shift is None else shift[at]
                return draw_next_token(rows, k[at], s[at], t[at], u[at], process, shift=here)
            if shift is not None:
                rows = rows - shift[at].to(rows.dtype).unsqueeze(-1)
            posterior = project_log(rows, k[at], t[at], process)
            return draw_next_token(posterior, k[at], s[at], t[at], u[at], process, posterior=True)

        token, negative = self._by_rows(draw)
        return token, negative

    def map_log_scores(self, function: Callable[..., tuple[Tensor, ...]], *per_site: Tensor) -> tuple[Tensor, ...]:
        """Apply a function to rows of log-scores, a chunk at a time (`has_log_score_rows`).

        The output of `m2s.LogScore` is neither copied nor widened. Projected scores are computed in float64.

        Args:
            function: Takes log-scores [n, >= S], the current tokens [n], their times [n] and the same part of `per_site`. It
                returns tensors with one entry for each row.
            per_site: Tensors that broadcast to [*site].

        Returns:
            What the function returns, each put together to [*site].
        """
        head = self.head
        if isinstance(head, Projected):

            def projected(part: Prediction, *values: Tensor) -> tuple[Tensor, ...]:
                log_score = part.head.log_score(_logits_float64(part.output), part.x_t, part.t)
                return function(log_score, part.x_t, part.t, *values)

            return self.map(projected, *per_site)
        assert isinstance(head, LogScore)
        k = self.x_t.reshape(-1)
        t, *given = (
            validation.align("value", value, self.x_t).expand(self.x_t.shape).reshape(-1) for value in (self.t, *per_site)
        )
        shift = None if head.scale == "none" else head.shift(k, t)

        def shifted(rows: Tensor, at: slice) -> tuple[Tensor, ...]:
            if shift is not None:
                rows = to_float64(rows) - shift[at].unsqueeze(-1)  # the difference of float32 numbers would be rounded
            return function(rows, k[at], t[at], *(value[at] for value in given))

        return self._by_rows(shifted)

    # ---------------------------------------------------------------------------------------------------------------- private

    def _is_plain(self) -> bool:
        """Whether the logits are float32, and neither guided nor sharpened."""
        if isinstance(self.output, Unprojected):
            float32 = self.output.hidden.dtype != torch.float64
        else:
            float32 = self.output.dtype == torch.float32
        return float32 and self.unconditional is None and not self.logits_processor.sharpens

    def _map_outputs(self, function: Callable[[Tensor], Tensor]) -> tuple[Output, Output | None]:
        """Apply a function to the per-site tensor of both outputs, logits or hidden states."""

        def apply(output: Output) -> Output:
            if isinstance(output, Unprojected):
                return Unprojected(function(output.hidden), output.weight, output.bias)
            return function(output)

        return apply(self.output), None if self.unconditional is None else apply(self.unconditional)

    def _log_likelihood(self) -> Float[Tensor, "*site K"]:
        """log P_t(k|z) up to a constant: log mu - log nu."""
        rank_one = self.process.rank_one
        if rank_one is not None:
            offset = Posterior(rank_one, offset="exact").offset_at_current_token(self.x_t, self.t).unsqueeze(-1)
            zeros = offset.new_zeros(*self.x_t.shape, rank_one.vocab)
            return zeros.scatter(-1, self.x_t.long().clamp(max=rank_one.vocab - 1).unsqueeze(-1), offset)
        return safe_log(self.process.columns(self.x_t, self.t)[..., : self.process.vocab])

    def _score(self) -> Float[Tensor, "*site S"]:
        """The score, in the precision of the output."""
        if self.head.has_posterior and (
            self.logits_processor.sharpens or (self.unconditional is not None and self.has_posterior)
        ):
            return score_from_posterior(self.posterior(), self.x_t, self.t, self.process)
        log_score = self.head.log_score(self.output, self.x_t, self.t)
        if self.unconditional is not None:
            unconditional = self.head.log_score(self.unconditional, self.x_t, self.t)
            log_score = guided_logits(log_score, unconditional, self.logits_processor.guidance)
        return log_score.exp()

    def _has_trained_score(self) -> Bool[Tensor, "*site S"]:
        """True at k and at candidates with a rate into k. The others have no weight in the loss: their output is arbitrary."""
        return scatter_at(self.process.rates_into(self.x_t, self.t), self.x_t, 1.0) > 0

    def _score_is_determined(self) -> Bool[Tensor, "*site"]:
        """Whether the score is trained at every clean token that may have become the current one."""
        vocab = self.process.vocab
        trained = self._has_trained_score()[..., :vocab]
        return (trained | (self.process.columns(self.x_t, self.t)[..., :vocab] < UNLIKELY)).all(-1)

    def _without_mask(self, weights: Float[Tensor, "*site S"]) -> Float[Tensor, "*site S"]:
        """The weights, with 0 at the mask."""
        return weights if self.process.mask is None else torch.nn.functional.pad(weights[..., : self.process.vocab], (0, 1))

    def _offset(self) -> Float[Tensor, "N"]:
        """What is added to the logit of the current token; infinite where that is certainly the clean one."""
        assert isinstance(self.head, Posterior)
        return self.head.offset_at_current_token(self.x_t, self.t).masked_fill(self.is_clean_by_mixing(), torch.inf).reshape(-1)

    def _draw(self, u: Float[Tensor, "*site"], other: bool) -> TokenDraw:
        """`draw_token` of a part of the sites, from its logits."""
        vocab = self.process.vocab
        logits, k = self.log_weights().reshape(-1, vocab), self.x_t.long().reshape(-1)
        offset = torch.where(self.is_clean_by_mixing().reshape(-1), torch.inf, 0.0)
        drawn = cpu.draw_token(logits, k, offset, u.reshape(-1), vocab, other)
        return TokenDraw(*(value.reshape(u.shape) for value in drawn))

    def _by_rows(self, function: Callable[[Tensor, slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Apply a kernel to rows of logits, a chunk at a time. Rows may have more columns than the vocabulary."""
        x_t, states = self.x_t, self.process.states
        validation.tokens("x_t", x_t, states)
        validation.times("t", self.t)
        if not isinstance(self.output, Unprojected):
            validation.probabilities("the network's output", self.output, x_t, states, wider=True)
            rows = self.output.reshape(x_t.numel(), -1)
            size = max(1, CHUNK // rows.shape[-1])
            slices = [slice(start, start + size) for start in range(0, len(rows), size)]
            parts = [function(rows[at], at) for at in slices]
        else:
            parts = []
            with torch.autocast(x_t.device.type, enabled=False):
                layer = Layer.of(self.output)
                for at in layer.chunks():
                    rows = layer.logits(at)
                    validation.probabilities("the network's output", rows, x_t.reshape(-1)[at], states, wider=True)
                    parts.append(function(rows, at))
                    del rows  # free the chunk before the next one is computed
        return tuple(torch.cat(column).reshape(x_t.shape) for column in zip(*parts, strict=True))


def _logits_float64(output: Output) -> Tensor:
    """The logits, computed in their own precision and converted to float64."""
    logits = output.project() if isinstance(output, Unprojected) else output
    return logits.to(float64_dtype(logits))
