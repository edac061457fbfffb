"""Clip, AdamW and the moving average in one pass: of each parameter 20 bytes are read and 16 written, and 2 more where the
weight is kept in bf16 beside.

One program works on a chunk of one tensor. A table says which tensor a chunk belongs to, another where the tensors lie.
"""

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK, WARPS = 512, 4
COLUMNS = tl.constexpr(9)  # of the table of tensors: seven addresses, the first chunk, the number of elements
NUMBERS = tl.constexpr(6)  # of each tensor: lr / (1 - beta1^n), sqrt(1 - beta2^n), lr decay, share, scale of the gradient,
# and whether there is a step at all
ALIGNED = 16  # bytes: then loads and stores are of four elements


@no_type_check
@triton.jit
def _numbers(tensors, constants, given, norm, finite, many, numbers, count, MANY: tl.constexpr, BLOCK: tl.constexpr):
    """What the elements of each tensor have in common, from the steps made so far; rounded as torch rounds it."""
    asked = tl.load(finite + tl.arange(0, MANY), mask=tl.arange(0, MANY) < many, other=0.0)
    wanted = tl.min(tl.where(tl.abs(asked) < float("inf"), 1.0, 0.0), 0)
    which = tl.arange(0, BLOCK)
    inside = which < count
    made_at = tl.load(tensors + which * COLUMNS + 5, mask=inside).to(tl.pointer_type(tl.float32))
    step = tl.load(made_at, mask=inside).to(tl.float64) + 1
    rate, decay, share, clip = tl.load(given), tl.load(given + 1), tl.load(given + 2), tl.load(given + 3).to(tl.float32)
    first = (1 - tl.exp(step * tl.load(constants + 5))).to(tl.float32)
    second = (1 - tl.exp(step * tl.load(constants + 6))).to(tl.float32)
    scale = tl.minimum(tl.div_rn(tl.full((), 1, tl.float32), tl.load(norm) + 1e-6) * clip, 1.0)
    at = numbers + which * NUMBERS
    tl.store(at, rate / first.to(tl.float64), mask=inside)
    tl.store(at + 1, tl.sqrt_rn(second).to(tl.float64), mask=inside)
    tl.store(at + 2, tl.zeros((BLOCK,), tl.float64) + decay, mask=inside)
    tl.store(at + 3, tl.zeros((BLOCK,), tl.float64) + share, mask=inside)
    tl.store(at + 4, tl.zeros((BLOCK,), tl.float64) + scale.to(tl.float64), mask=inside)
    tl.store(at + 5, tl.zeros((BLOCK,), tl.float64) + wanted, mask=inside)


@no_type_check
@triton.jit
def _address(tensor, column, WIDE: tl.constexpr):
    pointer = tl.load(tensor + column).to(tl.pointer_type(tl.float32))
    if WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@no_type_check
@triton.jit
def _elements(
    tensor, numbers, constants, start, size, WIDE: tl.constexpr, BF16: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """The arithmetic, and its types, of torch's fused AdamW for CUDA and of its lerp."""
    at = start + tl.arange(0, BLOCK)
    inside = None if WHOLE else at < size
    gradient_at = _address(tensor, 0, WIDE) + at
    weight_at = _address(tensor, 1, WIDE) + at
    first_at = _address(tensor, 2, WIDE) + at
    second_at = _address(tensor, 3, WIDE) + at
    average_at = _address(tensor, 4, WIDE) + at
    gradient = tl.load(gradient_at, mask=inside)
    weight = tl.load(weight_at, mask=inside)
    first = tl.load(first_at, mask=inside)
    second = tl.load(second_at, mask=inside)
    average = tl.load(average_at, mask=inside)

    step_size, root = tl.load(numbers).to(tl.float32), tl.load(numbers + 1).to(tl.float32)
    decay, share, scale = tl.load(numbers + 2), tl.load(numbers + 3).to(tl.float32), tl.load(numbers + 4).to(tl.float32)
    beta_1, rest_1, beta_2, rest_2 = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2), tl.load(constants + 3)
    gradient = (gradient * scale).to(tl.float64)
    wide = weight.to(tl.float64)
    weight = (wide - decay * wide).to(tl.float32)
    first = (beta_1 * first.to(tl.float64) + rest_1 * gradient).to(tl.float32)
    second = (beta_2 * second.to(tl.float64) + rest_2 * gradient * gradient).to(tl.float32)
    below = (tl.div_rn(tl.sqrt_rn(second), root).to(tl.float64) + tl.load(constants + 4)).to(tl.float32)
    weight = weight - tl.div_rn(step_size * first, below)
    gap = weight - average
    average = tl.where(share < 0.5, average + share * gap, weight - gap * (1 - share))

    tl.store(weight_at, weight, mask=inside)
    tl.store(first_at, first, mask=inside)
    tl.store(second_at, second, mask=inside)
    tl.store(average_at, average, mask=inside)
    if tl.load(tensor + 6) != 0:
        half = tl.bfloat16 if BF16 else tl.float16
        narrow = tl.load(tensor + 6).to(tl.pointer_type(half))
        if WIDE:
            narrow = tl.multiple_of(narrow, 16)
        tl.store(narrow + at, weight.to(half), mask=inside)


