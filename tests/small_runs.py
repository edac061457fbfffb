"""Small runs for the tests of training: examples in memory, a tiny network, and a way to start several processes."""

import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from torch import Tensor

from m2s.cli import main
from m2s.training import Batch, Config, NetworkConfig, OptimizerConfig, RunConfig, loop, train
from m2s.training.config import replace
from m2s.training.log import TIMINGS

QUICK = ["--batch", "8", "--network.width", "8", "--validation-samples", "4", "--device", "cpu"]
"""Options that make `m2s train digits` take a second."""


def user_error(capsys, *arguments: str) -> str:
    """The error of a command: one line on stderr, exit code 2."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("m2s: ") and err.count("\n") == 1
    return err


class InMemorySource:
    """Examples in memory, which are also the validation examples; `weight` [N, L] and `label` [N] where given."""

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


def random_rows(count: int = 64, length: int = 4, vocab: int = 5) -> InMemorySource:
    """Uniformly random examples."""
    return InMemorySource(torch.randint(vocab, (count, length), generator=torch.Generator().manual_seed(0)), vocab)


def weighted_rows() -> InMemorySource:
    """Examples with padding and labels."""
    rows = random_rows().rows
    weight = (torch.arange(4) < 1 + torch.arange(len(rows)).unsqueeze(-1) % 4).float()
    return InMemorySource(rows, 5, weight, torch.arange(len(rows)) % 3)


def small(out: Path, **changes: object) -> Config:
    """A run that takes a second. Keys of `changes` have __ for a dot."""
    config = Config(
        run=RunConfig(out=out, steps=12, batch=8, micro_batch=4, log_every=3, validate_every=6, save_every=4, device="cpu"),
        method="m2s",
        network=NetworkConfig(kind="dit", size="tiny", width=16, depth=1, heads=2, dropout=0.1),
        optimizer=OptimizerConfig(lr=3e-3, warmup=3, ema=0.9),
    )
    for key, value in changes.items():
        config = replace(config, key.replace("__", "."), value)
    return config


class Stop(Exception):
    """Stands for the end of the process: nothing after it runs."""


def die_before(step: int, config: Config, source: InMemorySource) -> None:
    """Run until just before step `step`, and end there."""
    gradient = loop.Trainer.gradient

    def ending(trainer, batch):
        if trainer.progress.step == step:
            raise Stop
        return gradient(trainer, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "gradient", ending)
        with pytest.raises(Stop):
            train(config, source)


def outcome(out: Path) -> dict[str, object]:
    """The files of a run without timings and shards: the bits of the newest state, the checkpoint, and the log."""
    newest = max((out / "state").glob("step-" + 8 * "[0-9]"))  # without states that were set aside as damaged
    info = json.loads((newest / "state.json").read_text())
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {
        "state": newest.name,
        "tensors": {name: bits(value) for name, value in tensors(newest).items()},
        "info": {name: value for name, value in info.items() if name != "files"},
        "weights": (out / "model.safetensors").read_bytes(),
        "log": [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines],
    }


def tensors(path: Path) -> dict[str, Tensor]:
    """The full tensors of a state, put together from the shards in its files, which must fill them without overlap."""
    shards: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            offsets = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118
                shards.setdefault(name, []).append((offsets[name]["saved_offsets"], opened.get_tensor(name)))
    found = {}
    for name, parts in shards.items():
        parts.sort(key=lambda part: (part[0], len(part[1]) if part[0] else 0))
        rows = 0
        for offset, part in parts if parts[0][0] else ():
            assert offset == [rows] + [0] * (part.ndim - 1)
            rows += len(part)
        found[name] = torch.cat([part for _, part in parts]) if parts[0][0] else parts[0][1]
    return found


def bits(value: Tensor) -> tuple[torch.dtype, torch.Size, str]:
    """Dtype, shape and a hash of the bits of a tensor."""
    return value.dtype, value.shape, hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def losses(out: Path) -> list[float]:
    """The losses in a run's log."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def _rank(rank: int, size: int, port: int, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work(*arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def together(size: int, config: Config, source: InMemorySource | None) -> None:
    """Run on `size` processes, as torchrun starts them."""
    finish(launch(size, train, config, source))


def exit_codes(size: int, config: Config, source: InMemorySource | None) -> list[int | None]:
    """The exit codes of `size` processes of the run; None for one that has not ended after a minute."""
    processes = launch(size, train, config, source).processes
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def finish(running: mp.ProcessContext) -> None:
    """Wait for the processes, and raise the error of one that failed."""
    while not running.join():
        pass


def launch(size: int, work: Callable[..., object], *arguments: object) -> mp.ProcessContext:
    """Start `work` in `size` processes, with the environment that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return mp.start_processes(_rank, (size, port, work, arguments), nprocs=size, join=False, start_method="fork")


def last_line(capsys, *arguments):
    """The last line of stderr of a command that fails with exit code 2 after a progress bar."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]
