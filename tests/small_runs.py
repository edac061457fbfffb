"""Small runs for the tests of training: rows of tokens in memory, a tiny network, and a way to start several processes."""

import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from m2s.train import Batch, Config, NetworkConfig, OptimizerConfig, RunConfig, train
from m2s.train.config import replace
from m2s.train.log import TIMINGS


class Rows:
    """Rows held in memory, validated on themselves; `weight` [N, L] and `label` [N] where given."""

    shape = tokenizer = None

    def __init__(self, rows: Tensor, vocab: int, weight: Tensor | None = None, label: Tensor | None = None) -> None:
        self.rows, self.vocab, self.weight, self.label = rows, vocab, weight, label
        self.size = self.held_out = len(rows)
        self.length = rows.shape[1]
        self.classes = None if label is None else int(label.max()) + 1
        self.description = {"kind": "text", "length": self.length}

    def train(self, indices: Tensor) -> Batch:
        return Batch(self.rows[indices], *(None if x is None else x[indices] for x in (self.weight, self.label)))

    validation = train


def random_rows(count: int = 64, length: int = 4, vocab: int = 5) -> Rows:
    return Rows(torch.randint(vocab, (count, length), generator=torch.Generator().manual_seed(0)), vocab)


def small(out: Path, **changes: object) -> Config:
    """A run of a second. Keys of `changes` may have __ for a dot."""
    config = Config(
        run=RunConfig(out=out, steps=12, batch=8, micro_batch=4, log_every=3, validate_every=6, save_every=4, device="cpu"),
        network=NetworkConfig(kind="dit", size="tiny", width=16, depth=1, heads=2, dropout=0.1),
        optimizer=OptimizerConfig(lr=3e-3, warmup=3, ema=0.9),
    )
    for key, value in changes.items():
        config = replace(config, key.replace("__", "."), value)
    return config


def outcome(out: Path) -> dict[str, object]:
    """All that a run leaves behind, but for timings: the newest state's bytes, the published weights, and the log."""
    newest = max((out / "state").glob("step-*"))
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {
        "state": newest.name,
        "sha256": json.loads((newest / "state.json").read_text())["sha256"],
        "info": json.loads((newest / "state.json").read_text()),
        "weights": (out / "model.safetensors").read_bytes(),
        "log": [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines],
    }


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def _rank(rank: int, size: int, port: int, config: Config, source: Rows | None) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train(config, source)
    dist.destroy_process_group()


def together(size: int, config: Config, source: Rows | None) -> None:
    """The run on `size` processes, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_rank, (size, port, config, source), nprocs=size, start_method="fork")
