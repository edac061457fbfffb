"""Evaluation mode for the duration of a call, with every module's own mode restored after it."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: object) -> Iterator[None]:
    """Put a module and all of its submodules into evaluation mode, then give each one back the mode it had.

    `model.train()` would not do for the second: it also puts those submodules into training mode that were in evaluation mode
    before (frozen batch norms, a trained network inside a new wrapper).

    Args:
        model: A module; anything else is left alone.
    """
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
