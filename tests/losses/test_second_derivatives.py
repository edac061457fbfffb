"""Second derivatives and `torch.func` for every loss, head and process, against finite differences and plain autograd."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import m2s
from compiled import passes
from m2s.losses.registry import LOSSES
from m2s.models import DiT, DiTConfig
from m2s.ops import use_backend

VOCAB = 4
PROCESSES = {
    "uniform": lambda: m2s.Uniform(VOCAB, m2s.Linear()),
    "absorbing": lambda: m2s.Absorbing(VOCAB, m2s.Linear()),
    "hybrid": lambda: m2s.Hybrid(VOCAB, 0.3),
    "tabulated": lambda: m2s.RateMatrix.uniform(VOCAB, m2s.Linear()),
    "shifted": lambda: m2s.heads.Shifted(VOCAB),
    "chain": lambda: m2s.Chain.uniform(VOCAB, torch.linspace(0.05, 0.5, 8, dtype=torch.float64)),
}
HEADS = {
    "posterior": m2s.Posterior,
    "posterior with offset": lambda process: m2s.Posterior(process, offset="exact"),
    "log-score": m2s.LogScore,
    "log-score by sigma": lambda process: m2s.LogScore(process, scale="sigma"),
    "factorized rate": m2s.FactorizedRate,
    "ordinal": m2s.Ordinal,
    "projected": lambda process: m2s.Projected(m2s.LogScore(process)),
    "next token": m2s.heads.NextToken,
}
X_0 = torch.tensor([[0, 1, 2, 3]])
X_T = torch.tensor([[0, 2, 2, 0]])  # two tokens as they were and two changed
T = torch.tensor([0.375], dtype=torch.float64)  # a step of the chain

Case = tuple[str, str, str]


def build(case: Case) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
    """A loss as a function of the network's output, and an output; None if the loss is not for this head or process."""
    kind, head_name, loss = case
    process, x_t = PROCESSES[kind](), X_T.clone()
    if process.mask is not None:
        x_t[0, 1], x_t[0, 3] = process.mask, process.mask if kind == "absorbing" else x_t[0, 3]
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(1, 4, process.states, dtype=torch.float64, generator=generator)
    if head_name == "projected":
        output *= 0.2  # near a score whose projection gives every token some mass, so that the loss is finite
    try:
        head = HEADS[head_name](process)

        def function(output: Tensor) -> Tensor:
            return LOSSES[loss].function(head, output, X_0, x_t, T)

        function(output)
    except (TypeError, ValueError):
        return None
    return function, output


def cases() -> Iterator[Case]:
    """Every loss with every head and process that it is for."""
    for kind in PROCESSES:
        for head in HEADS:
            for loss in LOSSES:
                if build((kind, head, loss)) is not None:
                    yield kind, head, loss


CASES = list(cases())
ENTROPY = [case for case in CASES if case[2] == "score-entropy"]


def test_every_loss_and_head_is_tested() -> None:
    assert {loss for _, _, loss in CASES} == set(LOSSES) and {head for _, head, _ in CASES} == set(HEADS)
    assert len(ENTROPY) == 4 * 6 + 1


@pytest.mark.parametrize("case", CASES, ids=" | ".join)
def test_first_and_second_derivatives(case: Case) -> None:
    function, output = build(case)
    output.requires_grad_()
    assert torch.autograd.gradcheck(function, (output,))
    assert torch.autograd.gradgradcheck(function, (output,), fast_mode=True)  # along random directions: a fifth of the time


@pytest.mark.parametrize("case", ENTROPY, ids=" | ".join)
def test_float32_second_derivatives(case: Case) -> None:
    """The second derivative of a sum, where no upstream gradient requires a graph, as in a gradient penalty."""
    function, output = build(case)
    found = []
    for dtype in (torch.float32, torch.float64):
        x = output.to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        assert gradient.requires_grad
        (second,) = torch.autograd.grad(gradient.square().sum(), x)
        found.append(second.double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ENTROPY, ids=" | ".join)
