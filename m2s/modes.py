"""Evaluation mode for the duration of a call, with the mode of every module restored after it."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: object) -> Iterator[None]:
    """Put a module and its submodules into evaluation mode inside a `with` block, then restore the mode of each.

    `model.train()` cannot undo `model.eval()`: it also puts submodules into training mode that were in evaluation mode before,
    such as frozen batch norms or a trained network inside a new wrapper.

    Args:
        model: A module. Any other object is left alone.

    Yields:
        None.
    """
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
