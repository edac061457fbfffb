"""One step of `m2s.sample` (network, last layer, draw), against the network and the last layer alone.

"sample" takes Bayes steps of a posterior. "sample-score" and "sample-projected" take analytic steps of an unconstrained
score, as it is and projected.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison, Stopwatch, interleave, summarize_times, with_backend
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.models import DiT, DiTConfig
from m2s.ops.backend import Backend
from m2s.samplers.inference_model import InferenceModel

BODY, GEMM = "network body", "head GEMM"
FUSED, REFERENCE = "m2s.sample, fused", "m2s.sample, reference"
STEPS: dict[str, Backend] = {FUSED: "fused", REFERENCE: "reference"}
ROUNDS = 3  # samples drawn by each form, alternately; each has `repeats` timed steps after its first
MAX_OVER_NETWORK, MIN_SPEEDUP, MAX_GIB = 1.25, 5.0, 1.0


@torch.no_grad()
def measure(head: Callable[[m2s.Process], m2s.heads.Head], sampler: str, setting: Setting) -> dict[str, Any]:
    """Compare a step of a sampler with the compiled network and the matrix product of the last layer.

    Args:
        head: Makes the head of a process.
        sampler: The name of the sampler.
        setting: Sizes and device.

    Returns:
        Times, memory, ratios and bars.
    """
    device, comparison = setting.device, Comparison(setting)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    network, model = _network(setting, comparison)
    x_t = torch.randint(setting.vocab, (setting.batch, setting.length), device=device)
    t = torch.full((setting.batch,), 0.5, device=device)
    watches: dict[str, Stopwatch] = {}

    def draw_samples(name: str) -> Tensor:
        watch = watches[name] = Stopwatch(device)
        tokens: Tensor = m2s.sample(
            network,
            head(process),
            (setting.batch, setting.length),
            steps=setting.repeats + 1,
            sampler=sampler,
            micro_batch=setting.batch,
            callback=lambda _: watch.stamp(),
            device=device,
        )
        return tokens

    hidden, weight = network(x_t, t).hidden.detach().to(setting.operands), model.head.weight.detach().to(setting.operands)
    flat = hidden.reshape(-1, setting.width)
    comparison.add(BODY, lambda: network(x_t, t))
    comparison.add(GEMM, lambda: flat @ weight.t())
    for name, backend in STEPS.items():
        needs = "fused" if backend == "fused" else None
        comparison.add(name, with_backend(backend, partial(draw_samples, name)), needs)
    comparison.warm_up()
    comparison.time(BODY, GEMM)
    steps = {name: comparison.calls[name] for name in STEPS if name in comparison.calls}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        interleave(steps, device, 1)
        for name in steps:
            times[name] += watches[name].intervals()
    for name, milliseconds in times.items():
        comparison.results[name] |= summarize_times(milliseconds)
    return comparison.result(
        f"one step of m2s.sample, {sampler}, {head(process)}, {setting.batch} x {setting.length}, "
        f"a DiT {setting.depth} x {setting.width} x {setting.heads}, {setting.vocab:,} tokens, {setting.arithmetic}",
        {f"{name} / ({BODY} + {GEMM})": comparison.ratio(name, BODY, GEMM) for name in STEPS}
        | {f"{REFERENCE} / {FUSED}": comparison.ratio(REFERENCE, FUSED)},
        _bars(comparison) if sampler == "bayes" else [],
        body_compiled=setting.why_unavailable("compiled") is None,
    )


PARTS.add("sample", partial(measure, m2s.Posterior, "bayes"))
PARTS.add("sample-score", partial(measure, m2s.LogScore, "analytic"))
PARTS.add("sample-projected", partial(measure, lambda process: m2s.Projected(m2s.LogScore(process)), "analytic"))


def _bars(comparison: Comparison) -> list[dict[str, Any]]:
    """Judge the time and the memory of the fused step."""
    ratio, gib = comparison.ratio(FUSED, BODY, GEMM), comparison.value(FUSED, "peak_gib")
    bars = [
        comparison.bar("fused sampler step over compiled body and head GEMM", ratio, at_most=MAX_OVER_NETWORK),
        comparison.bar("fused sampler step, GiB beyond the weights", gib, at_most=MAX_GIB),
    ]
    against, median = comparison.setting.against_step, comparison.value(FUSED, "median_ms")
    if against is None:
        comparison.skipped.append("the step of another implementation: give --against-step MILLISECONDS")
        return bars
    speedup = None if median is None else against / median
    return [*bars, comparison.bar(f"{against:g} ms over the fused sampler step", speedup, at_least=MIN_SPEEDUP)]


def _network(setting: Setting, comparison: Comparison) -> tuple[InferenceModel, DiT]:
    """Return the network as `m2s.sample` prepares it, and the network itself, with random weights."""
    reason = setting.why_unavailable("compiled")
    if reason:
        comparison.skipped.append(f"compiling the body: {reason}")
    config = DiTConfig(setting.vocab, setting.width, setting.depth, setting.heads, length=setting.length)
    torch.manual_seed(setting.seed)
    model = DiT(config).to(setting.device).eval()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    model.unprojected = True
    return InferenceModel(model, setting.vocab, setting.device.type == "cuda", reason is None), model
