"""Clipping, AdamW and moving average in one pass over memory, as a Triton kernel.

Per parameter 20 bytes are read and 16 written. One program works on a chunk of one tensor. Tensors lie anywhere in memory, so
their addresses are passed in a table; a second table says to which tensor a chunk belongs. A small kernel first computes what
all elements of a tensor have in common.
"""

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK, WARPS = 512, 4
# Columns of the table of tensors: addresses of gradient, weight, first moment, second moment, average and step count; the first
# chunk; the number of elements.
COLUMNS = tl.constexpr(8)
# Scalars of each tensor: lr / (1 - beta1^n), sqrt(1 - beta2^n), lr decay, weight of the average, scale of the gradient, and
# whether there is a step at all.
SCALARS = tl.constexpr(6)
ALIGNMENT = 16  # bytes: aligned tensors are loaded and stored four elements at a time


@no_type_check
@triton.jit
def _scalars(
    tensors, constants, settings, norm, finite, checked_count, scalars, count, CHECKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the scalars of every tensor from its step count, rounded as torch rounds them."""
    checked = tl.load(finite + tl.arange(0, CHECKED), mask=tl.arange(0, CHECKED) < checked_count, other=0.0)
    wanted = tl.min(tl.where(tl.abs(checked) < float("inf"), 1.0, 0.0), 0)
    which = tl.arange(0, BLOCK)
    inside = which < count
    count_at = tl.load(tensors + which * COLUMNS + 5, mask=inside).to(tl.pointer_type(tl.float32))
    step = tl.load(count_at, mask=inside).to(tl.float64) + 1
    rate, decay, average_weight, clip = (
        tl.load(settings),
        tl.load(settings + 1),
        tl.load(settings + 2),
        tl.load(settings + 3).to(tl.float32),
    )
    first = (1 - tl.exp(step * tl.load(constants + 5))).to(tl.float32)
    second = (1 - tl.exp(step * tl.load(constants + 6))).to(tl.float32)
    scale = tl.minimum(tl.div_rn(tl.full((), 1, tl.float32), tl.load(norm) + 1e-6) * clip, 1.0)
    at = scalars + which * SCALARS
    tl.store(at, rate / first.to(tl.float64), mask=inside)
    tl.store(at + 1, tl.sqrt_rn(second).to(tl.float64), mask=inside)
    tl.store(at + 2, tl.zeros((BLOCK,), tl.float64) + decay, mask=inside)
    tl.store(at + 3, tl.zeros((BLOCK,), tl.float64) + average_weight, mask=inside)
    tl.store(at + 4, tl.zeros((BLOCK,), tl.float64) + scale.to(tl.float64), mask=inside)
    tl.store(at + 5, tl.zeros((BLOCK,), tl.float64) + wanted, mask=inside)


@no_type_check
@triton.jit
def _address(tensor, column, ALIGNED: tl.constexpr):
    """An address of the table as a pointer to float32; the compiler learns that it is aligned."""
    pointer = tl.load(tensor + column).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@no_type_check
@triton.jit
def _elements(tensor, scalars, constants, start, size, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Update a chunk, with the arithmetic and the dtypes of torch's fused AdamW for CUDA and of its lerp."""
    at = start + tl.arange(0, BLOCK)
    inside = None if FULL else at < size
    gradient_at = _address(tensor, 0, ALIGNED) + at
    weight_at = _address(tensor, 1, ALIGNED) + at
    first_at = _address(tensor, 2, ALIGNED) + at
    second_at = _address(tensor, 3, ALIGNED) + at
    average_at = _address(tensor, 4, ALIGNED) + at
    gradient = tl.load(gradient_at, mask=inside)
    weight = tl.load(weight_at, mask=inside)
    first = tl.load(first_at, mask=inside)
    second = tl.load(second_at, mask=inside)
    average = tl.load(average_at, mask=inside)

    step_size, root = tl.load(scalars).to(tl.float32), tl.load(scalars + 1).to(tl.float32)
    decay, average_weight, scale = (
        tl.load(scalars + 2),
        tl.load(scalars + 3).to(tl.float32),
        tl.load(scalars + 4).to(tl.float32),
    )
    beta_1, rest_1, beta_2, rest_2 = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2), tl.load(constants + 3)
    gradient = (gradient * scale).to(tl.float64)
    wide = weight.to(tl.float64)
    weight = (wide - decay * wide).to(tl.float32)
    first = (beta_1 * first.to(tl.float64) + rest_1 * gradient).to(tl.float32)
    second = (beta_2 * second.to(tl.float64) + rest_2 * gradient * gradient).to(tl.float32)
    below = (tl.div_rn(tl.sqrt_rn(second), root).to(tl.float64) + tl.load(constants + 4)).to(tl.float32)
    weight = weight - tl.div_rn(step_size * first, below)
    gap = weight - average
    # torch's lerp: the form that is exact at the nearer end
    average = tl.where(average_weight < 0.5, average + average_weight * gap, weight - gap * (1 - average_weight))

    tl.store(weight_at, weight, mask=inside)
    tl.store(first_at, first, mask=inside)
    tl.store(second_at, second, mask=inside)
    tl.store(average_at, average, mask=inside)


