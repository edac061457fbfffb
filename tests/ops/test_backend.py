"""Which form of an operation is taken where Triton is installed and does not work."""

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from m2s.ops import backend, probe_triton, use_backend, uses_triton

CUDA = torch.device("cuda")
with FakeTensorMode():
    ROWS = torch.empty(1, device="cuda")  # without a GPU


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(backend, "_broken", [])
    backend._try.cache_clear()
    yield
    backend._try.cache_clear()


@pytest.fixture
def broken(untried, monkeypatch):
    """No kernel can be made, on a machine with a GPU and on one without."""

    def fail(*_, **__):
        raise RuntimeError("no C compiler\nanywhere")

    monkeypatch.setattr(torch, "zeros", fail)


def test_a_triton_that_does_not_work_is_left_alone_and_said_once(broken):
    assert uses_triton(ROWS)
    with pytest.warns(UserWarning, match=r"does not work \(no C compiler anywhere\): the references"):
        probe_triton(CUDA)
    assert not uses_triton(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe_triton(CUDA)


def test_nothing_is_tried_where_nothing_would_be_fused(broken):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe_triton(torch.device("cpu"))
        for name in ("reference", "fused"):
            with use_backend(name):
                probe_triton(CUDA)
    assert uses_triton(ROWS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_triton_that_works_is_used(untried):
    pytest.importorskip("triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe_triton(CUDA)
    assert uses_triton(ROWS)
