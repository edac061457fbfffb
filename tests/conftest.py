"""Every shape in a signature of the library is checked while the tests run. One thread a process: the arrays are small."""

import gc
import os
import signal
import threading
from collections.abc import Iterator

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

torch.set_num_threads(1)
tqdm.set_lock(threading.RLock())  # by default forked processes share a bar's lock, and some are killed here while they hold it


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


@pytest.fixture
def without_shape_hook() -> Iterator[None]:
    """Users run without the tests' own shape checker: the library's errors must stand by themselves."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
