"""Train on digits with Lightning: a LightningModule around m2s.Objective.

    python examples/lightning_module.py --steps 1000 --out runs/lightning
    python examples/lightning_module.py --devices 2 --bf16 --accumulate 2 --out runs/lightning
    m2s sample runs/lightning --labels 0 1 2 3 4 5 6 7 8 9 --n 20 --out lightning.png

It needs `pip install pytorch-lightning`. Comments on what is not about Lightning are in pytorch_loop.py.
"""

import math

import pytorch_lightning as pl
import torch
import tyro
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

import m2s
from m2s.data import Batch
from m2s.models import DiT, DiTConfig
from m2s.rng import derived_seed


class Diffusion(pl.LightningModule):
    """A network that is trained by its loss and validated by the NELBO."""

    def __init__(self, model: DiT, head: m2s.Head, seed: int) -> None:
        super().__init__()
        self.model, self.head, self.seed, self.objective = model, head, seed, m2s.Objective(model, head)

    def on_fit_start(self) -> None:
        """Let each process draw its own times and noise: `seed_everything` gives all of them the same random state."""
        seed = derived_seed(self.seed, "noise", self.global_rank)
        self.objective.generator = torch.Generator(self.device).manual_seed(seed)

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        """Return nats per example. Lightning divides them by the number of micro-batches, and averages over processes."""
        loss = self.objective(batch.x_0, weight=batch.weight, condition=batch.label).sum(1).mean()
        self.log("loss", loss, batch_size=len(batch.x_0), prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Log the NELBO of the averaged weights."""
        nelbo = m2s.elbo(self.model, self.head, batch.x_0, passes=4, weight=batch.weight, condition=batch.label)
        tokens = nelbo.sites.sum()
        self.log("bits per pixel", nelbo.nats.sum() / tokens / math.log(2), batch_size=int(tokens), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0)


def main(
    out: str = "runs/lightning",
    steps: int = 1000,
    batch_size: int = 64,
    accumulate: int = 1,
    devices: int = 1,
    bf16: bool = False,
    seed: int = 0,
) -> None:
    """Train, evaluate the NELBO, draw samples and save a checkpoint.

    Args:
        out: The folder of the checkpoint.
        steps: Training steps.
        batch_size: Examples of a micro-batch of one process.
        accumulate: Micro-batches of a training step.
        devices: The number of processes.
        bf16: Run the network in bf16. Weights and loss stay float32.
        seed: The seed of weights, order, times and noise.
    """
    pl.seed_everything(seed)

    images = m2s.data.load("digits")
    examples = list(zip(images.train, images.train_labels, strict=True))
    held_out = list(zip(images.test, images.test_labels, strict=True))
    shuffle = torch.Generator().manual_seed(seed)
    loader = DataLoader(examples, batch_size, shuffle=True, drop_last=True, collate_fn=m2s.data.collate, generator=shuffle)
    head = m2s.Posterior(m2s.Uniform(images.vocab, m2s.Linear()), offset="exact")
    model = DiT(DiTConfig(head.process.states, width=64, depth=2, heads=4, classes=10, padding=True))
    module = Diffusion(model, head, seed)

    trainer = pl.Trainer(
        devices=devices,
        precision="bf16-mixed" if bf16 else "32-true",
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        # Lightning makes a training step at the end of each epoch, also of fewer micro-batches: too small a gradient.
        limit_train_batches=len(loader) // devices // accumulate * accumulate,
        gradient_clip_val=1.0,
        callbacks=[EMAWeightAveraging(decay=0.98)],  # on the CPU unless device="cuda" is given
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader)  # afterwards the module has the averaged weights
    trainer.validate(module, DataLoader(held_out, 64, collate_fn=m2s.data.collate))
    if trainer.is_global_zero:
        m2s.save(out, model, head, data=images.description, extra={"step": steps, "seed": seed})
        samples = m2s.load(out).sample(10, steps=64, condition=torch.arange(10), guidance=1.5, seed=seed)
        print(samples[3].reshape(images.shape))  # a sample of the digit 3


if __name__ == "__main__":
    tyro.cli(main)
