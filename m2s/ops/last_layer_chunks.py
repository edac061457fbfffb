"""The last layer, some rows at a time: logits in float32 out of hidden states, and its gradients out of theirs.

Hidden states in bf16 on a GPU keep their operands in bf16, with sums and results in float32; everything else is float32 at
least. The bias rides in the product, so that its gradient comes out of the one that gives the weight's.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from m2s.dtypes import at_least_float32
from m2s.ops.backend import load_op
from m2s.ops.last_layer import BIAS_COLUMNS, Unprojected, bf16_operands, matmul_float32

CHUNK = 50_304 * 3328  # logits alive at once: 0.6 GiB


def extra(hidden: Tensor, bias: Tensor | None) -> int:
    """Columns of the products beside those of the weight: what the bias takes."""
    return 0 if bias is None else BIAS_COLUMNS if is_half(hidden) else 1


def is_half(hidden: Tensor) -> bool:
    return hidden.dtype == torch.bfloat16 and hidden.is_cuda


class Layer:
    """Hidden states [N, D] and a last layer [V, D], as the products want them."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.width, self.bias = hidden.shape[-1], bias is not None
        self.half = is_half(hidden)
        hidden = hidden.reshape(-1, self.width)
        if self.half:
            hidden, columns = bf16_operands(hidden, weight, bias, load_op("bias_columns", hidden).append_bias_columns)
        else:
            hidden, columns = at_least_float32(hidden), at_least_float32(weight)
            if bias is not None:
                columns = torch.cat([columns, at_least_float32(bias)[:, None]], -1)
                hidden = torch.nn.functional.pad(hidden, (0, 1), value=1.0)
        self.hidden, self.columns = hidden, columns

    @classmethod
    def of(cls, output: Unprojected) -> "Layer":
        return cls(output.hidden, output.weight, output.bias)

    def chunks(self) -> Iterator[slice]:
        """The rows, some at a time."""
        count, most = len(self.hidden), max(1, CHUNK // len(self.columns))
        even = -(-count // max(1, -(-count // most)))  # none much smaller than the others
        rows = max(1, min(most, -(-even // 128) * 128))
        return (slice(start, start + rows) for start in range(0, count, rows))

    def logits(self, at: slice) -> Tensor:
        """[rows, V], in float32 at least."""
        return _product(self.hidden[at], self.columns.t())


def _product(a: Tensor, b: Tensor) -> Tensor:
    return matmul_float32(a, b) if a.dtype == torch.bfloat16 else a @ b


class Gradient:
    """The gradients of a last layer, filled in as those of its logits come."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.hidden = torch.empty_like(layer.hidden[:, : layer.width], memory_format=torch.contiguous_format)
        self._columns: Tensor | None = None

    def add(self, at: slice, logits: Tensor) -> None:
        """The gradient of the logits of the rows `at`."""
        layer, hidden = self.layer, self.layer.hidden[at]
        self.hidden[at].copy_(_product(logits, layer.columns[:, : layer.width]))
        if self._columns is None:
            self._columns = _product(logits.t(), hidden)
        elif layer.half:
            torch.addmm(self._columns, logits.t(), hidden, out_dtype=torch.float32, out=self._columns)
        else:
            self._columns.addmm_(logits.t(), hidden)

    @property
    def columns(self) -> Tensor:
        return torch.zeros_like(at_least_float32(self.layer.columns)) if self._columns is None else self._columns

    @property
    def weight(self) -> Tensor:
        return self.columns[:, : self.layer.width]

    @property
    def bias(self) -> Tensor | None:
        return self.columns[:, self.layer.width] if self.layer.bias else None
