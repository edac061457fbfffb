"""Part "loss": last layer and loss, forward and backward, against cross-entropy of other packages and matrix products."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

import m2s
from m2s.benchmark.accuracy import Call, accuracy
from m2s.benchmark.comparison import Comparison, with_backend
from m2s.benchmark.inputs import Inputs
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.heads.next_token import NextToken, Shifted
from m2s.losses import next_token_nll, weighted_sum
from m2s.losses.objective import Loss
from m2s.ops.backend import Backend
from m2s.ops.last_layer import matmul_float32
from m2s.ops.last_layer_chunks import Gradient, Layer

FLOOR, CHUNKED = "three GEMMs (floor)", "three GEMMs in chunks, float32 logits"
EAGER, COMPILED, FUSED, TWICE = "m2s, eager", "m2s, compiled", "m2s, fused", "m2s, fused, weights known in the backward pass"
LIGER = "cross-entropy, Liger"
# Limits of the bars: times over the floor, GiB, times over Liger, relative errors of the mean and of the gradients.
MAX_OVER_FLOOR, MAX_GIB, MAX_OVER_LIGER, MAX_MEAN_ERROR, MAX_GRADIENT_ERROR = 1.6, 1.0, 1.0, 1e-5, 1e-2


@PARTS.register("loss")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare the M2S loss, in every form, with cross-entropy and with the three matrix products that all of them need.

    Args:
        setting: Sizes and device.

    Returns:
        Times, memory, ratios, bars, and errors against float64.
    """
    inputs = Inputs.random(setting)
    process = m2s.Uniform(setting.vocab, m2s.Linear())
    head, x_t = m2s.Posterior(process), inputs.corrupt(process)
    weights = torch.full((setting.rows,), 1 / setting.rows, dtype=torch.float64, device=setting.device)
    comparison = Comparison(setting)
    excluded = inputs.weight.nbytes  # every form must return the gradient of the weight

    judged: dict[str, Call] = {
        EAGER: _weighted("reference", inputs, head, m2s.score_entropy, x_t),
        COMPILED: _weighted("reference", inputs, head, m2s.score_entropy, x_t, compiled=True),
        FUSED: _weighted("fused", inputs, head, m2s.score_entropy, x_t),
        TWICE: _losses_first(inputs, head, x_t),
    }
    comparison.add(FLOOR, _products(inputs), excluded=excluded)
    comparison.add(CHUNKED, _chunked(inputs), excluded=excluded)
    for name, needs in {EAGER: None, COMPILED: "compiled", FUSED: "fused", TWICE: "fused"}.items():
        comparison.add(name, partial(judged[name], weights), needs, excluded)

    masking = m2s.Absorbing(setting.vocab, m2s.Linear())
    others: dict[str, tuple[m2s.Head, Loss]] = {
        "m2s with the exact offset, fused": (m2s.Posterior(process, "exact"), m2s.score_entropy),
        "unconstrained score (SEDD), fused": (m2s.LogScore(process), m2s.score_entropy),
        "exit rate and jump distribution (Neural CTMC), fused": (m2s.FactorizedRate(process), m2s.score_entropy),
        "masked sites (MD4, MDLM), fused": (m2s.Posterior(masking), m2s.masked_cross_entropy),
        "masks and other tokens (GIDD), fused": (m2s.Posterior(m2s.Hybrid(setting.vocab, 0.1), "exact"), m2s.score_entropy),
        "next token (AR), fused": (NextToken(Shifted(setting.vocab)), next_token_nll),
    }
    for name, (other, its_loss) in others.items():
        noisy = x_t if other.process is process else inputs.corrupt(other.process)
        comparison.add(name, partial(_weighted("fused", inputs, other, its_loss, noisy), weights), "fused", excluded)
    for name, (call, needs, bytes_) in _cross_entropies(inputs).items():
        comparison.add(name, call, needs, bytes_)
    comparison.run()

    forms = {name: call for name, call in judged.items() if name in comparison.results}
    errors = accuracy(comparison, inputs, head, x_t, forms)
    to_floor = {f"{name} / floor": comparison.ratio(name, FLOOR) for name in comparison.results if name != FLOOR}
    return comparison.result(
        f"last layer and loss, forward and backward, {setting.rows:,} sites, width {setting.width}, {setting.vocab:,} tokens, "
        f"{setting.arithmetic}",
        to_floor | {f"{FUSED} / {LIGER}": comparison.ratio(FUSED, LIGER)},
        _bars(comparison, errors.get(FUSED, {})),
        accuracy=errors,
    )


