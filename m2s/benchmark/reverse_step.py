"""Part "reverse-step": one reverse step from the hidden states of the network, against the matrix product of the last layer."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison, with_backend
from m2s.benchmark.inputs import Inputs
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.ops.last_layer_chunks import Layer
from m2s.samplers import Bayes, CounterNoise, Euler, Move, Prediction, Sampler

GEMM, CHUNKED = "head GEMM", "head GEMM in chunks, float32 logits"
SAMPLERS: dict[str, Sampler] = {"bayes": Bayes(), "euler": Euler()}


@PARTS.register("reverse-step")
@torch.no_grad()
def measure(setting: Setting) -> dict[str, Any]:
    """Compare reverse steps, fused and readable, with the matrix product of the last layer.

    Args:
        setting: Sizes and device.

    Returns:
        Times, ratios, and the fraction of tokens that the fused step draws as the readable one does.
    """
    inputs = Inputs.random(setting)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    shape = (setting.batch, setting.length)
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    t = m2s.stratified_times(setting.batch, 1e-3, 1.0, generator, setting.device)
    x_t = process.corrupt(inputs.x_0.reshape(shape), t, generator)
    hidden, weight, bias = (leaf.detach() for leaf in inputs.leaves)
    output = m2s.Unprojected(hidden.reshape(*shape, -1), weight, bias)
    noise = CounterNoise(setting.seed, torch.arange(setting.batch, device=setting.device), setting.length, 1)

    def step(sampler: Sampler) -> Tensor:
        return sampler.step(Prediction(m2s.Posterior(process), output, x_t, t), Move(t, 0.98 * t), noise)

    def chunked() -> None:
        layer = Layer(hidden, weight, bias)
        for at in layer.chunks():
            layer.logits(at)

    a, b = inputs.operands
    comparison = Comparison(setting)
    comparison.add(GEMM, lambda: a @ b.t())
    comparison.add(CHUNKED, chunked)
    for name, sampler in SAMPLERS.items():
        comparison.add(f"{name}, fused", with_backend("fused", partial(step, sampler)), "fused")
        comparison.add(f"{name}, reference", with_backend("reference", partial(step, sampler)))
    comparison.run()
    steps = [name for name in comparison.results if name not in (GEMM, CHUNKED)]
    return comparison.result(
        f"one sampler step from hidden states, {setting.batch} x {setting.length}, {setting.vocab:,} tokens, "
        f"{setting.arithmetic}",
        {f"{name} / {GEMM}": comparison.ratio(name, GEMM) for name in [CHUNKED, *steps]}
        | {f"{name}, reference / {name}, fused": comparison.ratio(f"{name}, reference", f"{name}, fused") for name in SAMPLERS},
        [],
        tokens_the_same_as_the_reference={
            name: _same(comparison, name) for name in SAMPLERS if f"{name}, fused" in comparison.calls
        },
    )


def _same(comparison: Comparison, name: str) -> float | None:
    """Return the fraction of tokens that the fused and the readable step of a sampler have in common."""
    fused, reference = (comparison.output(f"{name}, {variant}") for variant in ("fused", "reference"))
    return None if fused is None or reference is None else float((fused == reference).double().mean())
