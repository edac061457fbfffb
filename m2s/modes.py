"""Evaluation mode for the duration of a call, with the mode of every module restored after it, also under threads."""

import contextlib
import os
import threading
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn


class _EvaluationCounts:
    """How many `evaluation_mode` blocks each module is in, and whether it was in training mode before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: WeakKeyDictionary[nn.Module, tuple[int, bool]] = WeakKeyDictionary()

    def enter(self, modules: list[nn.Module]) -> None:
        """Put modules into evaluation mode."""
        with self.lock:
            for module in modules:
                count, training = self.counts.get(module, (0, module.training))
                self.counts[module] = (count + 1, training)
                module.training = False

    def leave(self, modules: list[nn.Module]) -> None:
        """Restore the mode of the modules that are in no other block."""
        with self.lock:
            for module in modules:
                count, training = self.counts.pop(module)
                if count > 1:
                    self.counts[module] = (count - 1, training)
                elif training:
                    module.training = True


_counts = _EvaluationCounts()


@contextlib.contextmanager
def evaluation_mode(model: object) -> Iterator[None]:
    """Put a module and its submodules into evaluation mode inside a `with` block, then restore the mode of each.

    `model.train()` cannot undo `model.eval()`: it also puts submodules into training mode that were in evaluation mode before,
    such as frozen batch norms or a trained network inside a new wrapper. Several threads may be inside such a block with the
    same module. The module is in evaluation mode until the last of them leaves.

    Args:
        model: A module. Any other object is left alone.

    Yields:
        None.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    _counts.enter(modules)
    try:
        yield
    finally:
        _counts.leave(modules)


def _after_fork() -> None:
    """Make a forked process able to compute.

    It has one thread. The OpenMP of torch waits forever for the threads of the parent if it is asked for more than one. A lock
    that another thread of the parent held at that moment is never released.
    """
    torch.set_num_threads(1)
    _counts.lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
