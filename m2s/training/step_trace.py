"""The memory and the operations of a training step of one example, from a trace on fake tensors.

Fake tensors have shapes but no values, so that a trace takes no memory. The storage that they would hold is counted.
"""

import functools
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from m2s.data.source import Source
from m2s.methods import METHODS
from m2s.methods.base import MethodParts
from m2s.models import build
from m2s.ops import use_backend
from m2s.patches import AttributePatches
from m2s.training.build import describe_network
from m2s.training.config import Config
from m2s.training.parallel import blocks, recompute

UNKNOWN_LOSS = 32.0  # bytes per logit where the loss cannot be traced
TABULATED_LOSS = 256.0  # the same for a tabulated process
TRACED_LOGITS = 2**19  # the loss is traced on about so many logits


@dataclass(frozen=True)
class Step:
    """The memory of one example, from a trace on fake tensors.

    Args:
        parameters: Parameters of the network.
        activations: Bytes that the forward pass of an example keeps. With activation checkpointing also those of one block.
        loss: Bytes that the loss of an example holds beside them.
        operations: Floating point operations of the forward pass of an example.
        why: Why activations or the loss could not be traced; empty where they could.
    """

    parameters: int
    activations: float
    loss: float
    operations: float
    why: str = ""


class _LiveStorage(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, while they live.

    `bytes` is the number of bytes now, `peak` the largest so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._free, storage._cdata)
        return result

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)


@contextmanager
def _fake_tensors() -> Iterator[None]:
    """Inside this context tensors have no values, and random numbers outside are not changed."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True), use_backend("reference"):
        yield


def _trace_network(model: nn.Module, length: int, bf16: bool, examples: int) -> int:
    """The bytes that a forward pass keeps for the backward pass."""
    x_t, t = torch.zeros(examples, length, dtype=torch.long), torch.zeros(examples)
    with _LiveStorage() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(x_t, t, None)
        kept = live.bytes
    del output
    return kept


def _trace_activations(model: nn.Module, length: int, bf16: bool) -> tuple[float, float]:
    """The bytes that one more example adds, and the floating point operations of an example.

    Storage that does not depend on the batch, such as cast weights, cancels in the difference.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        one = _trace_network(model, length, bf16, 1)
    return max(0.0, float(_trace_network(model, length, bf16, 2) - one)), float(counter.get_total_flops())


def _trace_recomputed(model: nn.Module, length: int, bf16: bool, full: float) -> float:
    """The bytes that one more example adds with activation checkpointing: inputs of blocks, and one block."""
    count, patches = len(blocks(model)), AttributePatches()
    recompute(model, patches)
    try:
        kept, _ = _trace_activations(model, length, bf16)
    finally:
        patches.close()
    return kept + 2 * (full - kept) / max(count, 2)  # of one block the activations, and as many gradients


def _trace_loss(parts: MethodParts, length: int) -> float:
    """Bytes that the loss of an example of `length` positions holds beside the logits, forward and backward."""
    process = parts.head.process

    def peak(examples: int, positions: int) -> float:
        x = torch.zeros(examples, positions, dtype=torch.long)
        t = torch.zeros(examples, dtype=torch.float64)
        logits = torch.zeros(examples, positions, process.states, requires_grad=True)
        with _LiveStorage() as live:
            parts.loss(parts.head, logits, x, x, t).sum().backward()
        return live.peak

    # Some losses loop over chunks of positions. A part of a long sequence is enough: what they hold grows with the positions.
    short = max(1, min(length, TRACED_LOGITS // process.states))
    one = peak(1, short)
    per_position = max(0.0, peak(1, 2 * short) - one) / short if length > short else 0.0
    return max(0.0, peak(2, short) - one) + per_position * (length - short)


@functools.lru_cache(maxsize=64)
def _trace(key: str, length: int, bf16: bool, unprojected: bool, recomputed: bool, given: "_Given") -> Step:
    """`trace_step`; `key` names everything in `given` that the result depends on."""
    del key
    states = given.parts.head.process.states
    why, activations, operations = "", 0.0, 0.0
    with _fake_tensors():
        model = build(given.description).train()
        parameters = sum(weight.numel() for weight in model.parameters())
        if unprojected:
            model.unprojected = True  # type: ignore[assignment]
        try:
            activations, operations = _trace_activations(model, length, bf16)
            if recomputed:
                activations = _trace_recomputed(model, length, bf16, activations)
        except Exception as error:  # a network of a plugin may read values, which fake tensors do not have
            why = f"the network cannot be traced ({type(error).__name__})"
        try:
            loss = _trace_loss(given.parts, length)
        except Exception:  # a loss may read them too, such as one that needs a transition matrix for each time
            tabulated = given.parts.head.process.tabulated is not None
            loss = (TABULATED_LOSS if tabulated else UNKNOWN_LOSS) * length * states
    return Step(parameters, activations, loss, operations, why)


@dataclass(frozen=True)
class _Given:
    """The objects of a trace. All are equal, because the key of the cache names what they are."""

    description: dict[str, Any]
    parts: MethodParts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given)

    def __hash__(self) -> int:
        return 0


def trace_step(config: Config, source: Source, bf16: bool = False, unprojected: bool = False, recomputed: bool = False) -> Step:
    """Trace a training step of one example on fake tensors.

    Args:
        config: The resolved configuration.
        source: The data. Its length, vocabulary and shape matter.
        bf16: Whether the body of the network runs in bf16.
        unprojected: Whether the network, a transformer, returns hidden states, so that no logits are counted.
        recomputed: Whether activations are computed again in the backward pass.

    Returns:
        The memory and the operations of an example.

    Raises:
        UserError: The configuration does not describe a network.
    """
    parts = METHODS[config.method].build(source.vocab, config.process, config.head)
    description = describe_network(config.network, parts.head.process, source)
    key = json.dumps([description, source.vocab], default=repr, sort_keys=True)
    key += repr((config.method, config.process, config.head))
    return _trace(key, source.length, bf16, unprojected, recomputed, _Given(description, parts))
