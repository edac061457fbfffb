"""A whole step of `m2s.sample`: the compiled network in bf16, the last layer, the draw; against network and layer alone."""

from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison, Watch, interleave, summary, under
from m2s.benchmark.setting import Setting
from m2s.models import DiT, DiTConfig
from m2s.ops.backend import Backend
from m2s.samplers.inference_model import InferenceModel

BODY, GEMM = "network body", "head GEMM"
FUSED = "m2s.sample, fused"
STEPS: dict[str, Backend] = {FUSED: "fused", "m2s.sample, reference": "reference"}
ROUNDS = 3  # of samples for each form, in turns; a round has `repeats` steps besides its first
MOST, FASTER, GIB = 1.25, 5.0, 1.0


@torch.no_grad()
def measure(setting: Setting) -> dict[str, Any]:
    device, contest = setting.device, Comparison(setting)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    network, model = _network(setting, contest)
    x_t = torch.randint(setting.vocab, (setting.batch, setting.length), device=device)
    t = torch.full((setting.batch,), 0.5, device=device)
    watches: dict[str, Watch] = {}

    def draw(name: str) -> Tensor:
        watch = watches[name] = Watch(device)
        tokens: Tensor = m2s.sample(
            network,
            m2s.Posterior(process),
            (setting.batch, setting.length),
            steps=setting.repeats + 1,
            sampler="bayes",
            micro_batch=setting.batch,
            callback=lambda _: watch.tick(),
            device=device,
        )
        return tokens

    hidden, weight = network(x_t, t).hidden.detach().to(setting.operands), model.head.weight.detach().to(setting.operands)
    flat = hidden.reshape(-1, setting.width)
    contest.enter(BODY, lambda: network(x_t, t))
    contest.enter(GEMM, lambda: flat @ weight.t())
    for name, form in STEPS.items():
        contest.enter(name, under(form, lambda name=name: draw(name)), "fused" if form == "fused" else None)  # type: ignore[misc]
    contest.warm()
    contest.time(BODY, GEMM)
    steps = {name: contest.calls[name] for name in STEPS if name in contest.calls}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        interleave(steps, device, 1)
        for name in steps:
            times[name] += watches[name].gaps()
    for name, milliseconds in times.items():
        contest.found[name] |= summary(milliseconds)
    ratio = contest.ratio(FUSED, BODY, GEMM)
    bars = [
        contest.bar("fused sampler step over compiled body and head GEMM", ratio, at_most=MOST),
        contest.bar("fused sampler step, GiB beyond the weights", contest.value(FUSED, "peak_gib"), at_most=GIB),
    ]
    median = contest.value(FUSED, "median_ms")
    if setting.against_step is not None:
        faster = None if median is None else setting.against_step / median
        bars.append(contest.bar(f"{setting.against_step:g} ms over the fused sampler step", faster, at_least=FASTER))
    else:
        contest.skipped.append("the step over another implementation's: give --against-step MILLISECONDS")
    return contest.result(
        f"one step of m2s.sample, bayes, {setting.batch} x {setting.length}, a DiT {setting.depth} x {setting.width} x "
        f"{setting.heads}, {setting.vocab:,} tokens, {setting.arithmetic}",
        {f"{name} / ({BODY} + {GEMM})": contest.ratio(name, BODY, GEMM) for name in STEPS},
        bars,
        body_compiled=setting.lacks("compiled") is None,
    )


def _network(setting: Setting, contest: Comparison) -> tuple[InferenceModel, DiT]:
    lacking = setting.lacks("compiled")
    if lacking:
        contest.skipped.append(f"compiling the body: {lacking}")
    config = DiTConfig(setting.vocab, setting.width, setting.depth, setting.heads, length=setting.length)
    torch.manual_seed(setting.seed)
    model = DiT(config).to(setting.device).eval()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    model.unprojected = True
    return InferenceModel(model, setting.vocab, setting.device.type == "cuda", lacking is None), model
