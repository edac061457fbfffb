"""An adapter for networks whose mask token is not the last of their vocabulary."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from m2s import validation
from m2s.ops.last_layer import Output, Unprojected
from m2s.transforms import is_transformed

# A tensor, its data and its version. The data are held so that nothing else comes to lie at their address.
_Kept = tuple[Tensor, Tensor, int]


def move_entry(x: Tensor, dim: int, source: int, target: int) -> Tensor:
    """Return x with one entry of a dimension moved; those in between move by one.

    Args:
        x: A tensor.
        dim: The dimension.
        source: The index of the entry.
        target: Its new index.
    """
    low, high = min(source, target), max(source, target)
    before, after = x.narrow(dim, 0, low), x.narrow(dim, high + 1, x.shape[dim] - high - 1)
    moved = x.narrow(dim, source, 1)
    if source < target:
        return torch.cat([before, x.narrow(dim, low + 1, high - low), moved, after], dim)
    return torch.cat([before, moved, x.narrow(dim, low, high - low), after], dim)


class _MoveEntry(torch.autograd.Function):
    """`move_entry`. The gradient is moved back: nothing is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, source: int, target: int) -> Tensor:
        ctx.way = dim, target, source
        return move_entry(x, dim, source, target)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _MoveEntry.apply(upstream, *ctx.way), None, None, None


