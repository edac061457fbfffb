"""Choice of the backend: a Triton that does not work, and the same backend in forward and backward pass."""

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

import m2s
from m2s.losses.score_entropy import row_loss_spec
from m2s.models import DiT, DiTConfig
from m2s.ops import backend, linear_loss, probe_triton, use_backend, uses_triton

CUDA = torch.device("cuda")
HEADS = {  # by the row loss of their score entropy
    "posterior_entropy": m2s.Posterior,
    "score_entropy": m2s.LogScore,
    "factorized_entropy": m2s.FactorizedRate,
    "cross_entropy": m2s.Posterior,
}
with FakeTensorMode():
    ROWS = torch.empty(1, device="cuda")  # without a GPU


@pytest.fixture
def untried(monkeypatch):
    """A process in which Triton is installed and was not probed yet."""
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(backend, "_broken", [])
    backend._probe.cache_clear()
    yield
    backend._probe.cache_clear()


@pytest.fixture
def broken(untried, monkeypatch):
    """Every kernel fails, on a machine with a GPU and on one without."""

    def fail(*_, **__):
        raise RuntimeError("no C compiler\nanywhere")

    monkeypatch.setattr(torch, "zeros", fail)


def test_broken_triton_warns_once_and_is_not_used(broken):
    assert uses_triton(ROWS)
    with pytest.warns(UserWarning, match=r"does not work \(no C compiler anywhere\): plain torch"):
        probe_triton(CUDA)
    assert not uses_triton(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe_triton(CUDA)


def test_no_probe_where_no_kernel_would_run(broken):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe_triton(torch.device("cpu"))
        for name in ("reference", "fused"):
            with use_backend(name):
                probe_triton(CUDA)
    assert uses_triton(ROWS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_working_triton_is_used(untried):
    pytest.importorskip("triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe_triton(CUDA)
    assert uses_triton(ROWS)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted sum", "per position"])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["fused", "reference"])
def test_backward_uses_the_backend_of_its_forward(name, kind, weighted, monkeypatch):
    """A backward pass outside `use_backend` runs the kernels, or the torch code, of its forward pass."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    process = m2s.Absorbing(6, m2s.Linear()) if kind == "cross_entropy" else m2s.Hybrid(6, 0.3)
    head = HEADS[kind](process)
    x_0, t = torch.arange(4, device=device).unsqueeze(-1), torch.tensor([0.2, 0.4, 0.6, 0.8], device=device)
    x_t = torch.full_like(x_0, 6)
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in ((4, 1, 8), (7, 8), (7,))]
    spec = row_loss_spec(head, x_0, x_t, t)
    assert spec.kind == kind
    weight = torch.ones(4, 1, dtype=torch.float64, device=device)

    def loss():
        output = m2s.Unprojected(*leaves)
        if weighted:
            return linear_loss.weighted_sum(output, x_t, x_0, spec, weight)[0]
        return (linear_loss.per_position(output, x_t, x_0, spec) * weight).sum()

    with use_backend(name):
        expected = torch.autograd.grad(loss(), leaves)
        pending = loss()
    loaded = []
    monkeypatch.setattr(linear_loss, "load_op", lambda op, fused: loaded.append(fused) or backend.load_op(op, fused))
    other = "reference" if name == "fused" else "fused"
    with use_backend(other):
        found = torch.autograd.grad(pending, leaves)
    assert loaded == ([] if weighted else [name == "fused"])  # the gradient of a weighted sum is known in the forward pass
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["fused", "reference"])
def test_network_backward_outside_of_the_context(name):
    """The layers of a network have the gradients of the backend of their forward pass."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DiT(DiTConfig(11, width=12, depth=2, heads=2, condition_width=8)).to(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, t = torch.randint(11, (2, 9), device=device), torch.rand(2, device=device)
    gradients = []
    for inside in (True, False):
        with use_backend(name):
            value = model(x, t).square().mean()
            if inside:
                gradients.append(torch.autograd.grad(value, list(model.parameters())))
        if not inside:
            gradients.append(torch.autograd.grad(value, list(model.parameters())))
    assert all(map(torch.equal, *gradients))


def test_unknown_backend_is_an_error(without_shape_hook):
    with (
        pytest.raises(ValueError, match="backend is 'cuda', but it must be one of auto, fused, reference"),
        use_backend("cuda"),
    ):
        pass


def test_fused_backend_without_kernels_is_an_error(monkeypatch):
    """The message says why no kernel can run."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with use_backend("fused"), pytest.raises(RuntimeError, match="the backend is 'fused', but"):
        uses_triton(torch.zeros(1))
