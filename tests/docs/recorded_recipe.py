"""Run a recipe on a few digits of unequal lengths, and record the batches of every training step.

    python tests/docs/recorded_recipe.py examples/pytorch_loop.py RECORD --steps 4 --out FOLDER

Each process writes RECORD/RANK.pt: a list of training steps, each a list of batches (tokens, weight, label).
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import tyro

import m2s

COUNT = 88  # an epoch is 11 micro-batches of 8, or 5 in each of two processes: an odd number
digits = m2s.data.load("digits")


def cut_digits(name: str = "digits") -> SimpleNamespace:
    """The first digits, of 40 to 64 pixels, and a few complete ones as test images: an `ImageDataset` but for the lengths."""
    train = [image[: 40 + 7 * number % 25] for number, image in enumerate(digits.train[:COUNT])]
    parts = {"train": train, "train_labels": digits.train_labels[:COUNT]}
    parts |= {"test": digits.test[:16], "test_labels": digits.test_labels[:16]}
    return SimpleNamespace(**parts, shape=digits.shape, vocab=digits.vocab, description=digits.description)


def main(recipe: Path, record: Path, flags: list[str]) -> None:
    """Run the recipe with these flags. No label is dropped, so that only times and noise are random."""
    steps: list[Any] = []
    batches: list[Any] = []
    objective, optimizer_step = m2s.Objective.forward, torch.optim.AdamW.step

    def forward(self: m2s.Objective, x_0: torch.Tensor, t: None = None, **given: torch.Tensor) -> torch.Tensor:
        assert t is None
        batches.append((x_0, given["weight"], given["condition"]))
        return objective(self, x_0, **given)

    def step(self: torch.optim.AdamW, *given: Any, **named: Any) -> Any:
        found = optimizer_step(self, *given, **named)  # Lightning calls the network in here
        steps.append(batches.copy())
        batches.clear()
        return found

    m2s.data.load = cut_digits
    draw = m2s.Checkpoint.sample
    m2s.Checkpoint.sample = lambda self, count, steps, **given: draw(
        self, count, steps=2, **given
    )  # only the training is compared
    m2s.models.DiTConfig = functools.partial(m2s.models.DiTConfig, label_dropout=0.0)
    m2s.Objective.forward, torch.optim.AdamW.step = forward, step
    spec = importlib.util.spec_from_file_location("recipe", recipe)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tyro.cli(module.main, args=flags)
    assert not batches, "some batches had no effect"
    record.mkdir(parents=True, exist_ok=True)
    torch.save(steps, record / f"{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
