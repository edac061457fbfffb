"""The rows of a call follow from the length alone, and sample i is the same whatever the number of samples."""

import math

import pytest
import torch
from torch import Tensor

import m2s
from m2s.models import DiT, DiTConfig
from m2s.samplers import SamplingOptions, default_micro_batch

pytestmark = pytest.mark.usefixtures("default_rows")

HEAD = m2s.Posterior(m2s.Uniform(7, m2s.Linear()))


def network(length: int) -> DiT:
    torch.manual_seed(1)
    model = DiT(DiTConfig(states=7, width=16, depth=1, heads=2, condition_width=8, length=length))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def test_rule() -> None:
    for length in range(1, 3000):
        rows = default_micro_batch(length)
        power = math.floor(math.log2(8192 / length)) if length <= 8192 else 0
        assert rows == min(1024, max(16, 2**power)), length
    assert default_micro_batch(10**9) == 16


@pytest.mark.parametrize("length", [2, 12, 300])
def test_sample_i_is_the_same_for_1_5_and_1024_samples(length: int) -> None:
    """Bit for bit, also from the middle, and in smaller parts."""
    model, most = network(length), 1024 if length < 100 else 40
    full = m2s.sample(model, HEAD, (most, length), steps=2, seed=3)
    for count in (1, 5):
        assert torch.equal(m2s.sample(model, HEAD, (count, length), steps=2, seed=3), full[:count])
    assert torch.equal(m2s.sample(model, HEAD, (2, length), steps=2, seed=3, start=most - 2), full[-2:])
    assert len(full.unique(dim=0)) > 1


@pytest.mark.parametrize(("length", "window", "rows"), [(3, None, 1024), (100, None, 64), (100, 12, 512), (12, 100, 512)])
def test_every_call_has_the_same_number_of_rows(length: int, window: int | None, rows: int) -> None:
    """A window counts in place of the sequence, because the network sees no more than that."""
    seen = set()

    def watched(x_t: Tensor, t: Tensor) -> Tensor:
        seen.add(len(x_t))
        return torch.zeros(*x_t.shape, 7)

    m2s.sample(watched, HEAD, (3, length), steps=2, window=window)
    m2s.sample(watched, HEAD, (rows + 1, length), steps=1, window=window)
    assert seen == {rows}
    seen.clear()
    m2s.sample(watched, HEAD, (3, length), steps=2, window=window, micro_batch=5)
    assert seen == {5}


def test_options_say_the_number() -> None:
    assert SamplingOptions(HEAD, (3, 64)).call_rows == 128
    assert SamplingOptions(HEAD, (3, 64), micro_batch=9).call_rows == 9
