"""A sampler's step on top of the network's hidden states, against the product of the last layer alone."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison, under
from m2s.benchmark.inputs import Inputs
from m2s.benchmark.setting import Setting
from m2s.ops.last_layer_chunks import Layer
from m2s.samplers import Bayes, CounterNoise, Euler, Move, Prediction, Sampler

GEMM, CHUNKED = "head GEMM", "head GEMM in chunks, float32 logits"
SAMPLERS: dict[str, Sampler] = {"bayes": Bayes(), "euler": Euler()}


@torch.no_grad()
def measure(setting: Setting) -> dict[str, Any]:
    given = Inputs.draw(setting)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    shape = (setting.batch, setting.length)
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    t = m2s.stratified_times(setting.batch, 1e-3, 1.0, generator, setting.device)
    x_t = process.corrupt(given.x_0.reshape(shape), t, generator)
    hidden, weight, bias = (leaf.detach() for leaf in given.leaves)
    output = m2s.Unprojected(hidden.reshape(*shape, -1), weight, bias)
    noise = CounterNoise(setting.seed, torch.arange(setting.batch, device=setting.device), setting.length, 1)

    def step(sampler: Sampler) -> Tensor:
        return sampler.step(Prediction(m2s.Posterior(process), output, x_t, t), Move(t, 0.98 * t), noise)

    def chunked() -> None:
        layer = Layer(hidden, weight, bias)
        for at in layer.chunks():
            layer.logits(at)

    a, b = given.halves
    contest = Comparison(setting)
    contest.enter(GEMM, lambda: a @ b.t())
    contest.enter(CHUNKED, chunked)
    for name, sampler in SAMPLERS.items():
        contest.enter(f"{name}, fused", under("fused", partial(step, sampler)), "fused")
        contest.enter(f"{name}, reference", under("reference", partial(step, sampler)))
    contest.run()
    steps = [name for name in contest.found if name not in (GEMM, CHUNKED)]
    return contest.result(
        f"one sampler step from hidden states, {setting.batch} x {setting.length}, {setting.vocab:,} tokens, "
        f"{setting.arithmetic}",
        {f"{name} / {GEMM}": contest.ratio(name, GEMM) for name in [CHUNKED, *steps]}
        | {f"{name}, reference / {name}, fused": contest.ratio(f"{name}, reference", f"{name}, fused") for name in SAMPLERS},
        [],
        tokens_the_same_as_the_reference={name: _same(contest, name) for name in SAMPLERS if f"{name}, fused" in contest.calls},
    )


def _same(contest: Comparison, name: str) -> float | None:
    fused, reference = (contest.once(f"{name}, {form}") for form in ("fused", "reference"))
    return None if fused is None or reference is None else float((fused == reference).double().mean())
