"""Cases of runs: processes, heads, which sampler supports which, and networks whose output shows every rounding error."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import m2s
from m2s.samplers import (
    SAMPLERS,
    ForwardBackward,
    SelfCorrecting,
)

K, L, STEPS, CORRECTIONS = 5, 6, 2, 3
FIRST, COUNT = 14, 4  # samples 14..17: they lie in two micro-batches of 16
MASKED = ("ancestral", "first_hitting", "confidence", "remasking")
ORDINAL = ("ordinal_tau_leaping",)  # needs an order, in which a mask has no place
JUMPS = (*ORDINAL, "forward_backward")
RANDOM_OR_EXTRA_TIMES = ("first_hitting", "self_correcting")
PROCESSES: dict[str, m2s.Process] = {
    "uniform": m2s.Uniform(K, m2s.Linear()),
    "absorbing": m2s.Absorbing(K, m2s.Linear()),
    "hybrid": m2s.Hybrid(K, p_uniform=0.3),
    "gaussian": m2s.RateMatrix.gaussian(K, m2s.Exponential(4.0), 2.0, 1.5),
    "tabulated-absorbing": m2s.RateMatrix.absorbing(K, m2s.LogLinear(1e-3)),
    "chain": m2s.Chain.uniform(K, torch.full((10,), 0.3)),
    "absorbing-chain": m2s.Chain.absorbing(K, torch.full((10,), 0.4)),
}
RANK_ONE, CHAINS = ("uniform", "absorbing", "hybrid"), ("chain", "absorbing-chain")
HEADS: dict[str, Callable[[m2s.Process], m2s.Head]] = {
    "posterior": m2s.Posterior,
    "offset": lambda process: m2s.Posterior(process, offset="exact"),
    "score": m2s.LogScore,
    "rate": m2s.FactorizedRate,
    "projected": lambda process: m2s.Projected(m2s.LogScore(process)),
}
UNCONSTRAINED = ("score", "rate")


def supports(sampler: str, process: str, head: str) -> bool:
    """Whether a sampler supports a head over a process, written independently of the library."""
    if sampler == "autoregressive":
        return False
    if process in CHAINS:
        anywhere = ("bayes", "predictor_corrector", "informed", "psi", "entropy_bound")
        return sampler in anywhere and head in ("posterior", "offset")
    if sampler in MASKED:
        return process == "absorbing" and head not in UNCONSTRAINED
    if sampler in ORDINAL:
        return process in ("uniform", "gaussian")
    if sampler in ("adaptive", "self_correcting"):
        return process in RANK_ONE and head not in UNCONSTRAINED and (sampler, process) != ("self_correcting", "absorbing")
    if sampler in ("bayes", "psi", "entropy_bound"):
        return head not in UNCONSTRAINED
    if sampler == "absorbing_uniform":
        return process == "uniform" and head not in UNCONSTRAINED
    if sampler == "informed":
        return process != "absorbing"
    if sampler == "analytic":
        return process in RANK_ONE
    return True


REVERSE_SAMPLERS = [name for name in SAMPLERS if name != "autoregressive"]
ALL = list(itertools.product(SAMPLERS, PROCESSES, HEADS))
SUPPORTED = [case for case in ALL if supports(*case)]
WITH_MASK = [(name, "absorbing", "posterior") for name in SAMPLERS if supports(name, "absorbing", "posterior")]
EVERY_SAMPLER = WITH_MASK + [(name, "uniform", "posterior") for name in REVERSE_SAMPLERS if name not in MASKED]
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda dtype: str(dtype)[6:])


def cases(chosen: list[tuple[str, str, str]]) -> Any:
    return pytest.mark.parametrize(("sampler", "process", "head"), chosen, ids=["-".join(case) for case in chosen])


class Rounding(torch.nn.Module):
    """A random network that magnifies the rounding of its matrix products.

    It adds the difference of a product and the same product summed in another order, times a million. With `lazy` that product
    is the last layer, which is left to `m2s.Unprojected`.
    """

    def __init__(self, states: int, length: int = L, seed: int = 0, lazy: bool = False) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*size, generator=draw) / size[0] ** 0.5)

        width = 96
        self.states, self.lazy = states, lazy
        self.embed, self.label = torch.nn.Parameter(4 * normal(states, 16)), normal(10, 16)
        self.first, self.mean = normal(length * 16 + 18, length * width), normal(width, states)
        self.last = normal(width, states)
        self.order = torch.randperm(width, generator=draw)

    def forward(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        label = torch.zeros(len(x_t), 16) if condition is None else self.label[condition]
        features = torch.cat([self.embed[x_t].flatten(1), t[:, None], torch.cos(3 * t)[:, None], label], -1)
        hidden = torch.tanh(features @ self.first).unflatten(-1, (x_t.shape[1], -1))
        if self.lazy:
            both = 3e6 * torch.cat([hidden, -hidden[..., self.order]], -1)
            return m2s.Unprojected(both, torch.cat([self.last, self.last[self.order]]).T.contiguous())
        errors = hidden @ self.last - hidden[..., self.order] @ self.last[self.order]
        return 2 * hidden @ self.mean + 3e6 * errors


class Transformer(torch.nn.Module):
    """One attention block with time conditioning, small enough to be trained in a test."""

    def __init__(self, states: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(states, width)
        self.place = torch.nn.Parameter(0.1 * torch.randn(length, width))
        self.time = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.SiLU(), torch.nn.Linear(width, 4 * width))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
        self.norm, self.last = torch.nn.LayerNorm(width, elementwise_affine=False), torch.nn.Linear(width, states)

    def forward(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        h = self.embed(x_t) + self.place[: x_t.shape[1]]
        times = torch.stack([t, torch.log(t)], -1)
        shift, scale, shift_mlp, scale_mlp = self.time(times).unsqueeze(1).chunk(4, -1)
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(h) * (1 + scale) + shift).chunk(3, -1)
        )
        h = h + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return self.last(h + self.mlp(self.norm(h) * (1 + scale_mlp) + shift_mlp))


@functools.cache
def trained(process: str, head: str, steps: int = 20) -> torch.nn.Module:
    """A network after a few training steps on sequences such as 1 2 3 4 0 1."""
    torch.manual_seed(1)
    chosen = build(process, head)
    model = Transformer(chosen.process.states, L)
    objective = m2s.Objective(model, chosen)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        x_0 = (torch.randint(K, (32, 1)) + torch.arange(L)) % K
        optimizer.zero_grad()
        objective(x_0, m2s.stratified_times(32, 0.02, 0.98).float()).mean().backward()
        optimizer.step()
    return model.eval()


class NetworkCalled(AssertionError):
    """The network was called."""


def never(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
    raise NetworkCalled("the network was called before the error")


def build(process: str, head: str) -> m2s.Head:
    return HEADS[head](PROCESSES[process])


def run(model: Any, head: m2s.Head, count: int = COUNT, start: int = FIRST, length: int = L, **options: Any) -> Any:
    if options.get("sampler") == "self_correcting":
        options["sampler"] = SelfCorrecting(corrections=CORRECTIONS)  # the default of 128 is slow
    if options.get("sampler") in JUMPS:  # the rates of a random score at t = 1 - 1e-3 are so high that a leap has 1000 jumps
        options.setdefault("t_min", 0.05)
    if options.get("sampler") == "forward_backward":
        options["sampler"] = ForwardBackward(corrections=CORRECTIONS)
    return m2s.sample(model, head, (count, length), **{"steps": STEPS, "start": start, "seed": 7, "micro_batch": 16, **options})


def pieces(head: m2s.Head, model: Any, **options: Any) -> dict[str, Tensor]:
    """The same samples, drawn in different batches, runs and orders."""

    def alone(sample: int) -> Tensor:
        return run(model, head, 1, sample, **options)

    return {
        "one by one": run(model, head, batch_size=1, **options),
        "by threes": run(model, head, batch_size=3, **options),
        "by sixteen": run(model, head, batch_size=16, **options),
        "from the middle": torch.cat([run(model, head, 1, **options), run(model, head, COUNT - 1, FIRST + 1, **options)]),
        "in reverse": torch.cat([alone(i) for i in reversed(range(FIRST, FIRST + COUNT))]).flip(0),
    }
