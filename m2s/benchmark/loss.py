"""The last layer and a loss, forward and backward: every form of ours, other people's, and the matrix products alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

import m2s
from m2s.benchmark.accuracy import Call, accuracy
from m2s.benchmark.comparison import Comparison, under
from m2s.benchmark.inputs import Inputs
from m2s.benchmark.setting import Setting
from m2s.losses import weighted_sum
from m2s.losses.objective import Loss
from m2s.ops.backend import Backend
from m2s.ops.last_layer import matmul_float32
from m2s.ops.last_layer_chunks import Gradient, Layer

FLOOR, CHUNKED = "three GEMMs (floor)", "three GEMMs in chunks, float32 logits"
EAGER, COMPILED, FUSED, TWICE = "m2s, eager", "m2s, compiled", "m2s, fused", "m2s, fused, weights known in the backward pass"
LIGER = "cross-entropy, Liger"


def measure(setting: Setting) -> dict[str, Any]:
    given = Inputs.draw(setting)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    head, x_t = m2s.Posterior(process), given.corrupt(process)
    weights = torch.full((setting.rows,), 1 / setting.rows, dtype=torch.float64, device=setting.device)
    contest, spared = Comparison(setting), given.weight.nbytes

    judged: dict[str, Call] = {
        EAGER: _ours("reference", given, head, m2s.score_entropy, x_t),
        COMPILED: _ours("reference", given, head, m2s.score_entropy, x_t, compiled=True),
        FUSED: _ours("fused", given, head, m2s.score_entropy, x_t),
        TWICE: _site_by_site(given, head, x_t),
    }
    contest.enter(FLOOR, _products(given), spared=spared)
    contest.enter(CHUNKED, _chunked(given), spared=spared)
    for name, needs in {EAGER: None, COMPILED: "compiled", FUSED: "fused", TWICE: "fused"}.items():
        contest.enter(name, partial(judged[name], weights), needs, spared)

    masking = m2s.Absorbing(setting.vocab, m2s.Linear())
    others: dict[str, tuple[m2s.Head, Loss]] = {
        "m2s with the exact offset, fused": (m2s.Posterior(process, "exact"), m2s.score_entropy),
        "free score (SEDD), fused": (m2s.LogScore(process), m2s.score_entropy),
        "masked sites (MD4, MDLM), fused": (m2s.Posterior(masking), m2s.masked_cross_entropy),
    }
    for name, (other, its_loss) in others.items():
        seen = x_t if other.process is process else given.corrupt(masking)
        contest.enter(name, partial(_ours("fused", given, other, its_loss, seen), weights), "fused", spared)
    for name, (call, needs, bytes_) in _cross_entropies(given).items():
        contest.enter(name, call, needs, bytes_)
    contest.run()

    forms = {name: call for name, call in judged.items() if name in contest.found}
    errors = accuracy(contest, given, head, x_t, forms)
    mine = errors.get(FUSED, {})
    gradients = (mine["hidden_gradient_error"], mine["weight_gradient_error"]) if mine else None
    to_floor = {f"{name} / floor": contest.ratio(name, FLOOR) for name in contest.found if name != FLOOR}
    return contest.result(
        f"last layer and loss, forward and backward, {setting.rows:,} sites, width {setting.width}, {setting.vocab:,} tokens, "
        f"{setting.arithmetic}",
        to_floor | {f"{FUSED} / {LIGER}": contest.ratio(FUSED, LIGER)},
        [
            contest.bar("fused M2S loss over the GEMM floor", contest.ratio(FUSED, FLOOR), at_most=1.6),
            contest.bar("fused M2S loss, GiB beyond the weight gradient", contest.value(FUSED, "peak_gib"), at_most=1.0),
            contest.bar("fused M2S loss over Liger's cross-entropy", contest.ratio(FUSED, LIGER), at_most=1.0),
            contest.bar("relative error of the batch mean", mine.get("mean_error"), at_most=1e-5),
            contest.bar("relative error of the gradients", max(gradients) if gradients else None, at_most=1e-2),
        ],
        accuracy=errors,
    )


def _ours(form: Backend, given: Inputs, head: m2s.Head, loss: Loss, x_t: Tensor, compiled: bool = False) -> Call:
    """The terms of the weighted sum of a loss, and its gradients, as training finds them."""

    def value(hidden: Tensor, weight: Tensor, bias: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_sum(loss, head, m2s.Unprojected(hidden, weight, bias), given.x_0, x_t, given.t, weights)

    function = torch.compile(value, dynamic=False) if compiled else value

    def call(weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        summed, terms = function(*given.leaves, weights)
        return terms, torch.autograd.grad(summed, given.leaves)

    return lambda weights: under(form, partial(call, weights))()


def _site_by_site(given: Inputs, head: m2s.Head, x_t: Tensor) -> Call:
    """The same by `m2s.score_entropy`, whose gradient must wait for the weights and makes the logits once more."""

    def call(weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        terms = weights * m2s.score_entropy(head, given.output, given.x_0, x_t, given.t)
        return terms.detach(), torch.autograd.grad(terms.sum(), given.leaves)

    return lambda weights: under("fused", partial(call, weights))()


def _products(given: Inputs) -> Callable[[], Any]:
    """The floor: logits written in the operands' dtype, the gradients of hidden states and, in float32, of the weight."""
    hidden, weight = given.halves

    def call() -> Any:
        logits = hidden @ weight.t()
        return logits @ weight, matmul_float32(logits.t(), hidden)

    return call


def _chunked(given: Inputs) -> Callable[[], Any]:
    """The products as the fused operation makes them, without its kernels; the gradient of the logits is given."""
    inputs = [leaf.detach() for leaf in given.leaves]
    layer = Layer(*inputs)
    most = max(len(layer.hidden[at]) for at in layer.chunks())
    upstream = torch.randn(most, len(layer.columns), device=layer.hidden.device).to(layer.hidden.dtype)

    def call() -> Any:
        layer = Layer(*inputs)
        gradient = Gradient(layer)
        for at in layer.chunks():
            logits = layer.logits(at)
            gradient.add(at, upstream[: len(logits)])
            del logits  # before the next are made
        return gradient.hidden, gradient.weight, gradient.bias

    return call


def _cross_entropies(given: Inputs) -> dict[str, tuple[Callable[[], Any], str, int]]:
    """Other people's: what to call, what it needs, and the bytes of its weight gradient. Liger and CCE get a weight in bf16,
    which spares them the rounding; CCE takes no bias."""
    hidden, weight, bias = given.hidden, given.weight, given.bias
    kind = hidden.device.type

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            logits = linear(hidden.to(weight.dtype), weight, bias)
        return cross_entropy(logits.float(), given.x_0)

    compiled = torch.compile(plain, dynamic=False)
    half, half_bias = (value.detach().bfloat16().requires_grad_() for value in (weight, bias))

    def liger() -> Any:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

        value = LigerFusedLinearCrossEntropyLoss()(half, hidden, given.x_0, half_bias)
        return torch.autograd.grad(value, (hidden, half, half_bias))

    def cce() -> Any:
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

        return torch.autograd.grad(linear_cross_entropy(hidden, half, given.x_0), (hidden, half))

    def ours() -> Any:
        return torch.autograd.grad(compiled(*given.leaves), given.leaves)

    return {
        "cross-entropy, compiled": (ours, "compiled", weight.nbytes),
        LIGER: (liger, "liger", half.nbytes),
        "cross-entropy, Apple CCE": (cce, "cce", half.nbytes),
    }