def test_gradient_with_a_graph_is_the_gradient(case: Case) -> None:
    function, output = build(case)
    output.requires_grad_()
    plain, graphed = (torch.autograd.grad(function(output).sum(), output, create_graph=graph)[0] for graph in (False, True))
    torch.testing.assert_close(plain, graphed.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("head", ["posterior", "log-score"])
def test_third_derivative(head: str) -> None:
    function, output = build(("hybrid", head, "score-entropy"))

    def second(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]

    assert torch.autograd.gradcheck(second, (output.requires_grad_(),))


@pytest.mark.parametrize("case", CASES, ids=" | ".join)
def test_torch_func(case: Case) -> None:
    """Every transform against autograd; vmap against a loop."""
    function, x = build(case)
    other = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))

    def total(x: Tensor) -> Tensor:
        return function(x).sum()

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(leaf), leaf)
    jacobian = torch.autograd.functional.jacobian(function, x)
    second = torch.autograd.functional.hessian(total, x)
    assert_close = torch.testing.assert_close
    assert_close(grad(total)(x), gradient)
    assert_close(vjp(total, x)[1](torch.tensor(2.0, dtype=x.dtype))[0], 2 * gradient)
    assert_close(jvp(total, (x,), (other,))[1], (gradient * other).sum())
    assert_close(jacrev(function)(x), jacobian)
    both = torch.stack([x, other])
    if case[:2] == ("tabulated", "projected"):  # a clear error: its solver stops when it has converged
        with pytest.raises(RuntimeError, match=r"does not run inside torch\.func\.vmap: .* call it without vmap"):
            vmap(function)(both)
        return
    assert_close(jacfwd(function)(x), jacobian)
    assert_close(hessian(total)(x), second, rtol=1e-6, atol=1e-8)
    assert_close(vmap(function)(both), torch.stack([function(x), function(other)]))


def test_forward_mode() -> None:
    """A dual tensor, without torch.func."""
    function, x = build(("hybrid", "posterior", "score-entropy"))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(function(dual).sum()).tangent
    torch.testing.assert_close(tangent, grad(lambda x: function(x).sum())(x).sum())


@pytest.mark.parametrize("kind", ["uniform", "absorbing", "hybrid"])
@pytest.mark.parametrize("head", ["posterior with offset", "log-score", "log-score by sigma"])
def test_gradient_of_the_time(kind: str, head: str) -> None:
    """A time that requires a gradient, as for a learned schedule, gets it: it is not treated as a constant."""
    if build((kind, head, "score-entropy")) is None:
        return
    process = PROCESSES[kind]()
    x_t = torch.where(torch.tensor([[True, False, True, False]]), process.states - 1, X_0)
    output = torch.randn(1, 4, process.states, dtype=torch.float64)

    def function(t: Tensor) -> Tensor:
        return m2s.score_entropy(HEADS[head](process), output, X_0, x_t, t)

    assert torch.autograd.gradcheck(function, (T.clone().requires_grad_(),))


def test_gradients_of_examples_by_vmap() -> None:
    """grad inside vmap over tokens and times, with the parameters of a network through functional_call."""
    head = m2s.Posterior(m2s.Absorbing(5, m2s.Linear()))
    model = DiT(DiTConfig(6, width=8, depth=1, heads=2, condition_width=4)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_0, t = torch.randint(5, (3, 4)), torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    x_t = torch.where(torch.rand(3, 4) < 0.5, 5, x_0)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        output = functional_call(model, weights, (x_t.unsqueeze(0), t.unsqueeze(0)))
        return m2s.score_entropy(head, output, x_0.unsqueeze(0), x_t.unsqueeze(0), t.unsqueeze(0)).sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0, 0), randomness="error")(weights, x_0, x_t, t)
    for i in range(3):
        expected = torch.autograd.grad(loss(weights, x_0[i], x_t[i], t[i]), list(weights.values()))
        for name, value in zip(weights, expected, strict=True):
            torch.testing.assert_close(found[name][i], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("head", [m2s.Posterior, m2s.LogScore])
def test_unprojected_output_inside_torch_func(head: Callable[[m2s.Process], m2s.Head]) -> None:
    """Hidden states with their last layer: plain torch runs inside a transform, and a request for kernels is an error."""
    process = m2s.Hybrid(VOCAB, 0.3)
    hidden, weight = torch.randn(1, 4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)

    def total(hidden: Tensor) -> Tensor:
        return m2s.score_entropy(head(process), m2s.Unprojected(hidden, weight), X_0, X_T, T).sum()

    leaf = hidden.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(grad(total)(hidden), gradient)
    with use_backend("fused"), pytest.raises(RuntimeError, match=r"kernels do not run inside torch\.func: use 'auto'"):
        grad(total)(hidden)


COMPILED = """
import m2s
process = m2s.Hybrid(4, 0.3)
x_0, x_t, t = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 4, 2, 0]]), torch.tensor([0.4])
x_0, x_t, t = (value.to(device) for value in (x_0, x_t, t))
for head in (m2s.Posterior(process), m2s.LogScore(process)):
    function = lambda x: m2s.score_entropy(head, x, x_0, x_t, t)
    x = torch.randn(1, 4, 5, device=device, requires_grad=True)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    gradient, = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), torch.autograd.grad(function(x).sum(), x)[0])
    try:
        gradient.square().sum().backward()
    except RuntimeError as error:
        assert "does not currently support double backward" in str(error), error
    else:
        raise AssertionError("a gradient without a graph")
"""


def test_compiled_second_derivative_is_an_error() -> None:
    """torch.compile has first derivatives only. It must not return a gradient without a graph."""
    passes(COMPILED)
