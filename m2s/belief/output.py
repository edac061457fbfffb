"""What a network hands over: logits, or hidden states with the last layer not yet applied; and how it is asked for them."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from m2s import check
from m2s.ops.columns import reference
from m2s.process import Process


@dataclass(frozen=True)
class Unprojected:
    """Hidden states [*sites, D] and the last layer's weight [columns, D] and bias: accepted wherever `output` is.

    A fused operation reads them directly and never multiplies them out; everything else does so in float32.
    """

    hidden: Float[Tensor, "*site D"]
    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, "V"] | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.shape[-1] != self.hidden.shape[-1]:
            raise ValueError(
                f"weight has shape {list(self.weight.shape)}, but hidden has {self.hidden.shape[-1]} features: "
                "expected [columns, features]"
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"bias has shape {list(self.bias.shape)}, but weight has {self.weight.shape[0]} rows")

    def wide_enough(self, states: int) -> Float[Tensor, "V D"]:
        """The weight, which must have a row for every state."""
        if self.weight.shape[0] < states:
            lacking = check.without_mask(self.weight.shape[0], states)
            raise ValueError(f"weight has {self.weight.shape[0]} rows, but the process has {states} states{lacking}")
        return self.weight

    def project(self) -> Float[Tensor, "*site V"]:
        """The logits of all columns, in float32 or better, whatever autocast says."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            return last_layer(self.hidden, self.weight, self.bias)


# Opaque to a compiler, which may not know a product of bf16 that is returned in float32.
@torch.library.custom_op("m2s::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a b of matrices in bf16 or float16, added up and returned in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


DTYPES = re.compile(r"same dtype|scalar type|input dtype|\.dtype to be equal|Input type \(")  # torch, where two do not fit
HALF_EXTRA = 8  # columns beside a weight in bf16 for the bias: two, and six that keep the width a multiple of eight
Beside = Callable[[Tensor, Tensor | None, int, torch.dtype], Tensor]


def half_operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, beside: Beside = reference.beside
) -> tuple[Tensor, Tensor]:
    """The factors of hidden weight^T + bias as one product in the dtype of hidden states that are bf16.

    The bias goes in as two more columns of the weight (it and what rounding leaves of it) beside ones in hidden. So its
    gradient comes out of the product that gives the weight's.
    """
    if bias is None:
        return hidden, weight.to(hidden.dtype)
    return beside(hidden, None, HALF_EXTRA, hidden.dtype), beside(weight, bias, HALF_EXTRA, hidden.dtype)


class _HalfOperands(torch.autograd.Function):
    """hidden weight^T + bias for hidden states in bf16: weight rounded to bf16, sums and result in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.width, ctx.dtype = hidden.shape[-1], weight.dtype
        hidden, columns = half_operands(hidden, weight, bias)
        ctx.save_for_backward(hidden, columns)
        return product(hidden, columns.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, columns = ctx.saved_tensors
        width, rounded = ctx.width, upstream.to(hidden.dtype)
        weight = product(rounded.t(), hidden).to(ctx.dtype)
        bias = weight[:, width] if ctx.needs_input_grad[2] else None
        return product(rounded, columns[:, :width]).to(hidden.dtype), weight[:, :width], bias


def last_layer(hidden: Float[Tensor, "*site D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, "V"] | None) -> Tensor:
    """The logits [*site, V] of a last layer, in float32 at least. Hidden states in bf16 keep the operands in bf16 on a GPU."""
    if hidden.dtype == torch.bfloat16 and hidden.is_cuda:
        flat = _HalfOperands.apply(hidden.reshape(-1, hidden.shape[-1]), weight, None if bias is None else bias.float())
        return flat.reshape(*hidden.shape[:-1], -1)
    return torch.nn.functional.linear(full(hidden), full(weight), None if bias is None else full(bias))


Output = Tensor | Unprojected


def full(x: Tensor) -> Tensor:
    """float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def padded_logits(output: Output, x_t: Tensor, states: int) -> Float[Tensor, "*site V"]:
    """At least `states` columns, in float32 at least; those past them mean nothing."""
    if isinstance(output, Unprojected):
        output.wide_enough(states)
        output = output.project()
    check.belief("output", output, x_t, states, wider=True)
    return full(output)


def logits(output: Output, x_t: Tensor, states: int) -> Float[Tensor, "*site {states}"]:
    """The columns that mean something, in float32 at least. The one place where padding is cut off."""
    return padded_logits(output, x_t, states)[..., :states]


def readable(model: object, process: Process) -> None:
    """The network is one, not an objective that holds one; its table of tokens, where it is seen to have one, has a row for
    the mask too."""
    from m2s.belief.heads import Head  # which is built on this file

    if isinstance(getattr(model, "head", None), Head) and callable(getattr(model, "loss", None)):
        raise TypeError(f"model is an m2s.{type(model).__name__}, which returns a loss: give the network, not the objective")
    rows = getattr(getattr(model, "embedding", None), "num_embeddings", None)
    if rows == process.vocab < process.states:
        raise ValueError(f"the network's embedding has {rows} rows: {_takes(process)}")


def ask(
    model: Callable[..., Output], process: Process, x_t: Tensor, t: Tensor, condition: Tensor | None = None, **cached: Tensor
) -> Output:
    """What the network says: model(x_t, t), or model(x_t, t, condition) where there is one; or why it says nothing of use."""
    given = (x_t, t) if condition is None else (x_t, t, condition)
    try:
        output = model(*given, **cached)
    except IndexError as error:
        also = "" if condition is None else f" and a condition {list(condition.shape)}"
        raise IndexError(f"the network failed at tokens {list(x_t.shape)}{also} ({error}): {_takes(process)}") from error
    except TypeError as error:
        if not _refuses(model, given, cached):
            raise
        call = f"model(x_t, t{'' if condition is None else ', condition'})"
        raise TypeError(
            f"the network cannot be called as {call} ({error}): it must take (x_t, t, condition=None); for one that reads "
            "tokens alone give lambda x_t, t, condition=None: net(x_t)"
        ) from error
    except (RuntimeError, ValueError) as error:
        if not DTYPES.search(str(error)):
            raise
        tokens, time = (str(value.dtype).removeprefix("torch.") for value in (x_t, t))
        raise TypeError(
            f"the network failed at dtypes that do not fit ({error}): it is given x_t in {tokens} and t in {time}, whatever "
            "its weights are in; cast t inside, t.to(weight.dtype), or keep the weights in float32 and use torch.autocast"
        ) from error
    if not isinstance(output, Unprojected):
        check.tensor("the network's output", output)
    return output


def _takes(process: Process) -> str:
    """What a network must be able to read."""
    mask = "" if process.mask is None else ", the last one the mask"
    return f"under {process} it must take process.states = {process.states} states, 0..{process.states - 1}{mask}"


def _refuses(model: Callable[..., Output], given: tuple[Tensor, ...], cached: dict[str, Tensor]) -> bool:
    """Whether the arguments do not fit the network; else an error comes from its inside."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(*given, **cached)
    except TypeError:
        return True
    return False
