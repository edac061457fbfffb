"""Train on digits with the Trainer of transformers: a module whose forward returns the loss, and a data collator.

    python examples/transformers_trainer.py --steps 1000 --out runs/trainer
    torchrun --nproc-per-node 2 examples/transformers_trainer.py --bf16 --accumulate 2 --out runs/trainer
    m2s sample runs/trainer --labels 0 1 2 3 4 5 6 7 8 9 --n 20 --out trainer.png

It needs `pip install transformers accelerate`. Comments on what is not about Trainer are in pytorch_loop.py.
"""

import math
from typing import Any

import torch
import tyro
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from transformers import Trainer, TrainerCallback, TrainingArguments

import m2s
from m2s.models import DiT, DiTConfig
from m2s.rng import derived_seed


def collate(examples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the arguments of `Diffusion.forward`. As in transformers, padding is -100 in `labels`."""
    batch = m2s.data.collate(examples)
    return {"labels": batch.x_0.masked_fill(batch.weight == 0, -100), "condition": batch.label}


class Diffusion(torch.nn.Module):
    """A network that returns its loss: nats per example, and the NELBO in evaluation mode."""

    def __init__(self, model: DiT, head: m2s.Head, noise: torch.Generator) -> None:
        super().__init__()
        self.model, self.head, self.objective = model, head, m2s.Objective(model, head, generator=noise)

    def forward(self, labels: torch.Tensor, condition: torch.Tensor) -> dict[str, torch.Tensor]:
        # Trainer divides the loss by the number of micro-batches, which is right for a mean over examples. To a forward with
        # **kwargs it would pass num_items_in_batch, the tokens of all micro-batches, by which a mean over tokens is divided.
        x_0, weight = labels.clamp(min=0), (labels != -100).float()
        if self.training:
            return {"loss": self.objective(x_0, weight=weight, condition=condition).sum(1).mean()}
        return {"loss": m2s.elbo(self.model, self.head, x_0, passes=4, weight=weight, condition=condition).nats.mean()}


class Average(TrainerCallback):
    """Update the averaged weights after each training step."""

    def __init__(self, model: DiT) -> None:
        self.model, self.average = model, AveragedModel(model, avg_fn=get_ema_avg_fn(0.98))

    def on_step_end(self, *arguments: Any, **states: Any) -> None:
        self.average.update_parameters(self.model)


def main(
    out: str = "runs/trainer", steps: int = 1000, batch_size: int = 64, accumulate: int = 1, bf16: bool = False, seed: int = 0
) -> None:
    """Train, evaluate the NELBO, draw samples and save a checkpoint.

    Args:
        out: The folder of the checkpoint.
        steps: Training steps.
        batch_size: Examples of a micro-batch of one process.
        accumulate: Micro-batches of a training step.
        bf16: Run the network in bf16. Weights and loss stay float32.
        seed: The seed of weights, order, times and noise.
    """
    settings = TrainingArguments(
        output_dir=f"{out}/trainer",  # Trainer's own checkpoints, which have a model.safetensors too
        save_strategy="no",
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        dataloader_drop_last=True,
        gradient_accumulation_steps=accumulate,
        bf16=bf16,
        use_cpu=not torch.accelerator.is_available(),  # without this, processes on CPUs do not form a group
        ddp_find_unused_parameters=False,
        optim="adamw_torch",
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        seed=seed,
        remove_unused_columns=False,  # collate may read columns that are no arguments of forward
        logging_steps=50,
        report_to="none",
    )
    torch.manual_seed(seed)
    images = m2s.data.load("digits")
    examples = list(zip(images.train, images.train_labels, strict=True))
    held_out = list(zip(images.test, images.test_labels, strict=True))
    head = m2s.Posterior(m2s.Uniform(images.vocab, m2s.Linear()), offset="exact")
    model = DiT(DiTConfig(head.process.states, width=64, depth=2, heads=4, classes=10, padding=True)).to(settings.device)
    # Each process draws its own times and noise: Trainer gives all of them the same random state.
    noise = torch.Generator(settings.device).manual_seed(derived_seed(seed, "noise", settings.process_index))
    average = Average(model)
    trainer = Trainer(Diffusion(model, head, noise), settings, collate, examples, held_out, callbacks=[average])
    trainer.train()
    model.load_state_dict(average.average.module.state_dict())
    bits = trainer.evaluate()["eval_loss"] / math.prod(images.shape) / math.log(2)
    if trainer.is_world_process_zero():
        print(f"NELBO of the test images: {bits:.2f} bits per pixel")
        m2s.save(out, model, head, data=images.description, extra={"step": steps, "seed": seed})
        samples = m2s.load(out).sample(10, steps=64, condition=torch.arange(10), guidance=1.5, seed=seed)
        print(samples[3].reshape(images.shape))  # a sample of the digit 3


if __name__ == "__main__":
    tyro.cli(main)
