"""The last layer and a loss over the vocabulary in one operation: losses and gradients straight from hidden states.

This is the end of the forward pass of a fused training step. Logits are computed for a chunk of rows at a time
(`m2s.ops.last_layer_chunks`), turned into losses and, in place, into their gradient, and discarded. `weighted_sum` is for
training: the weights of the losses are known, so that values and gradients are computed from the same logits.
`per_position` is for arbitrary upstream gradients: its backward pass computes the logits a second time.

A row loss is a module of `m2s.ops` (posterior_entropy, score_entropy, factorized_entropy or cross_entropy) with two functions
in its `cpu.py` and `triton.py`:

- `prepare(x_t, x_0, row_scalars)` converts the tokens `[N]` and row scalars `[C, N]` of all rows once;
- `row_losses(logits, x_t, x_0, row_scalars, has_mask, vocab, weight, dtype)` returns the losses of some rows, and with a weight
  the gradient of weight times loss.

Row scalars are the numbers that a row loss needs besides logits and tokens. Each row has C of them; `row_scalars` of the module
documents which.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import load_op, uses_triton
from m2s.ops.derivatives import constant_inputs, first_derivative_only
from m2s.ops.last_layer import Unprojected
from m2s.ops.last_layer_chunks import Gradient, Layer, extra_columns
from m2s.process import Process


@torch.library.custom_op("m2s::linear_loss", mutates_args=())
def linear_loss(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_t: Tensor,
    x_0: Tensor,
    row_scalars: Tensor,
    has_mask: bool,
    vocab: int,
    row_weight: Tensor | None,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the losses of all rows and, given weights, the gradients of their weighted sum.

    Args:
        kind: Name of the row loss: "posterior_entropy", "score_entropy", "factorized_entropy" or "cross_entropy".
        hidden: Hidden states `[N, D]`.
        weight: Weight of the last layer `[V, D]`.
        bias: Bias of the last layer `[V]`, or None.
        x_t: Current tokens `[N]`.
        x_0: Clean tokens `[N]`.
        row_scalars: `[C, N]` in float64.
        has_mask: Whether the process has a mask, the state `vocab`.
        vocab: Number of clean tokens.
        row_weight: Weight of each row `[N]`, or None for the losses alone.
        fused: Whether Triton kernels run. An argument, so that a backward pass repeats the choice of its forward pass.

    Returns:
        Losses `[N]` in float64, and the gradients with respect to hidden, weight and bias; the gradients are empty tensors
        without `row_weight`, the last one also without a bias.
    """
    layer, row_loss = Layer(hidden, weight, bias), load_op(kind, fused)
    gradient = None if row_weight is None else Gradient(layer)
    losses = torch.empty(len(layer.hidden), dtype=torch.float64, device=hidden.device)
    prepared = row_loss.prepare(x_t, x_0, row_scalars)
    for at in layer.chunks():
        x_t, x_0, row_scalars = (value[..., at] for value in prepared)
        weight_here = None if row_weight is None else row_weight[at]
        loss, logits_gradient = row_loss.row_losses(
            layer.logits(at), x_t, x_0, row_scalars, has_mask, vocab, weight_here, layer.hidden.dtype
        )
        losses[at] = loss
        if gradient is not None and logits_gradient is not None:
            gradient.add(at, logits_gradient)
        del logits_gradient  # it occupies the memory of the logits: free it before the next chunk allocates
    if gradient is None:
        return losses, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
    bias_gradient = hidden.new_empty(0)
    if gradient.bias is not None and bias is not None:
        bias_gradient = gradient.bias.to(bias.dtype, copy=True)  # a custom op may not return two views of one tensor
    return losses, gradient.hidden.to(hidden.dtype).reshape(hidden.shape), gradient.weight.to(weight.dtype), bias_gradient


@linear_loss.register_fake
def _(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_t: Tensor,
    x_0: Tensor,
    row_scalars: Tensor,
    has_mask: bool,
    vocab: int,
    row_weight: Tensor | None,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[0], dtype=torch.float64)
    if row_weight is None:
        return losses, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
    bias_gradient = hidden.new_empty(0) if bias is None else torch.empty_like(bias)
    columns = weight.new_empty(weight.shape[0], weight.shape[1] + extra_columns(hidden, bias))
    return losses, torch.empty_like(hidden), columns[:, : weight.shape[1]], bias_gradient


