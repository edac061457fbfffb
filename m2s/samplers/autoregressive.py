"""Autoregressive generation: from left to right, one token for each call of the network."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.ops.last_layer import Output, Unprojected
from m2s.process import Process
from m2s.progress import bar_class
from m2s.samplers.base import Move, NamedSampler
from m2s.samplers.capabilities import AUTOREGRESSIVE, Need
from m2s.samplers.micro_batch import MicroBatch, SamplingRun, call_network, check_outputs, predict, report_step
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Autoregressive(NamedSampler):
    """The name of autoregressive generation in `SAMPLERS`. It has no options and no steps: see `generate_autoregressive`."""

    name = AUTOREGRESSIVE
    needs = (Need.NEXT_TOKEN,)


def generate_autoregressive(run: SamplingRun, batches: list[MicroBatch], progress: bool) -> None:
    """Draw the free sites of some micro-batches from left to right, by Pr(X^i = . | X^{<i}).

    A sample takes as many calls of the network as it has free sites, whatever `steps` is. A clamped token is seen only by the
    sites after it. Micro-batches are filled one after another, so that only one key-value cache is in memory (two with
    guidance).

    Args:
        run: The call of `m2s.sample`, with a head that has `generates_left_to_right`.
        batches: Micro-batches; their state `x` is clean tokens afterwards.
        progress: Show a progress bar.
    """
    calls = [max(1, int(batch.free.sum(-1).max())) for batch in batches]
    with bar_class()(total=sum(calls), desc="sampling", unit="step", disable=not progress) as bar:
        for batch, count in zip(batches, calls, strict=True):
            _generate(run, batch, count, bar)


def _generate(run: SamplingRun, batch: MicroBatch, calls: int, bar: Any) -> None:
    """Fill one micro-batch."""
    options, process = run.options, run.options.head.process
    assert process.mask is not None  # stands for a token that has not been drawn
    batch.set_free(torch.full_like(batch.clamp, process.mask))
    networks = [CachedNetwork(run.model, condition, process) for condition in batch.conditions(options.guidance)]
    ends = torch.linspace(1, 0, calls + 1, dtype=torch.float64, device=run.device).unsqueeze(-1).expand(-1, len(batch.x))
    for number in range(calls):
        move = Move(ends[number], ends[number + 1])
        site = batch.x.eq(process.mask).long().argmax(-1)  # 0 where nothing is left to draw
        shown, time = options.head.network_input(batch.x), run.network_time(move.t)
        outputs = [network(shown, time, site) for network in networks]
        if number in (0, calls - 1):
            drawn = torch.zeros_like(batch.free).scatter_(1, site.unsqueeze(-1), True) & batch.x.eq(process.mask)
            check_outputs(run, batch, outputs, drawn, "last" if number else "first")
        prediction = predict(run, batch, outputs, move.t)
        x_t = batch.x
        batch.set_free(_draw_at(prediction, site, batch.noise(options.seed, number + 1)("token")))
        report_step(run, batch, number, calls, move, x_t, prediction)
        if run.callback is not None:
            for network in networks:
                network.copy_outputs()
        bar.update()


def _draw_at(prediction: Prediction, site: Int[Tensor, "M"], u: Tensor) -> Int[Tensor, "M W"]:
    """Draw the token at one site of each sample. A sample without a token to draw stays."""
    x = prediction.x_t.long()
    at = site + torch.arange(len(x), device=x.device) * x.shape[1]
    token = prediction[at].draw_token(u.reshape(-1)[at]).token
    left = prediction.masked.any(-1)
    return x.scatter(1, site.unsqueeze(-1), torch.where(left, token, x.reshape(-1)[at]).unsqueeze(-1))


class CachedNetwork:
    """The network under one condition, called on one site of each sample where it has a key-value cache.

    A network has a cache if `model.new_cache(samples, length)` returns one. It is then called on the given site, with the keys
    and values of the sites before. Where the tokens before are not those in the cache (a prompt, clamped tokens further on, a
    token that changed), the sample is first processed as a whole. Neither that nor any shape depends on the other samples.

    Args:
        model: The network.
        condition: The condition of each sample, [M, ...], or None.
        process: The process, for the number of states.
    """

    def __init__(self, model: Callable[..., Output], condition: Tensor | None, process: Process) -> None:
        self.model, self.condition, self.process = model, condition, process
        self.cache: Tensor | None = None  # [layers, 2, M, ...]
        self.cached: Tensor | None = None  # [M, W]: the tokens of which the cache was computed, -1 after them
        self.outputs: Tensor | None = None  # [M, W, ...]: of the sites that were computed; NaN elsewhere

    def __call__(self, x_t: Int[Tensor, "M W"], t: Tensor, site: Int[Tensor, "M"]) -> Output:
        """Return the output at one site of each sample, among those of earlier calls.

        Args:
            x_t: The tokens that the network sees, [M, W].
            t: Times, [M].
            site: The site of each sample, [M].

        Returns:
            Logits or hidden states of all sites, [M, W, ...]. With a cache they are NaN at sites that were not computed.
        """
        if self.cache is None and hasattr(self.model, "new_cache"):
            self.cache, self.cached = self.model.new_cache(*x_t.shape), torch.full_like(x_t, -1)
        if self.cache is None or self.cached is None:
            return self._call(x_t, t)
        at, sites = site.unsqueeze(-1), torch.arange(x_t.shape[1], device=x_t.device)
        stale = ((x_t != self.cached) & (sites < at)).any(-1)
        if bool(stale.any()):
            full = torch.zeros_like(self.cache)
            self._call(x_t, t, cache=full, at=sites.expand_as(x_t))
            self.cache[:, :, stale] = full[:, :, stale]
        output = self._call(x_t.gather(1, at), t, cache=self.cache, at=at)
        self.cached = x_t.masked_fill(sites > at, -1)
        return self._insert(output, at, x_t.shape[1])

    def copy_outputs(self) -> None:
        """Continue in a copy of the outputs, because a callback may have stored the tensor."""
        self.outputs = None if self.outputs is None else self.outputs.clone()

    def _insert(self, output: Output, at: Int[Tensor, "M 1"], length: int) -> Output:
        """Write the output of one site to its place among all sites."""
        new = output.hidden if isinstance(output, Unprojected) else output
        if self.outputs is None:
            self.outputs = new.new_full((len(new), length, new.shape[-1]), torch.nan)
        self.outputs.scatter_(1, at.unsqueeze(-1).expand_as(new), new)
        return Unprojected(self.outputs, output.weight, output.bias) if isinstance(output, Unprojected) else self.outputs

    def _call(self, x_t: Tensor, t: Tensor, **cached: Tensor) -> Output:
        """Call the network and check its output."""
        return call_network(self.model, self.process, x_t, t, self.condition, **cached)
