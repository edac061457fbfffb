"""Training a U-Net from a CUDA graph: validation with averaged weights between replays changes nothing.

Without a GPU a substitute takes the place of a graph (`fake_graph.py`). It checks that weights and gradients keep their
addresses.
"""

from pathlib import Path

import pytest
import torch
from fake_graph import FakeGraph

from m2s.distributed import World
from m2s.training import cuda_graph, resolve
from m2s.training.build import make_objects
from m2s.training.cuda_graph import CUDAGraphRunner, DirectBackward, GraphedBackward
from m2s.training.loop import Stopper, finish_step
from m2s.training.trainer import Trainer
from m2s.training.validate import validate
from small_runs import InMemorySource, small

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 7


def trainer_of(out: Path, **changes: object) -> Trainer:
    """A trainer of a small U-Net with labels, dropout and label dropout."""
    labels = torch.arange(64) % 3
    source = InMemorySource(torch.randint(5, (64, 16), generator=torch.Generator().manual_seed(0)), 5, label=labels)
    source.shape = (4, 4)
    fixed = {"network__kind": "unet", "network__depth": None, "network__heads": None, "network__multipliers": (1, 2)}
    fixed |= {"network__width": 8, "network__dropout": 0.1, "network__labels": True, "device": DEVICE, "compile": "no"}
    config = resolve(small(out, steps=STEPS, batch=4, precision="float32", **{**fixed, **changes}))
    return Trainer(config, source, World.start(DEVICE), *make_objects(config, source))


@pytest.mark.parametrize(("method", "micro_batch"), [("m2s-offset", 4), ("m2s-offset", 2), ("d3pm-gaussian", 4)])
def test_validation_and_averaging_between_replays(tmp_path, monkeypatch, method: str, micro_batch: int) -> None:
    """The losses, the validations and the averages are those of direct steps; the graph is recorded once."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graph, "CUDAGraphRunner", FakeGraph)
    changes = {"process__chain_steps": 20} if method == "d3pm-gaussian" else {}
    losses, validations, averages = [], [], []
    for replays in (False, True):
        trainer = trainer_of(tmp_path, method=method, micro_batch=micro_batch, **changes)
        graphed = GraphedBackward(trainer.backward, counts_masked=False, curriculum=False)
        trainer.backward_pass = graphed if replays else DirectBackward(trainer.backward)
        batch, found, validated = trainer.local_batch(0), [], []
        while batch is not None:
            made = finish_step(trainer, *trainer.gradient(batch), Stopper())
            batch = made.next_batch
            found.append(made.loss)
            if trainer.progress.step % 2 == 0:  # before, at and after the recording
                with trainer.average.applied():
                    validated.append(validate(trainer)["validation_bits"])
                assert trainer.model.training
        losses.append(found)
        validations.append(validated)
        averages.append(torch.cat([value.flatten() for value in trainer.average.values.values()]))
        trainer.close()
    assert isinstance(graphed.plain, FakeGraph if DEVICE == "cpu" else CUDAGraphRunner) and graphed.plain.recorded
    exact = DEVICE == "cpu"
    assert losses[1] == (losses[0] if exact else pytest.approx(losses[0], rel=1e-4))
    assert validations[1] == (validations[0] if exact else pytest.approx(validations[0], rel=1e-4))
    torch.testing.assert_close(averages[1], averages[0], rtol=0, atol=0 if exact else 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs are for a GPU")
def test_a_unet_on_a_gpu_uses_the_graph(tmp_path) -> None:
    with trainer_of(tmp_path, method="m2s-offset") as trainer:
        assert isinstance(trainer.backward_pass, GraphedBackward)
