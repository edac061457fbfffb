"""Choice of the backend of an operation: Triton kernels ("fused") or plain torch ("reference").

The choice is made once, in the forward pass: every operation asks `uses_triton` there and passes the answer on to its backward
pass. So a backward pass that runs after `use_backend` has ended still uses the backend of its forward pass.

The choice is a context variable: `use_backend` in one thread or asynchronous task does not affect another. A new thread starts
with "auto". Code that `torch.compile` has traced is the exception. It reads the choice that was made last in the process,
because the tracer cannot read context variables.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from m2s.transforms import is_transformed

Backend = Literal["auto", "fused", "reference"]
BACKENDS = ("auto", "fused", "reference")
DEFAULT_BACKEND: Backend = "auto"
HAS_TRITON = importlib.util.find_spec("triton") is not None  # at import: torch.compile cannot trace find_spec
_selected: ContextVar[Backend] = ContextVar("m2s_backend", default=DEFAULT_BACKEND)
_selected_last: list[Backend] = [DEFAULT_BACKEND]  # the choice in traced code, on which the tracer puts a guard
_broken: list[str] = []  # the error of the probe, if Triton is installed but does not work


@contextlib.contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Select the backend of all operations inside the context.

    Args:
        name: "reference" for plain torch on any device; "fused" for Triton kernels, with an error where they cannot run; "auto"
            for Triton kernels on a GPU where Triton is installed (and passed `probe_triton`, if that was called).

    Yields:
        None.

    Raises:
        ValueError: If `name` is not a backend.

    Example:
        >>> with use_backend("reference"):
        ...     m2s.project(score, x_t, t, process)
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}, but it must be one of {', '.join(BACKENDS)}")
    token = _selected.set(name)
    _selected_last[0] = name
    try:
        yield
    finally:
        _selected.reset(token)
        _selected_last[0] = _selected.get()


def selected_backend() -> Backend:
    """Return the backend of the innermost `use_backend` in this thread or task, "auto" outside of it."""
    return _selected_last[0] if torch.compiler.is_compiling() else _selected.get()


def uses_triton(x: Tensor) -> bool:
    """Return whether an operation on `x` runs as a Triton kernel.

    Args:
        x: An input of the operation; only its device matters.

    Returns:
        True for the Triton kernel, False for plain torch.

    Raises:
        RuntimeError: If "fused" is selected and no kernel can run on the device of `x`, or inside a `torch.func` transform.
    """
    name = selected_backend()
    if is_transformed():  # kernels have no rules for vmap and forward mode, and first derivatives only
        if name == "fused":
            raise RuntimeError("the backend is 'fused', but kernels do not run inside torch.func: use 'auto' or 'reference'")
        return False
    if name == "fused" and (why := why_unavailable(x.device)):
        raise RuntimeError(f"the backend is 'fused', but {why}")
    return name == "fused" or (name == "auto" and x.is_cuda and HAS_TRITON and not _broken)


@functools.cache
def load_op(name: str, fused: bool) -> ModuleType:
    """Import the module that runs an operation.

    Args:
        name: The folder of the operation in `m2s.ops`, e.g. "posterior_entropy".
        fused: The choice of the backend, as `uses_triton` returned it in the forward pass.

    Returns:
        `triton.py` of the folder if `fused`; otherwise its `cpu.py`, or `naive.py` where there is no tuned version.
    """
    package = f"m2s.ops.{name}"
    if fused:
        return importlib.import_module(f"{package}.triton")
    tuned = importlib.util.find_spec(f"{package}.cpu") is not None
    return importlib.import_module(f"{package}.{'cpu' if tuned else 'naive'}")


def probe_triton(device: torch.device) -> None:
    """Run a small kernel once, so that "auto" falls back to plain torch where an installed Triton does not work.

    A missing C compiler is the common cause. The first failure is reported by a warning; later calls do nothing.

    Args:
        device: The device of the computation that follows. Devices other than CUDA are not probed.
    """
    if selected_backend() == "auto" and device.type == "cuda" and HAS_TRITON:
        _probe(device)


@functools.cache
def _probe(device: torch.device) -> None:
    """Launch the kernel of `philox` and remember its error."""
    try:
        from m2s.ops.philox.triton import uniforms

        uniforms(torch.zeros(1, dtype=torch.int64, device=device), None, 0, 0, 1, 0, 0, 0).item()
    except Exception as error:
        _broken.append(" ".join(str(error).split()) or type(error).__name__)
        warnings.warn(f"Triton is installed but does not work ({_broken[0]}): plain torch is used", stacklevel=3)


def why_unavailable(device: torch.device) -> str:
    """Explain why no Triton kernel can run on a device.

    Args:
        device: The device of the tensors.

    Returns:
        The reason and what to do about it, or an empty string if kernels can run. On a CPU they run only in Triton's
        interpreter (environment variable `TRITON_INTERPRET=1`).
    """
    if not HAS_TRITON:
        return "triton is not installed: pip install triton"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device.type} and Triton kernels need cuda: use kernels 'auto'"
    return ""
