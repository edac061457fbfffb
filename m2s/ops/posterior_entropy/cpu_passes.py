"""Passes over the vocabulary for `cpu.py`: eager ones in cache-sized blocks of rows, and expressions for torch.compile.

Every pass works on rows of softmax weights w = exp(logit - top), in which the entries at the clean token x and the current
token k are 0: these two are handled separately, as scalars of the row. Outside {k, x} the quantity e of the loss is affine in
w: e = slope w + level, 1 + e = slope w + level_1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from m2s.ops.row_blocks import block_rows

SHORT = 1024  # in rows up to this length, one logarithm for eight factors saves no time


def excess(e: Tensor, one_plus_e: Tensor) -> Tensor:
    """Compute g(e) = e - log(1 + e) without cancellation.

    For small e, where the difference cancels, with z = e / (2 + e): g = z (e - 2 z^2 (1/3 + z^2/5 + z^4/7 + ...)).

    Args:
        e: Argument, greater than -1.
        one_plus_e: 1 + e, computed without rounding e first.

    Returns:
        g(e), with the shape of `e`.
    """
    z = e / (e + 2)
    square = z * z
    near = z * (e - square * (2 / 3 + square * (2 / 5 + square * (2 / 7))))
    return torch.where(e.abs() < (0.2 if e.dtype == torch.float32 else 0.01), near, e - torch.log(one_plus_e))


class RowGradient(NamedTuple):
    """The numbers `[N, 1]` of each row that turn its weights w into the gradient.

    Outside {k, x}: d loss / d logit = scale w (lift (w - pivot) / (slope w + level_1) + shift). At x and k the gradient is
    given directly.

    Args:
        slope: d e / d w.
        level_1: 1 + e at w = 0.
        pivot: The weight at which the first summand vanishes.
        lift: Factor of the first summand.
        shift: The second summand.
        scale: Factor of both summands.
        at_x: Gradient at the clean token.
        at_k: Gradient at the current token.
        top: The greatest logit.
    """

    slope: Tensor
    level_1: Tensor
    pivot: Tensor
    lift: Tensor
    shift: Tensor
    scale: Tensor
    at_x: Tensor
    at_k: Tensor
    top: Tensor


class Passes:
    """The two forward passes over the rows, eager or compiled.

    Args:
        logits: Logits `[N, V]`.
        two: The columns x and k `[N, 2]`; x twice where k is the mask.
        wide: Dtype of sums, float64 where the device has it.
    """

    def __init__(self, logits: Tensor, two: Tensor, wide: torch.dtype) -> None:
        self.compiling = torch.compiler.is_compiling()
        if self.compiling:
            self.w, self.top, self.rest_w, self.top_w = _compiled_weigh(logits, two, wide)
        else:
            size = block_rows(logits)
            self.blocks = [slice(start, start + size) for start in range(0, len(logits), size)]
            self.w = torch.empty_like(logits)
            self.work = torch.empty(2, min(size, len(logits)), logits.shape[-1], dtype=wide, device=logits.device)
            self.top, self.rest_w, self.top_w = _concatenate(
                [_weigh(logits[at], self.w[at], two[at], self.work[:, : len(self.w[at])]) for at in self.blocks]
            )

    def sums(self, slope: Tensor, level: Tensor, level_1: Tensor, sum_e: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of g(e) = e - log(1 + e) and of G = e / (1 + e) over all columns, where e = slope w + level.

        Args:
            slope: Factor of the weights w, `[N, 1]`.
            level: Constant term of e, `[N, 1]`.
            level_1: Constant term of 1 + e, `[N, 1]`; 1 + level without cancellation where `level` is near -1.
            sum_e: The sum of e over all columns, `[N, 1]`.

        Returns:
            The two sums, `[N, 1]` each.
        """
        w = self.w
        if self.compiling:
            return _compiled_sums(w, slope, level, level_1, sum_e)
        sum_g, sum_big_g = _concatenate(
            [_sums(w[at], slope[at], level[at], level_1[at], sum_e[at], self.work[:, : len(w[at])]) for at in self.blocks]
        )
        return sum_g, sum_big_g


