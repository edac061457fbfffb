"""The last layer and a loss in one: values and gradients straight from hidden states, logits for some rows at a time.

Where the weights of the losses are known beforehand, their gradients are found with the values, out of the same logits
(`total`). Where they come from outside (`losses`), the backward pass makes the logits once more.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2s.ops.backend import load_op
from m2s.ops.last_layer import Unprojected
from m2s.ops.last_layer_chunks import Gradient, Layer, extra
from m2s.process import Process


@torch.library.custom_op("m2s::linear_loss", mutates_args=())
def linear_loss(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: Tensor,
    x: Tensor,
    scalars: Tensor,
    masked: bool,
    vocab: int,
    row_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The losses [N] in float64, and, where rows have a weight, the gradients of their weighted sum with respect to hidden,
    weight and bias (empty without). By a loss of rows of logits (bridged, free or masked): what is told of all rows is made
    ready once by its `prepare`, then its `rows` are asked for, some at a time."""
    layer, loss_of = Layer(hidden, weight, bias), load_op(kind, hidden)
    gradient = None if row_weight is None else Gradient(layer)
    losses = torch.empty(len(layer.hidden), dtype=torch.float64, device=hidden.device)
    told = loss_of.prepare(k, x, scalars)
    for at in layer.chunks():
        k, x, scalars = (value[..., at] for value in told)
        given = None if row_weight is None else row_weight[at]
        loss, found = loss_of.rows(layer.logits(at), k, x, scalars, masked, vocab, given, layer.hidden.dtype)
        losses[at] = loss
        if gradient is not None and found is not None:
            gradient.add(at, found)
        del found  # it may lie where the logits were: let go before the next are made
    if gradient is None:
        return losses, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
    at_bias = hidden.new_empty(0) if gradient.bias is None or bias is None else gradient.bias.to(bias.dtype, copy=True)
    return losses, gradient.hidden.to(hidden.dtype).reshape(hidden.shape), gradient.weight.to(weight.dtype), at_bias


@linear_loss.register_fake
def _(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: Tensor,
    x: Tensor,
    scalars: Tensor,
    masked: bool,
    vocab: int,
    row_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[0], dtype=torch.float64)
    if row_weight is None:
        return losses, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
    at_bias = hidden.new_empty(0) if bias is None else torch.empty_like(bias)
    columns = weight.new_empty(weight.shape[0], weight.shape[1] + extra(hidden, bias))
    return losses, torch.empty_like(hidden), columns[:, : weight.shape[1]], at_bias


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, row_weight: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        kind, *others = rest
        wanted = any(ctx.needs_input_grad[:3])
        losses, *gradients = linear_loss(kind, hidden, weight, bias, *others, row_weight if wanted else None)
        ctx.save_for_backward(*gradients)
        ctx.bias = bias is not None
        losses = torch.where(row_weight == 0, 0, row_weight * losses)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        hidden, bias = (gradient * upstream.to(gradient.dtype) for gradient in (hidden, bias))
        weight = load_op("bias_columns", weight).drop_bias_columns(weight, upstream)
        return hidden, weight, bias if ctx.bias else None, *(None for _ in range(7))


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        kind, k, x, scalars, masked, vocab = rest
        ctx.save_for_backward(hidden, weight, bias, k, x, scalars)
        ctx.rest = (kind, masked, vocab)
        return linear_loss(kind, hidden, weight, bias, k, x, scalars, masked, vocab, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, k, x, scalars = ctx.saved_tensors
        kind, masked, vocab = ctx.rest
        _, *gradients = linear_loss(kind, hidden, weight, bias, k, x, scalars, masked, vocab, upstream)
        return *gradients[:2], gradients[2] if bias is not None else None, *(None for _ in range(6))


class RowLossSpec(NamedTuple):
    """Which operation on rows of logits, and what it is told besides tokens: scalars of every row, [C, N] in float64."""

    kind: str
    scalars: Tensor
    process: Process


def weighted_sum(
    output: Unprojected, x_t: Int[Tensor, "*site"], x_0: Int[Tensor, "*site"], rows: RowLossSpec, weight: Float[Tensor, "*site"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "*site"]]:
    """The weighted sum of the losses, and its terms, which carry no gradient. Float64."""
    value, terms = _Total.apply(*_layer(output, rows), weight.reshape(-1).double(), *_told(x_t, x_0, rows))
    return value, terms.reshape(x_0.shape)


def per_position(
    output: Unprojected, x_t: Int[Tensor, "*site"], x_0: Int[Tensor, "*site"], rows: RowLossSpec
) -> Float[Tensor, "*site"]:
    """The loss of every site, float64."""
    return _Losses.apply(*_layer(output, rows), *_told(x_t, x_0, rows)).reshape(x_0.shape)


def _layer(output: Unprojected, rows: RowLossSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    return output.hidden.reshape(-1, output.hidden.shape[-1]), output.wide_enough(rows.process.states), output.bias


def _told(x_t: Tensor, x_0: Tensor, rows: RowLossSpec) -> tuple[Any, ...]:
    process = rows.process
    return rows.kind, x_t.reshape(-1), x_0.reshape(-1), rows.scalars, process.mask is not None, process.vocab