@no_type_check
@triton.jit
def _adamw(owners, tensors, scalars, constants, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Update one chunk; the first chunk of a tensor also counts the step."""
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk).to(tl.int64)
    tensor = tensors + owner * COLUMNS
    scalars += owner * SCALARS
    start = (chunk - tl.load(tensor + 6)) * BLOCK
    size = tl.load(tensor + 7)
    if tl.load(scalars + 5) > 0:
        count_at = _address(tensor, 5, False)
        count = tl.load(count_at, mask=start == 0)
        tl.store(count_at, count + 1, mask=start == 0)
        if start + BLOCK <= size:
            _elements(tensor, scalars, constants, start, size, ALIGNED, True, BLOCK)
        else:
            _elements(tensor, scalars, constants, start, size, ALIGNED, False, BLOCK)


class Tables:
    """Addresses of the tensors of an optimizer. Gradients may move: addresses are looked up at every step.

    Args:
        optimizer: The optimizer, with one parameter group.
        block: Elements per chunk.
        warps: Warps per program.
    """

    def __init__(self, optimizer: torch.optim.AdamW, block: int = BLOCK, warps: int = WARPS) -> None:
        (self.group,), self.state = optimizer.param_groups, optimizer.state
        self.weights: list[Tensor] = self.group["params"]
        self.block, self.warps = block, warps
        device = self.weights[0].device
        chunks = [triton.cdiv(weight.numel(), block) for weight in self.weights]
        self.owners = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks)).int().to(device)
        firsts = torch.tensor([0, *chunks[:-1]]).cumsum(0).tolist()
        self.sizes = list(zip(firsts, (weight.numel() for weight in self.weights), strict=True))
        beta_1, beta_2 = self.group["betas"]
        constants = [beta_1, 1 - beta_1, beta_2, 1 - beta_2, self.group["eps"]]
        logs = torch.tensor([beta_1, beta_2], dtype=torch.float64).log()
        self.constants = torch.cat([torch.tensor(constants, dtype=torch.float64), logs]).to(device)
        self.addresses: list[tuple[int, ...]] = []

    def locate(self, averages: list[Tensor]) -> bool:
        """Look up the addresses of all tensors.

        Args:
            averages: Moving averages of the weights.

        Returns:
            Whether the kernel can make the step: all tensors are plain, dense and float32, and those of a parameter have the
            same order in memory.
        """
        found = [(weight.grad, weight, average) for weight, average in zip(self.weights, averages, strict=True)]
        if not all(_is_plain(tensor) for row in found for tensor in row):
            return False
        rows = [self._row(weight, average) for _, weight, average in found]
        if not all(_order(tensor) == _order(row[1]) for row in rows for tensor in row[:5]):
            return False
        addresses = [tuple(tensor.data_ptr() for tensor in row) for row in rows]
        if addresses != self.addresses:
            self.addresses = addresses
            self.aligned = all(address % ALIGNMENT == 0 for row in addresses for address in row[:5])
            table = torch.tensor([row + size for row, size in zip(addresses, self.sizes, strict=True)])
            self.tensors = self._to_device(table)
        return True

    def _row(self, weight: Tensor, average: Tensor) -> tuple[Tensor, ...]:
        """The tensors of one parameter, in the order of the table."""
        state = self.state[weight]
        if not state:  # as torch's AdamW creates it at its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        assert weight.grad is not None
        return weight.grad, weight, state["exp_avg"], state["exp_avg_sq"], average, state["step"]

    def _to_device(self, table: Tensor) -> Tensor:
        """Copy a host tensor to the device without waiting."""
        device = self.constants.device
        return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table

    def step(self, norm: Tensor, clip: float, average_weight: float, finite: Tensor) -> None:
        """Make the step if all numbers in `finite` are finite.

        Args:
            norm: Norm of the gradient.
            clip: Greatest norm of the gradient; 0 for no clipping.
            average_weight: Weight of the new parameters in the moving average.
            finite: Numbers to check `[n]`.
        """
        rate, count = float(self.group["lr"]), len(self.weights)
        settings = self._to_device(
            torch.tensor([rate, rate * self.group["weight_decay"], average_weight, clip or math.inf], dtype=torch.float64)
        )
        scalars = self.constants.new_empty(count, SCALARS.value)
        checked_count = len(finite)
        sizes = {"CHECKED": triton.next_power_of_2(checked_count), "BLOCK": triton.next_power_of_2(count)}
        _scalars[(1,)](self.tensors, self.constants, settings, norm, finite.double(), checked_count, scalars, count, **sizes)
        options = {"ALIGNED": self.aligned, "BLOCK": self.block}
        _adamw[(len(self.owners),)](self.owners, self.tensors, scalars, self.constants, **options, num_warps=self.warps)


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether a tensor is plain (no subclass), float32, and contiguous or channels-last."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype != torch.float32:  # type: ignore[union-attr]
        return False
    assert tensor is not None
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _order(tensor: Tensor) -> list[tuple[int, int]]:
    """The dimensions of more than one element, with their strides: the order of the elements in memory."""
    return [(i, stride) for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if size > 1]
