"""The paper's OpenWebText run: DiT 12 x 768 x 12, GPT-2's tokens, length 512, batch 1584, AdamW 5e-4, 161,800 steps.

The method is m2s-offset, which needs fewer steps. For the paper's head give --method m2s
"""

from pathlib import Path

from m2s.training.config import Config, DataConfig, NetworkConfig, OptimizerConfig, RunConfig

OWT = Config(
    run=RunConfig(
        out=Path("runs/owt"), steps=161_800, batch=1584, validate_every=2000, save_every=2000, validation_samples=1024
    ),
    method="m2s-offset",
    network=NetworkConfig(kind="dit", size="small"),
    data=DataConfig(name="text", folder="$M2S_DATA/openwebtext", length=512),
    optimizer=OptimizerConfig(lr=5e-4, warmup=3200, ema=0.9999),
)