class MaskAt(nn.Module):
    """A network with its mask at any id of its vocabulary, adapted to this library, where the mask is the last state.

    The processes, losses and samplers here number `vocab` clean tokens 0..vocab-1 and the mask `vocab`. A network made
    elsewhere may have its mask in between (BERT's is 103) or further up (LLaDA's is 126336). The clean tokens keep their order;
    those after the mask move down by one. `to_network` and `from_network` convert token ids, `forward` converts the
    input and reorders the columns of the output. Data, prompts (`clamp`) and samples are in this library's ids: convert them.

    An output `m2s.Unprojected` has the rows of its last layer reordered. In eval mode without gradients the reordered layer is
    kept until the weight changes or `train()` or `eval()` is called. (A change through `weight.data` in eval mode is not seen:
    call `eval()` after it.) A compiled adapter reorders it at every call.

    Args:
        network: Any network that is called as network(x_t, t) or network(x_t, t, condition) in its own ids and returns logits
            [B, L, columns] or `m2s.Unprojected`, with a column for every id up to the mask and the last clean token.
        mask: The id of the mask in the network's vocabulary.
        vocab: How many clean tokens there are, `process.vocab`: the first `vocab` ids of the network that are not the mask.

    Example:
        >>> process = m2s.Absorbing(vocab=30_521, schedule=m2s.LogLinear())  # 30,522 ids, one of them the mask
        >>> adapted = m2s.models.MaskAt(network, mask=103, vocab=process.vocab)
        >>> samples = adapted.to_network(m2s.sample(adapted, m2s.Posterior(process), (4, 128)))
    """

    def __init__(self, network: Callable[..., Output], mask: int, vocab: int) -> None:
        super().__init__()
        validation.positive_int("mask", mask, low=0)
        validation.positive_int("vocab", vocab, low=2)
        self.network, self.mask, self.vocab = network, mask, vocab
        self._kept: tuple[list[_Kept], Tensor, Tensor | None] | None = None

    @property
    def unprojected(self) -> bool:
        """That of the network, where it has it: whether it returns `m2s.Unprojected`."""
        return bool(self.network.unprojected)  # type: ignore[attr-defined]

    @unprojected.setter
    def unprojected(self, value: bool) -> None:
        self.network.unprojected = value  # type: ignore[attr-defined]

    def to_network(self, ids: Integer[Tensor, "*site"]) -> Int[Tensor, "*site"]:
        """This library's token ids as the network's.

        Args:
            ids: Tokens 0..vocab-1 and masks `vocab` [*site], such as samples.

        Returns:
            The same tokens in the network's ids [*site] (int64), to be decoded by the network's tokenizer.
        """
        validation.tokens("ids", ids, self.vocab + 1)
        ids = ids.long()
        return torch.where(ids == self.vocab, self.mask, ids + (ids >= self.mask))

    def from_network(self, ids: Integer[Tensor, "*site"]) -> Int[Tensor, "*site"]:
        """The network's token ids as this library's: the inverse of `to_network`.

        Args:
            ids: Tokens as the network's tokenizer encodes them [*site]: data, or a prompt.

        Returns:
            The same tokens with the mask as the last state [*site] (int64).
        """
        validation.tokens("ids", ids, max(self.mask, self.vocab) + 1)
        ids = ids.long()
        if self.mask > self.vocab:  # the ids between the last clean token and the mask are no tokens
            validation.tokens("ids", torch.where(ids == self.mask, 0, ids), self.vocab)
        return torch.where(ids == self.mask, self.vocab, ids - (ids > self.mask).long())

    def forward(
        self, x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"], condition: Tensor | None = None
    ) -> Float[Tensor, "B L V"] | Unprojected:
        """Call the network and reorder its output.

        Args:
            x_t: Tokens in this library's ids [B, L].
            t: Times [B], handed to the network as they are.
            condition: The network's third argument, handed over where it is given.

        Returns:
            Logits [B, L, columns] whose columns are the clean tokens, the mask, and then what else the network has; or
            `m2s.Unprojected` with its rows in that order.
        """
        ids = self.to_network(x_t)
        output = self.network(ids, t) if condition is None else self.network(ids, t, condition)
        if isinstance(output, Unprojected):
            self._wide_enough(len(output.weight))
            return Unprojected(output.hidden, *self._last_layer(output.weight, output.bias))
        validation.tensor("the network's output", output)
        self._wide_enough(output.shape[-1])
        return self._moved(output, output.ndim - 1)

    def train(self, mode: bool = True) -> "MaskAt":
        """Set training or evaluation mode, and drop the reordered last layer.

        Args:
            mode: True for training, False for evaluation.

        Returns:
            The module itself.
        """
        self._kept = None
        super().train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without the reordered layer: a copy makes its own."""
        return {**self.__dict__, "_kept": None}

    def extra_repr(self) -> str:
        """Return the id of the mask and the number of clean tokens, for `repr`."""
        return f"mask={self.mask}, vocab={self.vocab}"

    def _moved(self, x: Tensor, dim: int) -> Tensor:
        """x with what belongs to the mask behind the clean tokens."""
        if self.mask == self.vocab:
            return x
        if is_transformed():  # torch.func differentiates the plain function
            return move_entry(x, dim, self.mask, self.vocab)
        moved: Tensor = _MoveEntry.apply(x, dim, self.mask, self.vocab)
        return moved

    def _wide_enough(self, columns: int) -> None:
        needed = max(self.mask, self.vocab) + 1
        if columns < needed:
            raise ValueError(
                f"the network's output has {columns} columns, but it needs {needed} of them for {self.vocab} clean tokens and "
                f"a mask at {self.mask}"
            )

    def _last_layer(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight [columns, D] and bias [columns] of the last layer, reordered."""
        # part of the graph, which cannot ask whether a tensor changed; or of a derivative that a stored layer would cut off
        if torch.compiler.is_compiling() or is_transformed():
            return self._reordered(weight, bias)
        parts = [weight] if bias is None else [weight, bias]
        learns = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
        keeps = not (self.training or learns or any(part.is_inference() for part in parts))
        if keeps and self._kept is not None and _same(self._kept[0], parts):
            return self._kept[1:]
        self._kept = None
        if not keeps:
            return self._reordered(weight, bias)
        with torch.inference_mode(False), torch.no_grad():  # so that a later call may learn what comes before a frozen layer
            self._kept = ([(part, part.detach(), part._version) for part in parts], *self._reordered(weight, bias))
        return self._kept[1:]

    def _reordered(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self._moved(weight, 0), None if bias is None else self._moved(bias, 0)


def _same(before: list[_Kept], parts: list[Tensor]) -> bool:
    """Whether these are the same tensors, unchanged since."""
    return len(before) == len(parts) and all(
        part is was
        and part._version == version
        and (part.data_ptr(), part.dtype, part.shape, part.stride()) == (data.data_ptr(), data.dtype, data.shape, data.stride())
        for part, (was, data, version) in zip(parts, before, strict=True)
    )
