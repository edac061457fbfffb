"""Which form of an operation works: the fused one or the reference."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Literal

from torch import Tensor

Form = Literal["auto", "fused", "reference"]
FORMS = ("auto", "fused", "reference")
DEFAULT: Form = "reference"  # until the kernels have been timed on a GPU
_forms: list[Form] = [DEFAULT]


@contextlib.contextmanager
def form(name: Form) -> Iterator[None]:
    """Inside, operations take this form: "reference", "fused" (on a GPU or in Triton's interpreter, or it fails), or "auto",
    which is fused on a GPU where triton is installed."""
    if name not in FORMS:
        raise ValueError(f"form is {name!r}, but it must be one of {', '.join(FORMS)}")
    _forms.append(name)
    try:
        yield
    finally:
        _forms.pop()


def fused(x: Tensor) -> bool:
    """Whether an operation on x is to take its fused form."""
    name = _forms[-1]
    if name == "fused" and not (_has_triton() and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")):
        raise RuntimeError("a fused operation needs triton and a GPU: pip install triton, or take the form 'auto'")
    return name == "fused" or (name == "auto" and x.is_cuda and _has_triton())


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
