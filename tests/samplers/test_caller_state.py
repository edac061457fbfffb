"""Samples do not depend on the state of torch that the caller has set: autocast, inference mode, gradients, defaults."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch

import m2s
from m2s.heads import NextToken, Shifted
from m2s.models import DiT, DiTConfig
from m2s.samplers.inference_model import InferenceModel


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
}
RATES = torch.tensor(
    [[-1.0, 0.5, 0.5, 0, 0], [0.5, -1, 0, 0.5, 0], [0.5, 0, -1, 0, 0.5], [0, 0.5, 0, -1, 0.5], [0, 0, 1, 0, -1]]
)
HEADS: dict[str, Callable[[], m2s.Head]] = {
    "uniform": lambda: m2s.Posterior(m2s.Uniform(5, m2s.Linear()), offset="exact"),
    "absorbing": lambda: m2s.Posterior(m2s.Absorbing(5, m2s.LogLinear())),
    "score": lambda: m2s.LogScore(m2s.Uniform(5, m2s.Linear())),
    "rates": lambda: m2s.Posterior(m2s.RateMatrix(RATES, m2s.Linear())),
    "next token": lambda: NextToken(Shifted(5)),
}


def network(head: m2s.Head) -> DiT:
    """A network that makes full use of float32: nearly uniform probabilities of many sites."""
    torch.manual_seed(0)
    next_token = isinstance(head, NextToken)
    model = DiT(DiTConfig(head.process.states, width=32, depth=2, heads=2, time=not next_token, causal=next_token))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.nn.init.normal_(model.embedding.weight)
    torch.nn.init.zeros_(model.head.bias)
    return model


@functools.cache
def expected_samples(kind: str) -> torch.Tensor:
    return m2s.sample(network(HEADS[kind]()), HEADS[kind](), (8, 24), steps=6, seed=3)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", HEADS)
def test_samples_do_not_depend_on_the_state_of_the_caller(kind: str, state: str) -> None:
    model = network(HEADS[kind]())
    expected = expected_samples(kind)
    head = HEADS[kind]()  # without tables that the first run has cached
    with STATES[state]():
        found = m2s.sample(model, head, (8, 24), steps=6, seed=3)
    assert torch.equal(found, expected) and not found.is_inference()
    process = head.process
    if process.has_transitions:  # tables that are cached in the process can be used in training
        t = torch.full((2,), 0.5, requires_grad=True)
        m2s.Objective(model, head)(torch.zeros(2, 6, dtype=torch.long), t.detach()).mean().backward()


def test_a_prepared_network_in_bf16_is_not_changed_by_the_caller() -> None:
    head = HEADS["absorbing"]()
    model = InferenceModel(network(head), 6, bf16=True)
    expected = m2s.sample(model, head, (8, 24), steps=6, seed=3)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(m2s.sample(model, head, (8, 24), steps=6, seed=3), expected)
    assert not torch.equal(m2s.sample(model.model, head, (8, 24), steps=6, seed=3), expected)


def test_times_are_in_the_precision_of_the_parameters() -> None:
    seen = []

    class Reports(torch.nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(5, dtype=dtype))

        def forward(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            seen.append(t.dtype)
            return self.bias.expand(*x_t.shape, 5)

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        m2s.sample(Reports(dtype), HEADS["uniform"](), (1, 2), steps=1)
    assert seen == [torch.float64, torch.float32, torch.float32]
