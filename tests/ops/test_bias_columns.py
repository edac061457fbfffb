"""Rows with columns for a bias beside them, and without."""

import pytest
import torch

from m2s.ops.bias_columns import naive

triton = pytest.importorskip("m2s.ops.bias_columns.triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter gets bf16 wrong
SHAPES = [(1, 1), (7, 3), (8, 256), (9, 257), (33, 768), (0, 5)]


@pytest.mark.parametrize("extra", [2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", [naive, triton], ids=["reference", "triton"])
def test_beside(form, shape, extra):
    rows, bias = torch.randn(shape, device=DEVICE), torch.randn(shape[0], device=DEVICE)
    found = form.beside(rows, bias, extra, HALF)
    assert found.dtype == HALF and found.shape == (shape[0], shape[1] + extra)
    assert torch.equal(found[:, : shape[1]], rows.to(HALF))
    high, low = found[:, shape[1]], found[:, shape[1] + 1]
    assert torch.equal(high, bias.to(HALF))
    assert torch.equal(low, (bias - high.float()).to(HALF))
    assert not found[:, shape[1] + 2 :].any()
    ones = form.beside(rows.to(HALF), None, extra, HALF)
    assert torch.equal(ones[:, : shape[1]], rows.to(HALF))
    assert (ones[:, shape[1] : shape[1] + 2] == 1).all() and not ones[:, shape[1] + 2 :].any()


@pytest.mark.parametrize("form", [naive, triton], ids=["reference", "triton"])
def test_rows_in_any_order_in_memory(form):
    rows = torch.randn(5, 9, device=DEVICE)
    bias = torch.randn(9, 2, device=DEVICE)[:, 0]
    expected = naive.append_bias_columns(rows.t().contiguous(), bias.contiguous(), 8, HALF)
    assert torch.equal(form.beside(rows.t(), bias, 8, HALF), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", [naive, triton], ids=["reference", "triton"])
def test_alone(form, shape, dtype):
    wide = torch.randn(shape[0], shape[1] + 8, device=DEVICE, dtype=dtype)
    factor = torch.tensor(-1.7, dtype=torch.float64, device=DEVICE)
    for columns in (wide[:, : shape[1]], wide[:, : shape[1]].contiguous(), wide[:, 8:], wide[:, 8:].t().contiguous().t()):
        found = form.alone(columns, factor)
        assert found.is_contiguous() and found.dtype == dtype
        assert torch.equal(found, columns * factor.to(dtype))
