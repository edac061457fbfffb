"""The shapes in signatures of the library are checked while the tests run. One thread a process: the arrays are small."""

import contextlib
import functools
import gc
import math
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.path.exists("/dev/nvidiactl"):  # then kernels are interpreted; triton asks when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import jaxtyping
from jaxtyping import install_import_hook

hook = install_import_hook("m2s", "beartype.beartype")

import pytest
import torch
from tqdm import tqdm


class ShapeChecks(type(jaxtyping.config)):
    """Checks the shapes of the first calls of each function in a test. A loop over steps or samples repeats them.

    Attributes:
        calls: The number of calls that are checked.
        off: Whether no call is checked.
        made: The number of calls so far, by the code of the function.
    """

    calls: float = 10
    off = False
    made: ClassVar[Counter[int]] = Counter()

    @property
    def jaxtyping_disable(self) -> bool:
        """Whether the call is not checked. The wrapper of every checked function asks for it, and has the function as `fn`."""
        function = None if self.off else sys._getframe(1).f_locals.get("fn")
        if function is None:
            return self.off
        key = id(function.__code__)
        self.made[key] += 1
        return self.made[key] > self.calls

    @jaxtyping_disable.setter
    def jaxtyping_disable(self, value: bool) -> None:
        self.off = value


jaxtyping.config.__class__ = ShapeChecks
torch.set_num_threads(1)
tqdm.set_lock(threading.RLock())  # by default forked processes share a bar's lock, and some are killed here while they hold it


def patch_language_once() -> None:
    """Let Triton's interpreter prepare its language once in a launch. It does so again in every call of a device function.

    The repetition replaces nothing, and takes a third of the time of a kernel.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_new(function: object) -> object:
        used = [value for value in function.__globals__.values() if value is language or value is language.core]
        if any(language.core.is_builtin(module.program_id) for module in used):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_new


if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        patch_language_once()

# No test cuts the power, so nothing depends on waiting for the disk. Tests of the order of calls replace this function too.
os.fsync = lambda handle: None
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background; processes that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Let collections of garbage skip what exists before the first test. `m2s benchmark` collects before each measurement."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free everything when it exits."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _shape_checks(request: pytest.FixtureRequest) -> None:
    """Every example of a property is checked."""
    jaxtyping.config.made.clear()
    jaxtyping.config.calls = math.inf if hasattr(request.function, "hypothesis") else ShapeChecks.calls


@pytest.fixture(scope="session", autouse=True)
def _default_positions() -> Iterator[int]:
    """By default a call of the network has a sixteenth of the rows that users get. Most tests draw few samples."""
    from m2s.samplers import options

    positions = options.POSITIONS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "POSITIONS", positions // 16)
        yield positions


@pytest.fixture
def default_rows(_default_positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a call of the network has as many rows as for users."""
    from m2s.samplers import options

    monkeypatch.setattr(options, "POSITIONS", _default_positions)


@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's kernel has few programs: the interpreter takes as long for a short block as for a long one."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from m2s.ops.adamw import triton

        monkeypatch.setattr(triton, "Tables", functools.partial(triton.Tables, block=8192))


@pytest.fixture
def without_shape_hook() -> Iterator[None]:
    """Users run without the tests' own shape checker: the library's errors must stand by themselves."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
