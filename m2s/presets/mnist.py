"""The paper's MNIST run except for head and schedule: 256 levels, width-64 U-Net, AdamW 2e-4, 50 epochs (11,700 steps of 256).

The method is m2s-offset, which needs fewer steps. The paper's schedule is exponential with a horizon that it does not give.
This one is linear. For the paper's head and schedule give --method m2s --process.schedule exponential --process.horizon 5
"""

from pathlib import Path

from m2s.training.config import Config, DataConfig, NetworkConfig, OptimizerConfig, RunConfig

MNIST = Config(
    run=RunConfig(
        out=Path("runs/mnist"), steps=11_700, batch=256, validate_every=1170, save_every=1170, validation_samples=2048
    ),
    method="m2s-offset",
    network=NetworkConfig(kind="unet", size="mnist"),
    data=DataConfig(name="mnist"),
    optimizer=OptimizerConfig(lr=2e-4, warmup=500, ema=0.999),
)
