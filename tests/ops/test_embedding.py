"""The gradient of an embedding table: exact sums for any tokens, and the same bits for the same inputs."""

import pytest
import torch
from torch import Tensor, nn

from compiled import passes
from m2s.models import DiT, DiTConfig
from m2s.ops import use_backend
from m2s.ops.embedding import _backward, _embed, embed

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = [1, 7, 130, 768, 1025]
# Positions of each row of a table: none at all, none for some rows, few, one more than few, chunks of 64 that belong to one
# row, with and without positions before and after them, many rows of one position, all positions in one row.
COUNTS: dict[str, list[int]] = {
    "no site": [0, 0, 0],
    "one row": [1],
    "one row of all sites": [0, 0, 1000, 0],
    "few": [0, 1, 2, 0, 7, 8, 9, 10, 0, 0, 3],
    "chunks": [64, 128, 0, 63, 65, 1, 127, 64, 129, 130, 200, 0],
    "after a long one": [3, 300, *[1] * 20, 17, *[0] * 9, 2],
    "half of them the last": [*[1, 0, 2] * 11, 40, 80],
}
cases = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())


def tokens_of(counts: list[int]) -> Tensor:
    """Tokens in random order, `counts[v]` of each v."""
    tokens = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return tokens[torch.randperm(len(tokens))].to(DEVICE)


