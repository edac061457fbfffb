"""Weights kept in bf16 beside those in float32 are always those, rounded."""

import copy
import pickle

import pytest
import torch
from torch import nn

from m2s.distributed import World
from m2s.models import DiT, DiTConfig
from m2s.models.dit import Dense
from m2s.training import resolve
from m2s.training.bf16_weights import BF16Weights
from m2s.training.build import make_objects
from m2s.training.config import replace
from m2s.training.ema import EMA
from m2s.training.loop import Stopper, training_step
from m2s.training.trainer import Trainer
from small_runs import random_rows, small


def rounded(narrow: BF16Weights) -> bool:
    return all(torch.equal(value, weight.detach().bfloat16()) for weight, value in narrow.weights.items())


def test_whatever_torch_does_to_a_weight_is_seen():
    model = DiT(DiTConfig(8, width=16, depth=2, heads=2))
    narrow, optimizer = BF16Weights(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    assert len(narrow.weights) == 2 * 4  # joint product, output, and the two layers of the MLP
    average = EMA(model, 0.9)
    narrow.refresh()
    assert rounded(narrow)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert not rounded(narrow)
    narrow.refresh()
    assert rounded(narrow)
    with average.applied():
        narrow.refresh()
        assert rounded(narrow)
    assert not rounded(narrow)
    narrow.refresh()
    assert rounded(narrow)
    other = DiT(model.config)
    model.load_state_dict(other.state_dict())
    narrow.refresh()
    assert rounded(narrow)
    model.blocks[0].mlp[0].weight.data = torch.randn_like(model.blocks[0].mlp[0].weight)
    narrow.refresh()
    assert rounded(narrow)


def test_copies_have_none():
    """Nobody would keep it: a copy that is trained would see no change."""
    model = DiT(DiTConfig(8, width=16, depth=1, heads=2))
    narrow = BF16Weights(model)
    assert rounded(narrow)  # from the start
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(layer.narrow is None for layer in copied.modules() if isinstance(layer, Dense))
    assert all(layer.narrow is not None for layer in narrow.layers)


def test_layers_that_share_a_weight():
    model = DiT(DiTConfig(8, width=16, depth=2, heads=2))
    model.blocks[1].mlp[0].weight = model.blocks[0].mlp[0].weight
    narrow = BF16Weights(model)
    assert len(narrow.weights) == 7 and model.blocks[1].mlp[0].narrow is model.blocks[0].mlp[0].narrow
    model.blocks[0].mlp[2].weight = nn.Parameter(torch.randn_like(model.blocks[0].mlp[2].weight))
    narrow.refresh()
    assert all(torch.equal(layer.narrow, layer.weight.detach().bfloat16()) for layer in narrow.layers)


def test_nothing_is_done_where_nothing_has_changed():
    model = DiT(DiTConfig(8, width=16, depth=1, heads=2))
    narrow = BF16Weights(model)
    narrow.refresh()
    value = next(iter(narrow.weights.values())).zero_()
    narrow.refresh()
    assert not value.any()


def test_a_network_of_other_layers():
    narrow = BF16Weights(nn.Linear(3, 3))
    narrow.refresh()
    assert narrow.weights == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="they are kept on a GPU")
@pytest.mark.parametrize("micro_batch", [8, 4])
def test_the_kernel_keeps_them(tmp_path, micro_batch):
    """Over updates that are recorded and replayed, and after the average was in their place."""
    source = random_rows(length=8)
    config = resolve(replace(small(tmp_path, micro_batch=micro_batch, compile="no"), "device", "cuda"))
    world = World.start("cuda")
    learner = Trainer(config, source, world, *make_objects(config, source))
    narrow, share = learner.narrow, learner.share(0)
    assert narrow is not None and len(narrow.weights) == 4
    seen = []
    for step in range(8):
        share = training_step(learner, share, Stopper()).following
        torch.cuda.synchronize()
        assert rounded(narrow), step
        seen.append(narrow.seen)
        if step == 5:
            with learner.average.applied():
                pass
    assert all(one == seen[0] for one in seen[:6]) and seen[6] != seen[5] and seen[7] == seen[6]  # else the kernel's
