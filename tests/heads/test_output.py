"""The last layer with operands in bf16, against float64, and the errors for networks that do not fit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import m2s
from m2s.evaluation.bpd import dataset_nelbo
from m2s.ops.last_layer import _BF16LastLayer, last_layer

ROWS, WIDTH, COLUMNS = 40, 24, 65


@pytest.mark.parametrize("biased", [False, True])
def test_bf16_operands_are_added_up_in_float32(biased: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=rng).bfloat16().requires_grad_()
    weight = torch.randn(COLUMNS, WIDTH, generator=rng).requires_grad_()
    bias = (10 * torch.randn(COLUMNS, generator=rng)).requires_grad_() if biased else None
    upstream = torch.randn(ROWS, COLUMNS, generator=rng)
    logits = _BF16LastLayer.apply(hidden, weight, bias)
    logits.backward(upstream)
    assert logits.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32

    exact_hidden, rounded, exact_upstream = (
        hidden.detach().double(),
        weight.detach().bfloat16().double(),
        upstream.bfloat16().double(),
    )
    exact = exact_hidden @ rounded.t() + (bias.detach().double() if biased else 0)
    torch.testing.assert_close(logits.detach().double(), exact, rtol=0, atol=2e-4 if biased else 1e-5)  # 2^-17 of the bias
    torch.testing.assert_close(weight.grad.double(), exact_upstream.t() @ exact_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), exact_upstream @ rounded, rtol=2**-8, atol=1e-5)
    if biased:
        torch.testing.assert_close(bias.grad.double(), exact_upstream.sum(0), rtol=1e-5, atol=1e-5)


def test_on_a_cpu_hidden_states_in_bf16_are_widened() -> None:
    hidden, weight = torch.randn(3, 5, 8).bfloat16(), torch.randn(11, 8)
    assert torch.equal(last_layer(hidden, weight, None), hidden.float() @ weight.t())
    output = m2s.Unprojected(hidden, weight)
    with pytest.raises(ValueError, match="weight has 11 rows, but the process has 12 states"):
        m2s.Posterior(m2s.Uniform(12, m2s.Linear())).posterior(
            output, torch.zeros(3, 5, dtype=torch.long), torch.full((3,), 0.5)
        )


class Timed(nn.Module):
    """A network that passes its time to a layer without a cast, or its tokens if `reads`."""

    def __init__(self, layer: nn.Module, width: int, reads: bool = False) -> None:
        super().__init__()
        self.layer, self.width, self.reads = layer, width, reads

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        seen = x_t[..., None] if self.reads else t[:, None, None].expand(*x_t.shape, 1)
        out = self.layer(seen)
        return (out[0] if isinstance(out, tuple) else out).expand(*x_t.shape, self.width)


PROCESS = m2s.Uniform(5, m2s.Linear())
HEAD = m2s.Posterior(PROCESS)
ROWS_OF_FIVE = torch.randint(5, (3, 4))
CALLS: dict[str, Callable[[object], object]] = {
    "Objective": lambda model: m2s.Objective(model, HEAD)(ROWS_OF_FIVE, m2s.stratified_times(3, 0.1, 0.9)),
    "elbo": lambda model: m2s.elbo(model, HEAD, ROWS_OF_FIVE),
    "sample": lambda model: m2s.sample(model, HEAD, (2, 4), steps=2),
    "bound": lambda model: dataset_nelbo(model, HEAD, ROWS_OF_FIVE, passes=1),
    "audit": lambda model: m2s.audit(model, HEAD, (2, 4), steps=2),
}
LAYERS = {
    "linear": lambda: nn.Linear(1, 5),
    "no bias": lambda: nn.Linear(1, 5, bias=False),
    "norm": lambda: nn.LayerNorm(1),
    "gru": lambda: nn.GRU(1, 5, batch_first=True),
    "convolution": lambda: nn.Conv1d(4, 4, 1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_error_for_weights_in_another_dtype_than_the_time(call: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and call in ("sample", "audit"):  # samplers give times in float64 to a network in float64
        CALLS[call](Timed(nn.Linear(1, 5), 5).to(dtype))
        return
    with pytest.raises(
        TypeError,
        match=r"calls it with x_t in int64 and t in float32, .* Cast t in its forward, t\.to\(weight\.dtype\), .*autocast",
    ):
        CALLS[call](Timed(nn.Linear(1, 5), 5).to(dtype))


@pytest.mark.parametrize("layer", LAYERS)
def test_dtype_error_is_found_in_every_kind_of_layer(layer: str) -> None:
    with pytest.raises(TypeError, match=r"on the dtypes of its inputs .* t in float32") as error:
        CALLS["Objective"](Timed(LAYERS[layer](), 5).bfloat16())
    assert isinstance(error.value.__cause__, RuntimeError | ValueError)
    CALLS["Objective"](Timed(LAYERS[layer](), 5))


def test_other_errors_of_a_network_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        CALLS["Objective"](Timed(nn.Linear(2, 5), 5))
    with pytest.raises(TypeError, match="calls it with x_t in int64"):  # tokens in a layer for numbers
        CALLS["Objective"](Timed(nn.Linear(1, 5), 5, reads=True))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("process", [PROCESS, m2s.Absorbing(5, m2s.Linear())], ids=repr)
def test_error_for_an_objective_in_place_of_a_network(call: str, process: m2s.Process) -> None:
    objective = m2s.Objective(Timed(nn.Linear(1, process.states), process.states), m2s.Posterior(process))
    with pytest.raises(TypeError, match="give the network, not the objective"):
        CALLS[call](objective)


class Failing(nn.Module):
    """A network that fails after a layer has succeeded, in weights of any dtype."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(1, 5), error

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        self.layer(t.to(self.layer.weight.dtype)[:, None])
        raise self.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("error", [RuntimeError("expected scalar type"), torch.OutOfMemoryError("same dtype")], ids=repr)
def test_wording_of_an_error_does_not_make_it_a_dtype_error(error: Exception, dtype: torch.dtype) -> None:
    with pytest.raises(type(error)) as raised:
        CALLS["Objective"](Failing(error).to(dtype))
    assert raised.value is error


def test_dtype_error_of_a_function_around_a_network() -> None:
    """The network may be any callable; the failing layer is found inside."""
    net = Timed(nn.Linear(1, 5), 5).bfloat16()
    with pytest.raises(TypeError, match="on the dtypes of its inputs"):
        CALLS["Objective"](lambda x_t, t, condition=None: net(x_t, t))
