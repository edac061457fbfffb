"""Characters of text8 at length 256, as D3PM, SEDD and MD4 report them."""

from pathlib import Path

from m2s.training.config import Config, DataConfig, NetworkConfig, OptimizerConfig, RunConfig

TEXT8 = Config(
    run=RunConfig(
        out=Path("runs/text8"), steps=1_000_000, batch=512, validate_every=5000, save_every=5000, validation_samples=1024
    ),
    method="m2s-offset",
    network=NetworkConfig(kind="dit", size="small"),
    data=DataConfig(name="text", folder="$M2S_DATA/text8", length=256),
    optimizer=OptimizerConfig(lr=3e-4, warmup=2500, weight_decay=0.0, ema=0.9999),
)
