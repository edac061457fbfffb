"""The paper's CIFAR-10 run: MD4's U-Net (28,427,520 parameters), AdamW 4e-4, weight decay 0.01, 125,000 steps of 4096.

The method is m2s-offset, which needs fewer steps. For the paper's head give --method m2s
"""

from pathlib import Path

from m2s.training.config import Config, DataConfig, NetworkConfig, OptimizerConfig, RunConfig

CIFAR10 = Config(
    run=RunConfig(
        out=Path("runs/cifar10"), steps=125_000, batch=4096, validate_every=2500, save_every=2500, validation_samples=1024
    ),
    method="m2s-offset",
    network=NetworkConfig(kind="unet", size="md4"),
    data=DataConfig(name="cifar10"),
    optimizer=OptimizerConfig(lr=4e-4, warmup=1000, weight_decay=0.01, ema=0.9999),
)