@no_type_check
@triton.jit
def _adamw(owners, tensors, numbers, constants, WIDE: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk).to(tl.int64)
    tensor = tensors + owner * COLUMNS
    numbers += owner * NUMBERS
    start = (chunk - tl.load(tensor + 7)) * BLOCK
    size = tl.load(tensor + 8)
    if tl.load(numbers + 5) > 0:
        count_at = _address(tensor, 5, False)
        count = tl.load(count_at, mask=start == 0)
        tl.store(count_at, count + 1, mask=start == 0)
        if start + BLOCK <= size:
            _elements(tensor, numbers, constants, start, size, WIDE, BF16, True, BLOCK)
        else:
            _elements(tensor, numbers, constants, start, size, WIDE, BF16, False, BLOCK)


class Tables:
    """Where the tensors of an optimizer lie. Gradients may move: their addresses are looked up at every step."""

    def __init__(
        self, optimizer: torch.optim.AdamW, narrow: dict[Tensor, Tensor], block: int = BLOCK, warps: int = WARPS
    ) -> None:
        (self.group,), self.state, self.narrow = optimizer.param_groups, optimizer.state, narrow
        self.bf16 = all(value.dtype == torch.bfloat16 for value in narrow.values())  # else all float16
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

    def take(self, averages: list[Tensor]) -> bool:
        """Whether the kernel can do it: all are plain, contiguous tensors of float32. Looks up where they lie."""
        found = [(weight.grad, weight, average) for weight, average in zip(self.weights, averages, strict=True)]
        if not all(_plain(tensor) for row in found for tensor in row):
            return False
        rows = [self._row(weight, average) for _, weight, average in found]
        addresses = [tuple(0 if tensor is None else tensor.data_ptr() for tensor in row) for row in rows]
        if addresses != self.addresses:
            self.addresses = addresses
            self.wide = all(address % ALIGNED == 0 for row in addresses for address in (*row[:5], row[6]))
            table = torch.tensor([row + size for row, size in zip(addresses, self.sizes, strict=True)])
            self.tensors = self._sent(table)
        return True

    def _row(self, weight: Tensor, average: Tensor) -> tuple[Tensor | None, ...]:
        state = self.state[weight]
        if not state:  # as the optimizer makes it at its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        assert weight.grad is not None
        return weight.grad, weight, state["exp_avg"], state["exp_avg_sq"], average, state["step"], self.narrow.get(weight)

    def _sent(self, table: Tensor) -> Tensor:
        device = self.constants.device
        return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table

    def step(self, norm: Tensor, clip: float, share: float, finite: Tensor) -> None:
        """The step, where the numbers in `finite` are."""
        rate, count = float(self.group["lr"]), len(self.weights)
        given = self._sent(
            torch.tensor([rate, rate * self.group["weight_decay"], share, clip or math.inf], dtype=torch.float64)
        )
        numbers = self.constants.new_empty(count, NUMBERS.value)
        many = len(finite)
        sizes = {"MANY": triton.next_power_of_2(many), "BLOCK": triton.next_power_of_2(count)}
        _numbers[(1,)](self.tensors, self.constants, given, norm, finite.double(), many, numbers, count, **sizes)
        how = {"WIDE": self.wide, "BF16": self.bf16, "BLOCK": self.block}
        _adamw[(len(self.owners),)](self.owners, self.tensors, numbers, self.constants, **how, num_warps=self.warps)


def _plain(tensor: Tensor | None) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.is_contiguous()  # type: ignore[union-attr]