def _weigh(logits: Tensor, w: Tensor, two: Tensor, work: Tensor) -> tuple[Tensor, ...]:
    """First pass: fill w = exp(logits - top), 0 at the columns `two`; return top, and sum and maximum of w."""
    top = logits.amax(-1, keepdim=True)
    torch.sub(logits, top, out=w).exp_().scatter_(-1, two, 0.0)
    return top.to(work.dtype), work[0].copy_(w).sum(-1, keepdim=True), w.amax(-1, keepdim=True).to(work.dtype)


def _sums(w: Tensor, slope: Tensor, level: Tensor, level_1: Tensor, sum_e: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """Second pass, e = slope w + level: sums of g(e) and of G = e/(1 + e) over all columns of w.

    For float32 weights, float64 has enough digits to write sum g = sum e - sum log(1 + e), with one logarithm for the product
    of eight factors. float64 weights use the series of g where e is small.
    """
    e, v = work
    torch.mul(e.copy_(w), slope, out=e)
    torch.add(e, level_1, out=v)
    e.add_(level)
    if w.dtype == e.dtype:
        return excess(e, v).sum(-1, keepdim=True), (e / v).sum(-1, keepdim=True)
    sum_big_g = e.div_(v).sum(-1, keepdim=True)
    sum_g = sum_e.clone()
    for _ in range(3):  # halve the row three times by multiplying pairs; an odd last column is subtracted by itself
        half = v.shape[-1] // 2
        if v.shape[-1] % 2:
            sum_g -= torch.log(v[:, -1:])
        v = v[:, :half].mul_(v[:, half : 2 * half])
    return sum_g - v.log_().sum(-1, keepdim=True), sum_big_g


def _compiled_weights(logits: Tensor, top: Tensor, two: Tensor) -> Tensor:
    """The weights that `_weigh` writes, as an expression: the compiler plans its buffers."""
    return torch.where(
        _is_column(two[:, :1], logits) | _is_column(two[:, 1:], logits), 0.0, torch.exp(logits - top.to(logits.dtype))
    )


def _compiled_weigh(logits: Tensor, two: Tensor, wide: torch.dtype) -> tuple[Tensor, ...]:
    """w and what `_weigh` returns. On a GPU the next pass computes the weights again from the logits: no w is stored."""
    top = logits.amax(-1, keepdim=True)
    w = _compiled_weights(logits, top, two)
    found = [top.to(wide), w.to(wide).sum(-1, keepdim=True), w.amax(-1, keepdim=True).to(wide)]
    top, rest_w, top_w = materialize(torch.cat(found, -1)).split(1, -1)
    return _compiled_weights(logits, top, two) if logits.is_cuda else w, top, rest_w, top_w


def _compiled_sums(w: Tensor, slope: Tensor, level: Tensor, level_1: Tensor, sum_e: Tensor) -> tuple[Tensor, Tensor]:
    """What `_sums` returns; eight columns side by side, so that w is read once and nothing is written."""
    if w.dtype == slope.dtype or w.shape[-1] <= SHORT:
        scaled = slope * w.to(slope.dtype)
        e, v = scaled + level, scaled + level_1
        return excess(e, v).sum(-1, keepdim=True), (e / v).sum(-1, keepdim=True)
    sum_g, sum_big_g = sum_e, torch.zeros_like(sum_e)
    width, left = w.shape[-1] // 8, w.shape[-1] % 8
    together = [[w[:, i * width : (i + 1) * width] for i in range(8)]] if width else []
    for columns in [*together, *([w[:, 8 * width + i : 8 * width + i + 1]] for i in range(left))]:
        divisor, dividend = torch.ones_like(slope), torch.zeros_like(slope)  # e/v + e'/v' = (e v' + e' v) / (v v')
        for part in columns:
            scaled = slope * part.to(slope.dtype)
            v = scaled + level_1
            divisor, dividend = divisor * v, dividend * v + divisor * (scaled + level)
        sum_g = sum_g - torch.log(divisor).sum(-1, keepdim=True)
        sum_big_g = sum_big_g + (dividend / divisor).sum(-1, keepdim=True)
    return sum_g, sum_big_g


def _is_column(index: Tensor, logits: Tensor) -> Tensor:
    """Where the column is `index`: a comparison, which the compiler can fuse, in place of a scatter."""
    return torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device) == index.int()


