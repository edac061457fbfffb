"""The last layer in chunks of rows: logits from hidden states, and gradients of the layer from gradients of the logits.

This is the memory-saving half of a fused training step. Logits of 50,257 tokens at every position would take gigabytes;
`Layer.chunks` bounds how many exist at once. `linear_loss` uses `Layer` and `Gradient` for training, samplers and the
projection use `Layer` alone. bf16 hidden states on a GPU keep bf16 operands with float32 accumulation; everything else is
float32 or float64. The bias is part of the product (`m2s.ops.last_layer.append_bias_columns`), so that its gradient
comes with that of the weight.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from m2s.dtypes import at_least_float32
from m2s.ops.last_layer import BIAS_COLUMNS, Unprojected, bf16_operands, matmul_float32

CHUNK = 50_304 * 3328  # logits alive at once: 0.6 GiB in float32


def extra_columns(hidden: Tensor, bias: Tensor | None) -> int:
    """Return how many columns the operands gain for the bias.

    Args:
        hidden: Hidden states; their dtype and device decide.
        bias: The bias, or None.

    Returns:
        0 without a bias, otherwise `BIAS_COLUMNS` for bf16 products and 1 for all others.
    """
    return 0 if bias is None else BIAS_COLUMNS if uses_bf16_products(hidden) else 1


def uses_bf16_products(hidden: Tensor) -> bool:
    """Return whether the products run with bf16 operands.

    Args:
        hidden: Hidden states.

    Returns:
        True for bf16 on a GPU. Elsewhere bf16 is converted to float32 first.
    """
    return hidden.dtype == torch.bfloat16 and hidden.is_cuda


class Layer:
    """Hidden states `[N, D]` and a last layer `[V, D]`, with operands prepared for the products.

    Args:
        hidden: Hidden states `[*site, D]`.
        weight: Weight `[V, D]`.
        bias: Bias `[V]`, or None.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.width, self.bias = hidden.shape[-1], bias is not None
        self.bf16_products = uses_bf16_products(hidden)
        hidden = hidden.reshape(-1, self.width)
        if self.bf16_products:
            hidden, columns = bf16_operands(hidden, weight, bias)
        else:
            hidden, columns = at_least_float32(hidden), at_least_float32(weight)
            if bias is not None:
                columns = torch.cat([columns, at_least_float32(bias)[:, None]], -1)
                hidden = torch.nn.functional.pad(hidden, (0, 1), value=1.0)
        self.hidden, self.columns = hidden, columns

    @classmethod
    def of(cls, output: Unprojected) -> "Layer":
        """Build the layer of an unprojected network output.

        Args:
            output: Hidden states `[*site, D]`, weight `[V, D]` and bias `[V]` or None.

        Returns:
            The layer.
        """
        return cls(output.hidden, output.weight, output.bias)

    def chunks(self) -> Iterator[slice]:
        """Return the slices of rows to work on, each of at most `CHUNK` logits (and at least one row)."""
        count, most = len(self.hidden), max(1, CHUNK // len(self.columns))
        even = -(-count // max(1, -(-count // most)))  # chunks of equal size: a small last one would waste a GPU
        rows = max(1, min(most, -(-even // 128) * 128))
        return (slice(start, start + rows) for start in range(0, count, rows))

    def logits(self, at: slice) -> Tensor:
        """Return the logits of the rows `at`, `[rows, V]` in float32 or float64.

        Args:
            at: A slice of the N rows, such as one of `chunks`.
        """
        return _product(self.hidden[at], self.columns.t())


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32 or float64."""
    return matmul_float32(a, b) if a.dtype == torch.bfloat16 else a @ b


class Gradient:
    """Gradients of a last layer, accumulated chunk by chunk from the gradients of its logits.

    Args:
        layer: The layer whose gradients are accumulated.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.hidden = torch.empty_like(layer.hidden[:, : layer.width], memory_format=torch.contiguous_format)
        self._columns: Tensor | None = None

    def add(self, at: slice, logits: Tensor) -> None:
        """Add one chunk.

        Args:
            at: The rows of the chunk.
            logits: Gradient of their logits `[rows, V]`.
        """
        layer, hidden = self.layer, self.layer.hidden[at]
        self.hidden[at].copy_(_product(logits, layer.columns[:, : layer.width]))
        if self._columns is None:
            self._columns = _product(logits.t(), hidden)
        elif layer.bf16_products:  # the sum over chunks stays in place, in float32
            torch.addmm(self._columns, logits.t(), hidden, out_dtype=torch.float32, out=self._columns)
        else:
            self._columns.addmm_(logits.t(), hidden)

    @property
    def columns(self) -> Tensor:
        """Gradient of the weight with its bias columns; zeros where no chunk was added."""
        return torch.zeros_like(at_least_float32(self.layer.columns)) if self._columns is None else self._columns

    @property
    def weight(self) -> Tensor:
        """Gradient of the weight `[V, D]`, a view of `columns`."""
        return self.columns[:, : self.layer.width]

    @property
    def bias(self) -> Tensor | None:
        """Gradient of the bias `[V]`, or None without a bias."""
        return self.columns[:, self.layer.width] if self.layer.bias else None