class _WithGradients(torch.autograd.Function):
    """A sum of terms whose gradients with respect to hidden states, weight and bias were computed together with the terms."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, terms: Tensor, *gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.has_bias = bias is not None
        return terms.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only("the fused loss")
        hidden, weight, bias = ctx.saved_tensors
        hidden, weight, bias = (gradient * upstream.to(gradient.dtype) for gradient in (hidden, weight, bias))
        weight = weight.contiguous()  # a slice without the columns of the bias
        return hidden, weight, bias if ctx.has_bias else None, *(None for _ in range(4))


class _PerPosition(torch.autograd.Function):
    """The loss of every row. The backward pass computes the logits again, with the upstream gradient as row weights."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, fused: bool, *row_inputs: Any) -> Tensor:
        kind, x_t, x_0, row_scalars, has_mask, vocab = row_inputs
        ctx.save_for_backward(hidden, weight, bias, x_t, x_0, row_scalars)
        ctx.settings = (kind, has_mask, vocab, fused)
        return linear_loss(kind, hidden, weight, bias, x_t, x_0, row_scalars, has_mask, vocab, None, fused)[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only("the fused loss")
        hidden, weight, bias, x_t, x_0, row_scalars = ctx.saved_tensors
        kind, has_mask, vocab, fused = ctx.settings
        _, *gradients = linear_loss(kind, hidden, weight, bias, x_t, x_0, row_scalars, has_mask, vocab, upstream, fused)
        return *gradients[:2], gradients[2] if bias is not None else None, *(None for _ in range(7))


class RowLossSpec(NamedTuple):
    """A row loss and its scalars.

    Args:
        kind: Name of the row loss in `m2s.ops`: "posterior_entropy", "score_entropy", "factorized_entropy" or "cross_entropy".
        scalars: Row scalars `[C, N]` in float64, from `row_scalars` of that module (for "cross_entropy" the rate, C = 1).
        process: The forward process.
    """

    kind: str
    scalars: Tensor
    process: Process


def weighted_sum(
    output: Unprojected, x_t: Int[Tensor, "*site"], x_0: Int[Tensor, "*site"], spec: RowLossSpec, weight: Float[Tensor, "*site"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "*site"]]:
    """Compute the weighted sum of the losses, with the gradient found in the forward pass.

    Args:
        output: Hidden states and last layer of the network.
        x_t: Current tokens.
        x_0: Clean tokens.
        spec: The row loss and its scalars.
        weight: Weight of each position; 0 excludes it.

    Returns:
        The sum, and its terms `[*site]`, which carry no gradient. Both in float64.

    Raises:
        RuntimeError: The weights or the row scalars require a gradient, which this operation does not compute.
    """
    constant_inputs("the fused loss", weight, spec.scalars)
    layer, row_weight, (kind, *others) = _layer(output, spec), weight.reshape(-1).double(), _row_inputs(x_t, x_0, spec)
    wanted = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in layer)
    with torch.no_grad():
        losses, *gradients = linear_loss(kind, *layer, *others, row_weight if wanted else None, uses_triton(output.hidden))
        # a weight of 0 gives 0 also where the loss is infinite: padding must not spoil a batch
        terms = torch.where(row_weight == 0, 0, row_weight * losses)
    return _WithGradients.apply(*layer, terms, *gradients), terms.reshape(x_0.shape)


def per_position(
    output: Unprojected, x_t: Int[Tensor, "*site"], x_0: Int[Tensor, "*site"], spec: RowLossSpec
) -> Float[Tensor, "*site"]:
    """Compute the loss of every position.

    Args:
        output: Hidden states and last layer of the network.
        x_t: Current tokens.
        x_0: Clean tokens.
        spec: The row loss and its scalars.

    Returns:
        The losses `[*site]` in float64.

    Raises:
        RuntimeError: The row scalars require a gradient, which this operation does not compute.
    """
    constant_inputs("the fused loss", spec.scalars)
    fused = uses_triton(output.hidden)
    return _PerPosition.apply(*_layer(output, spec), fused, *_row_inputs(x_t, x_0, spec)).reshape(x_0.shape)


def _layer(output: Unprojected, spec: RowLossSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states as rows, weight and bias."""
    return output.hidden.reshape(-1, output.hidden.shape[-1]), output.wide_enough(spec.process.states), output.bias


def _row_inputs(x_t: Tensor, x_0: Tensor, spec: RowLossSpec) -> tuple[Any, ...]:
    """What `linear_loss` takes besides the layer: kind, tokens, scalars, whether there is a mask, vocabulary."""
    process = spec.process
    return spec.kind, x_t.reshape(-1), x_0.reshape(-1), spec.scalars, process.mask is not None, process.vocab
