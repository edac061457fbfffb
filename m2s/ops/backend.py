"""Which form of an operation works: the fused one or the reference."""

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "fused", "reference"]
BACKENDS = ("auto", "fused", "reference")
DEFAULT_BACKEND: Backend = "auto"
HAS_TRITON = importlib.util.find_spec("triton") is not None  # looked for here, for a compiler cannot follow the search
_forms: list[Backend] = [DEFAULT_BACKEND]
_broken: list[str] = []  # why Triton does not work here, once that is known


@contextlib.contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Inside, operations take this form: "reference", "fused" (on a GPU or in Triton's interpreter, or it fails), or "auto",
    which is fused on a GPU where triton is installed (and works, once `settle` has tried)."""
    if name not in BACKENDS:
        raise ValueError(f"form is {name!r}, but it must be one of {', '.join(BACKENDS)}")
    _forms.append(name)
    try:
        yield
    finally:
        _forms.pop()


def uses_triton(x: Tensor) -> bool:
    """Whether an operation on x is to take its fused form."""
    name = _forms[-1]
    if name == "fused" and (why := why_unavailable(x.device)):
        raise RuntimeError(f"a fused operation was asked for, but {why}")
    return name == "fused" or (name == "auto" and x.is_cuda and HAS_TRITON and not _broken)


def load_op(kind: str, x: Tensor) -> ModuleType:
    """An operation's module, in the form that fits x."""
    return importlib.import_module(f"m2s.ops.{kind}.{'triton' if uses_triton(x) else 'naive'}")


def probe_triton(device: torch.device) -> None:
    """Try a small kernel, once. Where an installed Triton cannot make it (for want of a C compiler, often), "auto" is the
    reference from here on, and that is said."""
    if _forms[-1] == "auto" and device.type == "cuda" and HAS_TRITON:
        _try(device)


@functools.cache
def _try(device: torch.device) -> None:
    try:
        from m2s.ops.philox.triton import uniforms

        uniforms(torch.zeros(1, dtype=torch.int64, device=device), None, 0, 0, 1, 0, 0, 0).item()
    except Exception as error:
        _broken.append(" ".join(str(error).split()) or type(error).__name__)
        warnings.warn(f"Triton is installed but does not work ({_broken[0]}): the references are used", stacklevel=3)


def why_unavailable(device: torch.device) -> str:
    """Why no fused operation can run there; empty if it can."""
    if not HAS_TRITON:
        return "triton is not installed: pip install triton"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device.type}, and Triton's kernels are for cuda: take kernels 'auto'"
    return ""