def _coefficients(row: RowGradient, upstream: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Coefficients of w (lift (w - pivot) / v + shift) scale upstream, with the factors of the quotient moved into v."""
    slope, level_1, pivot, lift, shift, scale, at_x, at_k, top = row
    lift, shift = lift * scale * upstream, shift * scale * upstream
    level_1 = torch.where(lift == 0, torch.inf, level_1 / lift.where(lift != 0, 1))
    slope = torch.where(lift == 0, 1, slope / lift.where(lift != 0, 1))
    return tuple(value.to(dtype) for value in (slope, level_1, pivot, shift, at_x * upstream, at_k * upstream, top))


def backward_pass(w: Tensor, row: RowGradient, k: Tensor, x: Tensor, mask: int | None, upstream: Tensor) -> Tensor:
    """Third pass: overwrite the weights with the gradient.

    Args:
        w: Weights `[N, V]` of the forward pass; overwritten.
        row: Numbers of each row.
        k: Current tokens `[N, 1]`.
        x: Clean tokens `[N, 1]`.
        mask: The mask token, or None.
        upstream: Gradient of the losses `[N, 1]`.

    Returns:
        The gradient with respect to the logits, in the memory of `w`.
    """
    slope, level_1, pivot, shift, at_x, at_k, _ = _coefficients(row, upstream, w.dtype)
    size = block_rows(w)
    work = w.new_empty(2, min(size, len(w)), w.shape[-1])
    for start in range(0, len(w), size):
        at = slice(start, start + size)
        part = w[at]
        v, difference = work[:, : len(part)]
        torch.mul(part, slope[at], out=v).add_(level_1[at])
        part.mul_(torch.sub(part, pivot[at], out=difference).div_(v).add_(shift[at]))
    w.scatter_(-1, x, at_x)
    return w.scatter_(-1, k if mask is None else torch.where(k == mask, x, k), at_k)


def compiled_backward_pass(logits: Tensor, row: RowGradient, k: Tensor, x: Tensor, vocab: int, upstream: Tensor) -> Tensor:
    """Compute the gradient as an expression of the logits, for torch.compile.

    Args:
        logits: Logits `[N, V]`.
        row: Numbers of each row.
        k: Current tokens `[N, 1]`.
        x: Clean tokens `[N, 1]`.
        vocab: Number of clean tokens.
        upstream: Gradient of the losses `[N, 1]`.

    Returns:
        The gradient `[N, V]`, 0 in columns past the vocabulary.
    """
    coefficients = materialize(torch.cat(_coefficients(row, upstream, logits.dtype), -1))
    slope, level_1, pivot, shift, at_x, at_k, top = coefficients.split(1, -1)
    w = torch.exp(logits - top)
    gradient = w * ((w - pivot) / (w * slope + level_1) + shift)
    gradient = torch.where(_is_column(k, w), at_k, torch.where(_is_column(x, w), at_x, gradient))
    if logits.shape[-1] == vocab:
        return gradient
    return torch.where(torch.arange(logits.shape[-1], device=logits.device) < vocab, gradient, 0)


def _concatenate(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Join the results of the blocks, one tensor per result."""
    return [torch.cat(column) for column in zip(*parts, strict=True)]


# The compiler would rather recompute these few numbers of a row at every entry of it than store them. An op that it cannot look
# into forces it to store them.
@torch.library.custom_op("m2s::materialize", mutates_args=())
def materialize(row: Tensor) -> Tensor:
    """Copy a tensor through an op that torch.compile does not look into.

    Args:
        row: A few numbers per row.

    Returns:
        A copy of `row`.
    """
    return row.clone()


@materialize.register_fake
def _(row: Tensor) -> Tensor:
    return torch.empty_like(row)
