"""Operations with a hand-written backward pass: a second derivative is right, or an error that says what to do."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import grad, vmap

import m2s
from m2s.losses import weighted_sum
from m2s.losses.weighted_sum import _SelectRows
from m2s.models import DiT, DiTConfig, MaskAt
from m2s.ops import backend, last_layer, use_backend, uses_triton
from m2s.ops.dense import dense
from m2s.ops.group_norm import group_norm_silu
from m2s.ops.norm import add_norm
from m2s.ops.rotary import joint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ADVICE = r'first derivatives only, but create_graph=True asks for second ones: .* m2s\.ops\.use_backend\("reference"\)'
with FakeTensorMode():
    ON_GPU = torch.empty(1, device="cuda")  # without a GPU


def leaf(*shape: int) -> Tensor:
    """A tensor of the dtype of the kernels that requires a gradient."""
    return torch.randn(shape, device=DEVICE).requires_grad_()


def fused_loss(weighted: bool) -> Callable[[], Tensor]:
    """The loss of hidden states with kernels, as training or `m2s.score_entropy` computes it."""
    head = m2s.Posterior(m2s.Hybrid(6, 0.3))
    output = m2s.Unprojected(leaf(1, 4, 8), leaf(7, 8), leaf(7))
    x_0, x_t = torch.tensor([[0, 1, 2, 3]], device=DEVICE), torch.tensor([[6, 1, 2, 0]], device=DEVICE)
    t = torch.tensor([0.4], device=DEVICE)
    if weighted:
        ones = torch.ones(1, 4, device=DEVICE)
        return lambda: weighted_sum(m2s.score_entropy, head, output, x_0, x_t, t, ones)[0]
    return lambda: m2s.score_entropy(head, output, x_0, x_t, t).sum()


def network() -> Tensor:
    """All kernels between the layers in one network."""
    model = DiT(DiTConfig(11, width=12, depth=2, heads=2, condition_width=8)).to(DEVICE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model(torch.randint(11, (2, 9), device=DEVICE), torch.rand(2, device=DEVICE))


def rotary() -> Tensor:
    cos, sin = m2s.models.rotary.angles(4, 4, torch.device(DEVICE))
    return torch.cat(joint(leaf(1, 4, 8), leaf(24, 8), cos, sin, 2, True))


FUSED: dict[str, Callable[[], Tensor]] = {
    "loss per position": fused_loss(False),
    "weighted sum": fused_loss(True),
    "dense": lambda: dense(leaf(3, 8), leaf(4, 8), leaf(4), True),
    "norm": lambda: add_norm(leaf(2, 3, 8), leaf(2, 3, 8), None, leaf(8), 1e-5, None, None, True)[1],
    "group norm": lambda: group_norm_silu(leaf(1, 4, 2, 2), leaf(1, 4), leaf(4), leaf(4), 2, 1e-5, True),
    "rotary": rotary,
    "network": network,
}


def leaves(value: Tensor) -> list[Tensor]:
    """The tensors at the ends of the graph of a value."""
    found, seen, waiting = [], set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("name", FUSED)
def test_kernels_reject_a_graph_of_their_gradient(name: str) -> None:
    """A gradient without a graph would count as a constant in a second derivative."""
    pytest.importorskip("triton")
    with use_backend("fused"):
        value = FUSED[name]().square().sum()
    inputs = leaves(value)
    assert inputs and all(gradient.isfinite().all() for gradient in torch.autograd.grad(value, inputs, retain_graph=True))
    with pytest.raises(RuntimeError, match=ADVICE) as error:
        torch.autograd.grad(value, inputs, create_graph=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["loss per position", "weighted sum"])
def test_the_advice_works(name: str) -> None:
    with use_backend("reference"):
        value = FUSED[name]()
        inputs = leaves(value)
        gradients = torch.autograd.grad(value, inputs, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), inputs)
    assert any(gradient.any() for gradient in second)


def test_every_hand_written_backward_pass_is_listed() -> None:
    """A new one belongs here: with a test of its second derivative, or among the kernels above."""
    source = Path(m2s.__file__).parent
    found = set()
    for path in source.rglob("*.py"):
        names = re.findall(r"class (\w+)\(torch\.autograd\.Function\)|(\w+)\.register_autograd\(", path.read_text())
        found |= {f"{path.relative_to(source)} {name or op}" for name, op in names}
    assert found == {
        "losses/weighted_sum.py _SelectRows",  # test_selected_rows
        "models/mask_at.py _MoveEntry",  # tests/models/test_mask_at.py, and below
        "ops/dense.py _dense",
        "ops/group_norm/__init__.py _group_norm_silu",
        "ops/last_layer.py _BF16LastLayer",  # test_bf16_last_layer, on a GPU
        "ops/linear_loss.py _PerPosition",
        "ops/linear_loss.py _WithGradients",
        "ops/norm/__init__.py _add_norm",
        "ops/posterior_entropy/cpu.py _PosteriorScoreEntropy",  # tests/losses/test_second_derivatives.py
        "ops/project/__init__.py _NearestPosterior",  # test_projection
        "ops/rotary/__init__.py _Joint",
        "ops/score_entropy/cpu.py _UnconstrainedScoreEntropy",  # tests/losses/test_second_derivatives.py
    }


@pytest.mark.parametrize("log", [False, True], ids=["score", "log-score"])
@pytest.mark.parametrize("name", ["uniform", "absorbing", "hybrid", "tabulated"])
def test_projection(name: str, log: bool) -> None:
    """Gradients of the projection inside a support, also at a vertex and at the mask; the entry at x_t has none."""
    process = {
        "uniform": m2s.Uniform(5, m2s.Linear()),
        "absorbing": m2s.Absorbing(5, m2s.Linear()),
        "hybrid": m2s.Hybrid(5, 0.3),
        "tabulated": m2s.RateMatrix.uniform(5, m2s.Linear()),
    }[name]
    x_t, t = torch.tensor([0, process.states - 1, 2]), torch.tensor([0.3, 0.6, 0.8], dtype=torch.float64)
    values = 0.5 * torch.randn(3, process.states, dtype=torch.float64)
    values = (values if log else values.exp()).requires_grad_()

    def function(values: Tensor) -> Tensor:
        return m2s.project(values.exp() if log else values, x_t, t, process)

    assert torch.autograd.gradcheck(function, (values,))
    assert torch.autograd.gradgradcheck(function, (values,))
    assert not torch.autograd.grad(function(values)[0].square().sum(), values)[0][0, 0]
    if name != "tabulated":
        rows = torch.stack([values.detach(), 1.5 * values.detach().exp()])
        torch.testing.assert_close(vmap(function)(rows), torch.stack([function(rows[0]), function(rows[1])]))


def test_projection_with_a_gradient_has_the_same_values() -> None:
    """The fast version computes the values also where a gradient is wanted."""
    process, x_t, t = m2s.Hybrid(300, 0.3), torch.randint(301, (40,)), torch.rand(40) * 0.8 + 0.1
    score = torch.rand(40, 301)
    assert torch.equal(m2s.project(score, x_t, t, process), m2s.project(score.clone().requires_grad_(), x_t, t, process))


def test_projected_head_with_many_logits_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of sites would have none."""
    monkeypatch.setattr("m2s.realizability.head.CHUNK", 8)
    head, x_t, t = m2s.Projected(m2s.LogScore(m2s.Uniform(5, m2s.Linear()))), torch.tensor([[0, 1, 2]]), torch.tensor([0.5])
    hidden, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4)
    found, expected = (
        torch.autograd.grad(head.posterior(output, x_t, t).square().sum(), hidden)[0]
        for output in (m2s.Unprojected(hidden, weight), hidden @ weight.T)
    )
    torch.testing.assert_close(found, expected)


