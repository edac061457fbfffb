"""A recipe for text that learns in minutes: the network and data of `owt`, Muon, and more small times.

The learning rate and the density of times are the best of those in RESULTS.md, "learning rates and options".
"""

from dataclasses import replace
from pathlib import Path

from m2s.presets.owt import OWT

OWT_FAST = replace(
    OWT,
    run=replace(
        OWT.run, out=Path("runs/owt-fast"), steps=16_000, batch=64, importance=0.1, validate_every=1000, save_every=1000
    ),
    network=replace(OWT.network, gates="one", embedding_std=1.0),
    optimizer=replace(OWT.optimizer, kind="muon", lr=3e-3, beta2=0.95, warmup=200, ema=0.999),
)
