"""Part "audit": auditing the scores of one network call (`m2s audit`), and the steps of `m2s repair` that are not audited.

The audit runs as in `m2s audit`, in checked mode. "float64 scores" is the form for heads whose output is not the log-score:
scores are computed in float64 and projected, and plain torch compares them. The steps are those of SEDD's analytic sampler. The
network is called as it is and compiled (`--compile`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s import validation
from m2s.benchmark.comparison import Comparison, Stopwatch, interleave, summarize_times, with_backend
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.evaluation.audit import Audit
from m2s.models import DiT, DiTConfig
from m2s.ops.last_layer import Output
from m2s.samplers import Prediction, StepEvent
from m2s.samplers.inference_model import InferenceModel

NETWORK, STEP = "network body", "step, not audited"
FUSED, WIDE = "audit of one call, fused", "audit of one call, float64 scores"
COMPILED = ", compiled"
MOST_REPEATS = 10
T, S = 0.5, 0.49  # times of the audited step


class _Wide(m2s.LogScore):
    """The same head. The kernels of the audit are for `m2s.LogScore` itself, since a subclass may change its scores."""


@PARTS.register("audit")
@torch.no_grad()
def measure(setting: Setting) -> dict[str, Any]:
    """Compare the audit of one network call with the network and with a step of the sampler.

    Args:
        setting: Sizes and device; at most ten repeats.

    Returns:
        Times, memory, ratios, and the counts of the classes by both forms of the audit.
    """
    device, comparison = setting.device, Comparison(setting)
    repeats = min(setting.repeats, MOST_REPEATS)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    model = _model(setting)
    networks = {"": InferenceModel(model, setting.vocab, device.type == "cuda")}
    reason = setting.why_unavailable("compiled")
    if reason:
        comparison.skipped.append(f"compiling the network: {reason}")
    else:
        networks[COMPILED] = InferenceModel(model, setting.vocab, device.type == "cuda", True)
    x_t = torch.randint(setting.vocab, (setting.batch, setting.length), device=device)
    t = torch.full((setting.batch,), T, device=device, dtype=torch.float64)
    output = networks[""](x_t, t.float())
    watches: dict[str, Stopwatch] = {}
    for name, network in networks.items():
        comparison.add(NETWORK + name, partial(network, x_t, t.float()))
        comparison.add(STEP + name, partial(_draw, setting, network, process, repeats, watches, STEP + name))
    audits: dict[str, Callable[[], Audit]] = {
        FUSED: with_backend("fused", partial(_audit, m2s.LogScore(process), output, x_t, t)),
        WIDE: partial(_audit, _Wide(process), output, x_t, t),
    }
    comparison.add(FUSED, audits[FUSED], "fused")
    comparison.add(WIDE, audits[WIDE])
    comparison.warm_up()
    steps = {STEP + name for name in networks}
    calls = {name: call for name, call in comparison.calls.items() if name not in steps}
    for name, times in interleave(calls, device, repeats).items():
        comparison.results[name] |= summarize_times(times)
    for name in steps & comparison.calls.keys():
        comparison.calls[name]()
        comparison.results[name] |= summarize_times(watches[name].intervals())
    ratios = {f"{WIDE} / {FUSED}": comparison.ratio(WIDE, FUSED)}
    ratios |= {f"{name} / {NETWORK}": comparison.ratio(name, NETWORK) for name in (FUSED, WIDE, STEP)}
    if COMPILED in networks:
        ratios[f"{STEP} / {STEP + COMPILED}"] = comparison.ratio(STEP, STEP + COMPILED)
    counts = {name: audit.calls[0].before.classes for name in audits if (audit := comparison.output(name)) is not None}
    return comparison.result(
        f"audit of one call, {m2s.LogScore(process)}, {setting.batch} x {setting.length}, a DiT {setting.depth} x "
        f"{setting.width} x {setting.heads}, {setting.vocab:,} tokens, {setting.arithmetic}",
        ratios,
        [],
        classes=counts,
    )


def _model(setting: Setting) -> DiT:
    """A network with random weights, whose scores have all classes that SEDD's have."""
    torch.manual_seed(setting.seed)
    config = DiTConfig(setting.vocab, setting.width, setting.depth, setting.heads, length=setting.length)
    model = DiT(config).to(setting.device).eval()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    model.unprojected = True
    return model


def _audit(head: m2s.LogScore, output: Output, x_t: Tensor, t: Tensor) -> Audit:
    """Audit one call of a network."""
    found = Audit(head, "analytic", 1)
    samples = torch.arange(len(x_t), device=x_t.device)
    event = StepEvent(
        0, 1, samples, t, t * (S / T), x_t, x_t, Prediction(head, output, x_t, t), slice(0, x_t.shape[1]), x_t.shape[1]
    )
    with validation.checked():
        found(event)
    return found


def _draw(
    setting: Setting, network: InferenceModel, process: m2s.Uniform, steps: int, watches: dict[str, Stopwatch], name: str
) -> Tensor:
    """Draw samples as `m2s repair` does without an audit, with a time stamp after each step."""
    watch = watches[name] = Stopwatch(setting.device)
    tokens: Tensor = m2s.sample(
        network,
        m2s.LogScore(process),
        (setting.batch, setting.length),
        steps=steps + 1,
        sampler="analytic",
        grid="linear",
        seed=setting.seed,
        micro_batch=setting.batch,
        callback=lambda _: watch.stamp(),
        device=setting.device,
    )
    return tokens