def test_selected_rows() -> None:
    """Rows at distinct indices, one of them past the end."""
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    at = torch.tensor([3, 0, 5])

    def function(rows: Tensor) -> Tensor:
        return (_SelectRows.apply(rows, at)[:2] ** 3).sum()

    assert torch.autograd.gradcheck(function, (rows,)) and torch.autograd.gradgradcheck(function, (rows,))


@pytest.mark.parametrize("which", ["weight", "time"])
def test_fused_loss_rejects_gradients_of_constants(which: str) -> None:
    """Times and weights of positions have no gradient there; they are not silently constants."""
    pytest.importorskip("triton")
    head, x = m2s.Posterior(m2s.Hybrid(6, 0.3)), torch.tensor([[0, 1]], device=DEVICE)
    output = m2s.Unprojected(leaf(1, 2, 8), leaf(7, 8))
    weight, t = torch.ones(1, 2, device=DEVICE), torch.tensor([0.4], device=DEVICE)
    {"weight": weight, "time": t}[which].requires_grad_()
    with (
        use_backend("fused"),
        pytest.raises(RuntimeError, match=r'requires a gradient: .*use_backend\("reference"\), or detach'),
    ):
        weighted_sum(m2s.score_entropy, head, output, x, x, t, weight)
    with use_backend("reference"):
        value, _ = weighted_sum(m2s.score_entropy, head, output, x, x, t, weight)
    assert torch.autograd.grad(value, {"weight": weight, "time": t}[which])[0].any()


def test_backend_inside_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "auto" is plain torch there, "fused" is an error; outside nothing changes."""
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(backend, "_broken", [])
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append(uses_triton(ON_GPU))
        return x.sum()

    function(torch.ones(2))
    grad(function)(torch.ones(2))
    vmap(function)(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(2))
    function(torch.ones(2))
    assert answers == [True, False, False, False, True]
    with use_backend("fused"), pytest.raises(RuntimeError, match=r"do not run inside torch\.func: use 'auto' or 'reference'$"):
        grad(function)(torch.ones(2))


def test_adapter_inside_torch_func() -> None:
    """`MaskAt` reorders logits, and the last layer, by plain operations; a stored layer would cut off the derivative."""
    weight = torch.randn(7, 4)

    def total(weight: Tensor, logits: bool) -> Tensor:
        hidden = torch.ones(1, 3, 4)
        output = hidden @ weight.T if logits else m2s.Unprojected(hidden, weight)
        adapted = MaskAt(lambda x_t, t: output, mask=2, vocab=5).eval()
        value = adapted(torch.tensor([[0, 5, 1]]), torch.tensor([0.5]))
        value = value if logits else value.project()
        return (value * torch.arange(7.0)).square().sum()

    required = weight.clone().requires_grad_()
    expected = torch.autograd.grad(total(required, True), required)[0]
    for logits in (True, False):
        torch.testing.assert_close(grad(total)(weight, logits), expected)
        assert vmap(lambda weight, logits=logits: total(weight, logits))(torch.stack([weight, weight])).shape == (2,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_bf16_last_layer() -> None:
    hidden, weight = torch.randn(2, 3, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True), leaf(6, 8)
    value = last_layer.last_layer(hidden, weight, None).square().sum()
    with pytest.raises(RuntimeError, match="asks for second ones: run the network without autocast"):
        torch.autograd.grad(value, (hidden, weight), create_graph=True)
    gradient = grad(lambda weight: last_layer.last_layer(hidden.detach(), weight, None).square().sum())(weight.detach())
    assert gradient.isfinite().all()
