"""Train on digits with accelerate: several processes, gradient accumulation, bf16.

    python examples/accelerate_loop.py --steps 1000 --out runs/accel
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --bf16 --accumulate 2 --out runs/accel
    m2s sample runs/accel --labels 0 1 2 3 4 5 6 7 8 9 --n 20 --out accelerate.png

It needs `pip install accelerate`. `accelerate launch` works too. A training step has processes x accumulate x batch_size
examples. Comments on what is not about accelerate are in pytorch_loop.py.
"""

import itertools
import math

import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader

import m2s
from m2s.models import DiT, DiTConfig
from m2s.rng import derived_seed


def main(
    out: str = "runs/accel", steps: int = 1000, batch_size: int = 64, accumulate: int = 1, bf16: bool = False, seed: int = 0
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
    # By default accelerate makes a training step at the end of each epoch, also of fewer micro-batches: too small a gradient.
    accumulation = GradientAccumulationPlugin(num_steps=accumulate, sync_with_dataloader=False)
    accelerator = Accelerator(
        mixed_precision="bf16" if bf16 else "no",
        gradient_accumulation_plugin=accumulation,
        cpu=not torch.accelerator.is_available(),  # without this, processes on CPUs do not form a group
    )
    torch.manual_seed(seed)  # the same initial weights in every process

    images = m2s.data.load("digits")
    examples = list(zip(images.train, images.train_labels, strict=True))
    shuffle = torch.Generator().manual_seed(seed)  # the same order in every process, of which accelerate gives each a part
    loader = DataLoader(examples, batch_size, shuffle=True, drop_last=True, collate_fn=m2s.data.collate, generator=shuffle)

    head = m2s.Posterior(m2s.Uniform(images.vocab, m2s.Linear()), offset="exact")
    model = DiT(DiTConfig(head.process.states, width=64, depth=2, heads=4, classes=10, padding=True)).to(accelerator.device)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.98))
    # Each process draws its own times and noise, from a generator that nothing else uses.
    noise = torch.Generator(accelerator.device).manual_seed(derived_seed(seed, "noise", accelerator.process_index))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    # Prepare the objective, which calls the network, and not the network: DDP averages gradients of calls that it sees.
    objective, optimizer, loader = accelerator.prepare(m2s.Objective(model, head, generator=noise), optimizer, loader)

    batches = (batch for _ in itertools.count() for batch in loader)
    for step in range(1, steps + 1):
        for _ in range(accumulate):
            batch = next(batches)
            with accelerator.accumulate(objective):
                loss = objective(batch.x_0, weight=batch.weight, condition=batch.label).sum(1).mean()
                accelerator.backward(loss)  # divides by --accumulate
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(objective.parameters(), 1.0)
                optimizer.step()  # does nothing before the last micro-batch
                optimizer.zero_grad()
        average.update_parameters(model)
        if step % 50 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.2f} nats per example")

    if accelerator.is_main_process:
        m2s.save(out, average.module, head, data=images.description, extra={"step": steps, "seed": seed})
        checkpoint = m2s.load(out, accelerator.device)
        nelbo = checkpoint.evaluate(images.test, labels=images.test_labels, seed=seed)
        mean, error = (nats / math.prod(images.shape) / math.log(2) for nats in nelbo.mean())
        print(f"NELBO of the test images: {mean:.2f} ± {error:.2f} bits per pixel")
        condition = torch.arange(10, device=accelerator.device)
        samples = checkpoint.sample(10, steps=64, condition=condition, guidance=1.5, seed=seed)
        print(samples[3].reshape(images.shape))  # a sample of the digit 3
    accelerator.end_training()


if __name__ == "__main__":
    tyro.cli(main)