def exact(upstream: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient in float64."""
    zeros = torch.zeros(rows, upstream.shape[-1], dtype=torch.float64, device=upstream.device)
    return zeros.index_add(0, tokens.flatten().long(), upstream.reshape(-1, upstream.shape[-1]).double())


@pytest.mark.parametrize("width", WIDTHS)
@cases
def test_every_position_is_counted_once(counts, width):
    """Integers are added up exactly."""
    tokens = tokens_of(counts)
    upstream = torch.randint(-1000, 1000, (len(tokens), width), device=DEVICE).float()
    found = _backward(upstream, tokens, len(counts))
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), exact(upstream, tokens, len(counts)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@cases
def test_rounding_of_sums(counts, dtype):
    """n terms that are added up one by one are rounded n - 1 times.

    Longer sums are trees, over 16 sums side by side and chunks of 64, and are rounded less.
    """
    tokens = tokens_of(counts).to(dtype)
    upstream = torch.randn(len(tokens), 33, device=DEVICE)
    weight = torch.randn(len(counts), 33, device=DEVICE, requires_grad=True)
    values = embed(tokens, weight, fused=True)
    assert torch.equal(values, weight[tokens.long()])
    values.backward(upstream)
    n = torch.tensor(counts, device=DEVICE).double()
    roundings = torch.minimum((n - 1).clamp(min=0), 24 + n / 1024).unsqueeze(-1)
    bound = 1.0001 * 2.0**-24 * roundings * exact(upstream.abs(), tokens, len(counts))
    assert ((weight.grad.double() - exact(upstream, tokens, len(counts))).abs() <= bound).all()


def test_random_tables():
    for seed in range(20):
        torch.manual_seed(seed)
        rows, few = int(torch.randint(1, 30, ())), int(torch.randint(1, 30, ()))
        tokens = torch.randint(min(rows, few), (int(torch.randint(1, 700, ())),), device=DEVICE)
        upstream = torch.randint(-1000, 1000, (len(tokens), 5), device=DEVICE).float()
        assert torch.equal(_backward(upstream, tokens, rows).double(), exact(upstream, tokens, rows))


@pytest.mark.parametrize("rows", [2**15, 2**16 - 1, 2**16, 50_304, 70_000])
def test_positions_sorted_by_token(rows):
    """Keys have 16 bits where these suffice, else 32."""
    from m2s.ops.embedding.triton import _sorted

    tokens = torch.cat([torch.randint(rows, (400,)), torch.tensor([0, rows - 1, rows - 1, 2**15 - 1, 0])]).to(DEVICE)
    keys, order, starts, shift = _sorted(tokens, rows)
    assert torch.equal(keys.long() + shift, tokens.sort().values)
    assert keys.element_size() == (2 if rows < 2**16 else 4)
    pairs = sorted((token, site) for site, token in enumerate(tokens.tolist()))
    assert order.tolist() == [site for _, site in pairs]
    assert starts.tolist() == [0, *torch.bincount(tokens.cpu(), minlength=rows).cumsum(0).tolist()]


def test_same_bits_for_any_shape_and_strides():
    """Run again, and in batches of other shapes and strides with the same order of positions."""
    tokens, upstream = tokens_of([30, 0, 200, 1, 69]), torch.randn(300, 70, device=DEVICE)
    expected = _backward(upstream, tokens, 5)
    for shape in ((300,), (3, 100), (10, 6, 5)):
        assert torch.equal(_backward(upstream.view(*shape, 70), tokens.view(shape), 5), expected)
    turned = upstream.view(3, 100, 70)
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        back = [order.index(i) for i in range(3)]
        assert torch.equal(_backward(turned.permute(order).contiguous().permute(back), tokens.view(3, 100), 5), expected)
    assert torch.equal(_backward(upstream, torch.stack([tokens, tokens], -1)[:, 0], 5), expected)
    wide = torch.randn(300, 90, device=DEVICE)
    wide[:, 7:77] = upstream
    assert torch.equal(_backward(wide[:, 7:77], tokens, 5), expected)


def test_expanded_upstream_gradient():
    weight = torch.randn(5, 12, device=DEVICE, requires_grad=True)
    embed(tokens_of([30, 0, 200, 1, 69]).view(3, 100), weight, fused=True).sum().backward()
    assert torch.equal(weight.grad, torch.tensor([30.0, 0, 200, 1, 69], device=DEVICE).unsqueeze(-1).expand(5, 12))


def test_other_dtypes_use_torch():
    tokens, upstream = tokens_of([3, 0, 20]), torch.randn(23, 4, device=DEVICE, dtype=torch.float64)
    weight = torch.randn(3, 4, device=DEVICE, dtype=torch.float64, requires_grad=True)
    embed(tokens, weight, fused=True).backward(upstream)
    torch.testing.assert_close(weight.grad, exact(upstream, tokens, 3), rtol=1e-14, atol=1e-14)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter gets bf16 wrong")
@cases
def test_bf16_upstream_gradient(counts):
    tokens = tokens_of(counts)
    upstream = torch.randint(-128, 128, (len(tokens), 130), device=DEVICE).bfloat16()
    assert torch.equal(_backward(upstream, tokens, len(counts)).double(), exact(upstream, tokens, len(counts)))


@pytest.mark.skipif(DEVICE == "cpu", reason="a GPU's graphs")
def test_cuda_graph_serves_all_tokens():
    """A CUDA graph that was recorded once is right for other tokens."""
    tokens, upstream = torch.randint(50_257, (32, 512), device=DEVICE), torch.randn(32, 512, 768, device=DEVICE).round()
    graph = torch.cuda.CUDAGraph()
    _backward(upstream, tokens, 50_304)
    with torch.cuda.graph(graph):
        found = _backward(upstream, tokens, 50_304)
    for mask in (0.0, 0.5, 1.0):
        other = torch.randint(50_257, (32, 512), device=DEVICE)
        tokens.copy_(torch.where(torch.rand(32, 512, device=DEVICE) < mask, 50_257, other))
        graph.replay()
        assert torch.equal(found.double(), exact(upstream, tokens, 50_304))


def test_fake_implementations():
    """Shapes, dtypes and gradients as torch.compile assumes them (torch.library.opcheck)."""
    tokens, weight = tokens_of([3, 0, 20, 1]).view(2, 12), torch.randn(4, 6, device=DEVICE, requires_grad=True)
    torch.library.opcheck(_embed, (tokens, weight))
    torch.library.opcheck(_backward, (torch.randn(2, 12, 6, device=DEVICE), tokens, 4))


@pytest.mark.parametrize("settings", [{}, {"time": False, "classes": 3}], ids=["time", "classes"])
def test_network_gradients_agree(settings):
    model = DiT(DiTConfig(11, width=16, depth=1, heads=2, condition_width=8, **settings)).to(DEVICE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, t = torch.randint(7, (3, 30), device=DEVICE), torch.rand(3, device=DEVICE)
    labels = torch.tensor([0, 1, 2], device=DEVICE) if settings else None
    found = {}
    for kernels in ("reference", "fused"):
        torch.manual_seed(1)
        model.zero_grad()
        with use_backend(kernels):
            model(x, t, labels).square().mean().backward()
        found[kernels] = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    assert found["fused"].keys() == found["reference"].keys()
    for name, expected in found["reference"].items():
        assert (found["fused"][name] - expected).norm() <= 2e-5 * expected.norm(), name
    assert not found["fused"]["embedding.weight"][7:].any()


COMPILED = """
from m2s.ops.embedding import embed


def looked_up(tokens, weight, fused):
    return (embed(tokens, weight, fused) * 3).sin()


tokens, table = torch.randint(9, (4, 25), device=device), torch.randn(13, 6, device=device)


def gradients(function, fused):
    weight = table.clone().requires_grad_()
    result = function(tokens, weight, fused)
    result.square().sum().backward()
    return result.detach(), weight.grad


compiled = torch.compile(looked_up, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True, dynamic=False)
functions = [compiled, *([torch.compile(looked_up, fullgraph=True, dynamic=False)] if device == "cuda" else [])]
for function in functions:
    for one, other in zip(gradients(function, True), gradients(looked_up, False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
forward, backward = graphs
assert forward.count("m2s.embedding.default") == 1, forward
assert backward.count("m2s.embedding_backward.default") == 1, backward
assert not any("aten.embedding" in name for name in forward + backward), graphs
"""


def test_compiled_lookup():
    """One op each way, and no embedding of torch's."""
    passes(COMPILED)
