"""Train on digits in a plain PyTorch loop, evaluate the NELBO, draw samples and save a checkpoint.

    python examples/pytorch_loop.py --steps 1000 --out runs/loop
    m2s sample runs/loop --labels 0 1 2 3 4 5 6 7 8 9 --n 20 --out loop.png

For several processes see accelerate_loop.py, or run `m2s train`.
"""

import itertools
import math

import torch
import tyro
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader

import m2s
from m2s.models import DiT, DiTConfig
from m2s.rng import derived_seed


def main(
    out: str = "runs/loop", steps: int = 1000, batch_size: int = 64, accumulate: int = 1, bf16: bool = False, seed: int = 0
) -> None:
    """Train, evaluate the NELBO, draw samples and save a checkpoint.

    Args:
        out: The folder of the checkpoint.
        steps: Training steps.
        batch_size: Examples of a micro-batch.
        accumulate: Micro-batches of a training step.
        bf16: Run the network in bf16. Weights and loss stay float32.
        seed: The seed of weights, order, times and noise.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)  # initial weights and dropout

    images = m2s.data.load("digits")  # yours: sequences of integers, of equal or different lengths, with or without labels
    examples = list(zip(images.train, images.train_labels, strict=True))
    shuffle = torch.Generator().manual_seed(seed)
    # A batch has x_0 [B, L], padded where lengths differ, weight [B, L], which is 0 at padding, and label [B].
    loader = DataLoader(examples, batch_size, shuffle=True, drop_last=True, collate_fn=m2s.data.collate, generator=shuffle)

    head = m2s.Posterior(m2s.Uniform(images.vocab, m2s.Linear()), offset="exact")
    # padding=True is needed only where lengths differ. In training the network drops a tenth of the labels, for guidance.
    model = DiT(DiTConfig(head.process.states, width=64, depth=2, heads=4, classes=10, padding=True)).to(device)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.98))  # for a long run 0.999 or 0.9999
    noise = torch.Generator(device).manual_seed(derived_seed(seed, "noise", 0))  # of times and corruption
    objective = m2s.Objective(model, head, generator=noise)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)

    batches = (batch.to(device) for _ in itertools.count() for batch in loader)
    for step in range(1, steps + 1):
        for _ in range(accumulate):
            batch = next(batches)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                terms = objective(batch.x_0, weight=batch.weight, condition=batch.label)  # nats of each position, 0 at padding
            # The loss of an example is a sum over its positions, and that of a batch a mean over its examples. So micro-batches
            # count equally, whatever their padding, and no number of tokens is needed.
            loss = terms.sum(1).mean()
            (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f} nats per example")

    m2s.save(out, average.module, head, data=images.description, extra={"step": steps, "seed": seed})
    checkpoint = m2s.load(out, device)  # in evaluation mode
    nelbo = checkpoint.evaluate(images.test, labels=images.test_labels, seed=seed)
    mean, error = (nats / math.prod(images.shape) / math.log(2) for nats in nelbo.mean())
    print(f"NELBO of the test images: {mean:.2f} ± {error:.2f} bits per pixel")
    samples = checkpoint.sample(10, steps=64, condition=torch.arange(10, device=device), guidance=1.5, seed=seed)
    print(samples[3].reshape(images.shape))  # a sample of the digit 3


if __name__ == "__main__":
    tyro.cli(main)
