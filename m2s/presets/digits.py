"""8 x 8 digits on two CPU cores."""

from pathlib import Path

from m2s.training.config import Config, DataConfig, NetworkConfig, OptimizerConfig, RunConfig

DIGITS = Config(
    run=RunConfig(
        out=Path("runs/digits"),
        steps=1000,
        batch=64,
        importance=0.1,
        validate_every=250,
        validation_passes=2,
        save_every=250,
    ),
    method="m2s-offset",
    network=NetworkConfig(kind="unet", size="tiny"),
    data=DataConfig(name="digits"),
    optimizer=OptimizerConfig(lr=2e-3, warmup=50, ema=0.995),
)
