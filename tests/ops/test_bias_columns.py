"""Columns of the bias: appended to operands, dropped from gradients."""

import pytest
import torch

from m2s.ops.bias_columns import naive

triton = pytest.importorskip("m2s.ops.bias_columns.triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter gets bf16 wrong
SHAPES = [(1, 1), (7, 3), (8, 256), (9, 257), (33, 768), (0, 5)]


@pytest.mark.parametrize("extra", [2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", [naive, triton], ids=["naive", "triton"])
def test_append(op, shape, extra):
    """The rows, the rounded bias and its rounding error, or ones; zeros in all other columns."""
    rows, bias = torch.randn(shape, device=DEVICE), torch.randn(shape[0], device=DEVICE)
    found = op.append_bias_columns(rows, bias, extra, HALF)
    assert found.dtype == HALF and found.shape == (shape[0], shape[1] + extra)
    assert torch.equal(found[:, : shape[1]], rows.to(HALF))
    high, low = found[:, shape[1]], found[:, shape[1] + 1]
    assert torch.equal(high, bias.to(HALF))
    assert torch.equal(low, (bias - high.float()).to(HALF))
    assert not found[:, shape[1] + 2 :].any()
    ones = op.append_bias_columns(rows.to(HALF), None, extra, HALF)
    assert torch.equal(ones[:, : shape[1]], rows.to(HALF))
    assert (ones[:, shape[1] : shape[1] + 2] == 1).all() and not ones[:, shape[1] + 2 :].any()


@pytest.mark.parametrize("op", [naive, triton], ids=["naive", "triton"])
def test_append_to_strided_rows(op):
    rows = torch.randn(5, 9, device=DEVICE)
    bias = torch.randn(9, 2, device=DEVICE)[:, 0]
    expected = naive.append_bias_columns(rows.t().contiguous(), bias.contiguous(), 8, HALF)
    assert torch.equal(op.append_bias_columns(rows.t(), bias, 8, HALF), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", [naive, triton], ids=["naive", "triton"])
def test_drop(op, shape, dtype):
    """A slice of columns times a number, contiguous, for any strides."""
    wide = torch.randn(shape[0], shape[1] + 8, device=DEVICE, dtype=dtype)
    factor = torch.tensor(-1.7, dtype=torch.float64, device=DEVICE)
    for columns in (wide[:, : shape[1]], wide[:, : shape[1]].contiguous(), wide[:, 8:], wide[:, 8:].t().contiguous().t()):
        found = op.drop_bias_columns(columns, factor)
        assert found.is_contiguous() and found.dtype == dtype
        assert torch.equal(found, columns * factor.to(dtype))