def _bars(comparison: Comparison, errors: dict[str, float]) -> list[dict[str, Any]]:
    """Judge the time, the memory and the errors of the fused loss."""
    gradient_error = max(errors["hidden_gradient_error"], errors["weight_gradient_error"]) if errors else None
    gib = comparison.value(FUSED, "peak_gib")
    return [
        comparison.bar("fused M2S loss over the GEMM floor", comparison.ratio(FUSED, FLOOR), at_most=MAX_OVER_FLOOR),
        comparison.bar("fused M2S loss, GiB beyond the weight gradient", gib, at_most=MAX_GIB),
        comparison.bar("fused M2S loss over Liger's cross-entropy", comparison.ratio(FUSED, LIGER), at_most=MAX_OVER_LIGER),
        comparison.bar("relative error of the batch mean", errors.get("mean_error"), at_most=MAX_MEAN_ERROR),
        comparison.bar("relative error of the gradients", gradient_error, at_most=MAX_GRADIENT_ERROR),
    ]


def _weighted(backend: Backend, inputs: Inputs, head: m2s.Head, loss: Loss, x_t: Tensor, compiled: bool = False) -> Call:
    """Return a call: the terms of the weighted sum of a loss and the gradients of the sum, as in training."""

    def value(hidden: Tensor, weight: Tensor, bias: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_sum(loss, head, m2s.Unprojected(hidden, weight, bias), inputs.x_0, x_t, inputs.t, weights)

    function = torch.compile(value, dynamic=False) if compiled else value

    def call(weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        summed, terms = function(*inputs.leaves, weights)
        return terms, torch.autograd.grad(summed, inputs.leaves)

    return lambda weights: with_backend(backend, partial(call, weights))()


def _losses_first(inputs: Inputs, head: m2s.Head, x_t: Tensor) -> Call:
    """Return the same by `m2s.score_entropy`. Its gradient must wait for the weights, and computes the logits twice."""

    def call(weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        terms = weights * m2s.score_entropy(head, inputs.output, inputs.x_0, x_t, inputs.t)
        return terms.detach(), torch.autograd.grad(terms.sum(), inputs.leaves)

    return lambda weights: with_backend("fused", partial(call, weights))()


def _products(inputs: Inputs) -> Callable[[], Any]:
    """Return the floor: three matrix products, for the logits and for the gradients of hidden states and weight."""
    hidden, weight = inputs.operands

    def call() -> Any:
        logits = hidden @ weight.t()
        return logits @ weight, matmul_float32(logits.t(), hidden)

    return call


def _chunked(inputs: Inputs) -> Callable[[], Any]:
    """Return the products in the chunks of the fused operation, without its kernels, for a given gradient of the logits."""
    leaves = [leaf.detach() for leaf in inputs.leaves]
    layer = Layer(*leaves)
    most = max(len(layer.hidden[at]) for at in layer.chunks())
    upstream = torch.randn(most, len(layer.columns), device=layer.hidden.device).to(layer.hidden.dtype)

    def call() -> Any:
        layer = Layer(*leaves)
        gradient = Gradient(layer)
        for at in layer.chunks():
            logits = layer.logits(at)
            gradient.add(at, upstream[: len(logits)])
            del logits  # frees them before the next chunk, as the fused operation does
        return gradient.hidden, gradient.weight, gradient.bias

    return call


def _cross_entropies(inputs: Inputs) -> dict[str, tuple[Callable[[], Any], str, int]]:
    """Return cross-entropies of other packages: the call, what it needs, and the bytes of its weight gradient.

    Liger and CCE get a weight in bf16, so that they need not round it. CCE has no bias.
    """
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    kind = hidden.device.type

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            logits = linear(hidden.to(weight.dtype), weight, bias)
        return cross_entropy(logits.float(), inputs.x_0)

    compiled = torch.compile(plain, dynamic=False)
    half, half_bias = (value.detach().bfloat16().requires_grad_() for value in (weight, bias))

    def liger() -> Any:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

        value = LigerFusedLinearCrossEntropyLoss()(half, hidden, inputs.x_0, half_bias)
        return torch.autograd.grad(value, (hidden, half, half_bias))

    def cce() -> Any:
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

        return torch.autograd.grad(linear_cross_entropy(hidden, half, inputs.x_0), (hidden, half))

    def compiled_cross_entropy() -> Any:
        return torch.autograd.grad(compiled(*inputs.leaves), inputs.leaves)

    return {
        "cross-entropy, compiled": (compiled_cross_entropy, "compiled", weight.nbytes),
        LIGER: (liger, "liger", half.nbytes),
        "cross-entropy, Apple CCE": (cce, "cce", half.nbytes),
    }
