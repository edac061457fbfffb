"""The bf16 copies of the weights are always the rounded weights."""

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


def rounded(copies: BF16Weights) -> bool:
    return all(torch.equal(value, weight.detach().bfloat16()) for weight, value in copies.weights.items())


def test_every_change_by_torch_is_copied():
    model = DiT(DiTConfig(8, width=16, depth=2, heads=2))
    copies, optimizer = BF16Weights(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    assert len(copies.weights) == 2 * 4  # joint product, output, and the two layers of the MLP
    average = EMA(model, 0.9)
    copies.refresh()
    assert rounded(copies)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert not rounded(copies)
    copies.refresh()
    assert rounded(copies)
    with average.applied():
        copies.refresh()
        assert rounded(copies)
    assert not rounded(copies)
    copies.refresh()
    assert rounded(copies)
    other = DiT(model.config)
    model.load_state_dict(other.state_dict())
    copies.refresh()
    assert rounded(copies)
    model.blocks[0].mlp[0].weight.data = torch.randn_like(model.blocks[0].mlp[0].weight)
    copies.refresh()
    assert rounded(copies)


def test_copies_of_a_network_have_no_bf16_weights():
    """Nothing would update them when the copy is trained."""
    model = DiT(DiTConfig(8, width=16, depth=1, heads=2))
    copies = BF16Weights(model)
    assert rounded(copies)  # from the start
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(layer.narrow is None for layer in copied.modules() if isinstance(layer, Dense))
    assert all(layer.narrow is not None for layer in copies.layers)


def test_layers_with_a_common_weight():
    model = DiT(DiTConfig(8, width=16, depth=2, heads=2))
    model.blocks[1].mlp[0].weight = model.blocks[0].mlp[0].weight
    copies = BF16Weights(model)
    assert len(copies.weights) == 7 and model.blocks[1].mlp[0].narrow is model.blocks[0].mlp[0].narrow
    model.blocks[0].mlp[2].weight = nn.Parameter(torch.randn_like(model.blocks[0].mlp[2].weight))
    copies.refresh()
    assert all(torch.equal(layer.narrow, layer.weight.detach().bfloat16()) for layer in copies.layers)


def test_unchanged_weights_are_not_copied():
    model = DiT(DiTConfig(8, width=16, depth=1, heads=2))
    copies = BF16Weights(model)
    copies.refresh()
    value = next(iter(copies.weights.values())).zero_()
    copies.refresh()
    assert not value.any()


def test_a_network_without_dense_layers():
    copies = BF16Weights(nn.Linear(3, 3))
    copies.refresh()
    assert copies.weights == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has them")
@pytest.mark.parametrize("micro_batch", [8, 4])
def test_the_optimizers_kernel_writes_them(tmp_path, micro_batch):
    """In recorded and replayed steps, and after the averaged weights were applied."""
    source = random_rows(length=8)
    config = resolve(replace(small(tmp_path, micro_batch=micro_batch, compile="no"), "device", "cuda"))
    world = World.start("cuda")
    trainer = Trainer(config, source, world, *make_objects(config, source))
    copies, batch = trainer.bf16_weights, trainer.share(0)
    assert copies is not None and len(copies.weights) == 4
    seen = []
    for step in range(8):
        batch = training_step(trainer, batch, Stopper()).following
        torch.cuda.synchronize()
        assert rounded(copies), step
        seen.append(copies.seen)
        if step == 5:
            with trainer.average.applied():
                pass
    assert (
        all(one == seen[0] for one in seen[:6]) and seen[6] != seen[5] and seen[7] == seen[6]
    )  # otherwise the kernel wrote them
