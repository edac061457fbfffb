"""Samplers never have a tensor with an entry for every site and every token of a large vocabulary."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import m2s
from m2s.ops import last_layer_chunks, use_backend, why_unavailable
from m2s.ops.backend import Backend
from m2s.ops.reverse_step.cpu import BLOCK
from m2s.samplers import SAMPLERS
from m2s.samplers import prediction as prediction_module

K, WIDTH, BATCH, LENGTH = 4099, 4, 2, 24
AT_ONCE = 4  # rows of K entries that may be in memory together
HEADS = {"posterior": m2s.Posterior, "score": m2s.LogScore, "projected": lambda process: m2s.Projected(m2s.LogScore(process))}
PROCESSES = {
    "uniform": m2s.Uniform(K, m2s.Linear()),
    "absorbing": m2s.Absorbing(K, m2s.Linear()),
}


def supports(sampler: str, process: str, head: str) -> bool:
    """Whether a sampler supports a head."""
    try:
        SAMPLERS[sampler]().check_supported(HEADS[head](PROCESSES[process]))
    except TypeError:
        return False
    return True


NAMES = ("bayes", "euler", "analytic", "tau_leaping", "predictor_corrector", "ancestral", "confidence", "remasking")
CASES = [("bayes", "uniform", "posterior", "fused"), ("euler", "uniform", "posterior", "fused")]
CASES += [("ancestral", "absorbing", "posterior", "fused")]
CASES += [
    (sampler, process, head, "reference")
    for sampler, process, head in itertools.product(NAMES, PROCESSES, HEADS)
    if supports(sampler, process, head)
]


class Largest(TorchDispatchMode):
    """The storage of the largest tensor created inside, in bytes, and the function that created it."""

    bytes, maker = 0, ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() > self.bytes:
                self.bytes, self.maker = value.untyped_storage().nbytes(), f"{function} {list(value.shape)} {value.dtype}"
        return made


def largest(sampler: str, process: str, head: str, which: Backend, monkeypatch: pytest.MonkeyPatch) -> Largest:
    """The largest tensor of a run."""
    monkeypatch.setattr(prediction_module, "CPU_CHUNK", K * AT_ONCE)
    monkeypatch.setattr(last_layer_chunks, "CHUNK", K * AT_ONCE)
    weight = torch.randn(K + 5, WIDTH, generator=torch.Generator().manual_seed(0))

    def network(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> m2s.Unprojected:
        return m2s.Unprojected(torch.ones(*x_t.shape, WIDTH), weight)

    with use_backend(which), Largest() as seen:
        tokens = m2s.sample(
            network, HEADS[head](PROCESSES[process]), (BATCH, LENGTH), steps=2, sampler=sampler, micro_batch=BATCH
        )
    assert tokens.shape == (BATCH, LENGTH) and (tokens < K).all()
    return seen


@pytest.mark.parametrize(("sampler", "process", "head", "which"), CASES)
def test_no_tensor_has_an_entry_for_every_site_and_token(
    sampler: str, process: str, head: str, which: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is a few rows in float64, padded to blocks. All 48 sites of this run would need eleven times as much."""
    if which == "fused" and (why := why_unavailable(torch.device("cpu"))):
        pytest.skip(why)
    seen = largest(sampler, process, head, which, monkeypatch)
    assert seen.bytes <= AT_ONCE * (K + BLOCK) * 8, seen.maker
