"""A row of a text experiment: its configuration, the number of steps of its budget, and the measured row."""

import dataclasses
import gc
import math
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text_entries import Entry
from text_results import read
from text_speed import logged_seconds, loss_records, read_records, speed, speed_of_halves

import m2s
from m2s.data import Tokens
from m2s.distributed import World
from m2s.evaluation.bpd import Shard, dataset_nelbo, example_sizes, summarize
from m2s.io import output_folder, write_json
from m2s.presets import PRESETS
from m2s.provenance import provenance
from m2s.training import Config, train
from m2s.training.config import replace

TERMS = {"nats": "bits", "integral": "integral", "prior": "prior", "reconstruction": "reconstruction"}
BATCH_SIZE = 32  # windows per network call in the final NELBO
PROBE = {"steps": 80, "log_every": 4, "validate_every": 0, "validation_samples": 16, "save_every": 80}
STATES = 4  # that a row with a budget saves, evenly spaced, so that its network can be audited at earlier steps


@dataclass(frozen=True)
class Experiment:
    """Everything that the rows of an entry have in common, and the methods that compute a row.

    Args:
        out: Folder of the rows.
        data: Folder of the prepared text.
        entry: The table.
        settings: Options of `m2s train PRESET` that all rows have in common.
        described: Description of the data, from `describe`.
        device: Device of all computations.
        speeds: Tokens per second that earlier tables measured, by method and optimizer.
    """

    out: Path
    data: Path
    entry: Entry
    settings: dict[str, Any]
    described: dict[str, Any]
    device: torch.device
    speeds: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    @property
    def held_out(self) -> Shard:
        """The held-out windows."""
        windows = Tokens(self.data, "validation", self.settings["data.length"])
        return Shard(windows, self.described["validation_windows"])

    def config(self, name: str, options: dict[str, Any]) -> Config:
        """Return the training configuration of a row."""
        windows = self.described["validation_windows"]
        settings = {"keep": 1, "validation_samples": windows, **self.settings, "out": self.out / "runs" / name, **options}
        settings |= {"data.folder": str(self.data), "device": str(self.device)}
        settings["validation_samples"] = min(settings["validation_samples"], windows)
        config = PRESETS[self.entry.preset]
        for key, value in settings.items():
            config = replace(config, key, value)
        return config

    def budget(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Turn the seconds of a row into steps. A file keeps the result, so that the row resumes with the same steps.

        The rate is that of earlier tables (`--speeds`). For other rows it is the median of each half of a short run, for DUO's
        first half is slower. The number of steps is a multiple of the number of states.
        """
        path = self.out / "budgets" / f"{name}.json"
        if path.exists():
            return read(path)
        assert self.entry.seconds is not None
        start = time.monotonic()
        config = self.config(name, {**options, "out": self.out / "runs" / f"{name}-probe"})
        rate = self.speeds.get((config.method, config.optimizer.kind))
        if rate is None:
            rate = self.probe(name, {**options, **PROBE, "out": config.run.out})
        step = config.run.batch * config.data.length
        steps = max(STATES, int(self.entry.seconds * rate / step) // STATES * STATES)
        found = {"seconds": self.entry.seconds, "tokens_per_second": rate, "steps": steps}
        write_json(output_folder(path.parent) / path.name, {**found, "probe_seconds": time.monotonic() - start})
        return read(path)

    def probe(self, name: str, options: dict[str, Any]) -> float:
        """Return the tokens per second of a short run, which is removed."""
        shutil.rmtree(options["out"], ignore_errors=True)
        train(self.config(name, options))
        rate = speed_of_halves(loss_records(options["out"]))
        shutil.rmtree(options["out"])
        return rate

    def measure(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate a row, and return it."""
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # an uncompiled row would be slower than the others
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        budget = None if self.entry.seconds is None else self.budget(name, options)
        if budget is not None:
            steps = budget["steps"]
            options = {**options, "steps": steps, "save_every": steps // STATES, "keep": STATES}
        config = self.config(name, options)
        before = logged_seconds(config.run.out)  # of earlier starts, where the row was interrupted
        start = time.monotonic()
        train(config)
        trained = time.monotonic()
        checkpoint = m2s.load(config.run.out, self.device)
        world, bf16, held_out = World(0, 1, self.device), self.device.type == "cuda", self.held_out
        found = dataset_nelbo(
            checkpoint.model,
            checkpoint.head,
            held_out,
            self.entry.passes,
            seed=0,
            batch_size=BATCH_SIZE,
            bf16=bf16,
            world=world,
        )
        assert checkpoint.tokenizer is not None
        nelbo = summarize(found, example_sizes(held_out, checkpoint.tokenizer))
        records, logged = read_records(config.run.out), loss_records(config.run.out)
        return {
            "row": name,
            "train": command_line({"method": options["method"], **self.settings, **options}, self.entry.preset),
            "tokens": logged[-1]["tokens"],
            "parameters": sum(weight.numel() for weight in checkpoint.model.parameters()),
            "nelbo": {term: {unit: value[unit] for unit in ("nats", "bits_per_byte")} for term, value in nelbo.items()},
            "validation": [self.point(record, config.run.batch) for record in records if "loss" not in record],
            "trace": {key: [record[key] for record in logged] for key in ("tokens", "loss", "grad_norm", "grad_norm_max")},
            "tokens_per_second": speed(logged),
            "seconds": {"train": before + trained - start, "nelbo": time.monotonic() - trained},
            **({} if budget is None else {"budget": self.spent(budget, logged, before + trained - start)}),
            **provenance(self.device),
        }

    def spent(self, budget: dict[str, Any], records: list[dict[str, Any]], train_seconds: float) -> dict[str, Any]:
        """Return the budget of a row with what it has used: seconds of training steps and all others, and epochs."""
        tokens = records[-1]["tokens"]
        training = tokens / speed_of_halves(records)
        used = {"training_seconds": training, "other_seconds": train_seconds - training}
        return {**budget, **used, "epochs": tokens / self.described["train_tokens"]}

    def point(self, record: dict[str, Any], batch: int) -> dict[str, float]:
        """Return a validation of the trainer: NELBO, its terms and standard error in nats per token, and bits per byte."""
        nats = {key: record[f"validation_{name}"] * math.log(2) for key, name in {**TERMS, "error": "error"}.items()}
        tokens = record["step"] * batch * self.settings["data.length"]
        return {"tokens": tokens, **nats, "bits_per_byte": record["validation_bits"] / self.described["bytes_per_token"]}


def command_line(options: dict[str, Any], preset: str = "owt") -> str:
    """Return the command that trains with these options.

    Args:
        options: Options of `m2s train PRESET`.
        preset: The preset.
    """
    given = {key.replace("_", "-"): value for key, value in options.items() if value is not None}
    words = [f"--{key}" if value is True else f"--{key} {shlex.quote(str(value))}" for key, value in given.items()]
    return " ".join([f"m2s train {preset}", *words])


def describe(data: Path, length: int, limit: int | None) -> dict[str, Any]:
    """Describe the data: sources, sizes, and the cross entropy of held-out tokens under the unigram distribution.

    Args:
        data: Folder of the prepared text.
        length: Tokens per window.
        limit: Use at most this many held-out windows.
    """
    windows, held_out = (Tokens(data, split, length) for split in ("train", "validation"))
    count = min(len(held_out), limit or len(held_out))
    part = Shard(held_out, count)
    tokens = part[torch.arange(count)]
    counts = sum(np.bincount(shard, minlength=windows.vocab) for shard in windows._shards) + 1  # add-one smoothing
    unigram = -np.log(counts / counts.sum())[tokens.numpy()].mean()
    size = float(example_sizes(part, windows.tokenizer)["byte"].sum())
    return {
        "sources": [{key: source[key] for key in ("name", "sha256")} for source in windows.meta["sources"]],
        "tokenizer": windows.meta["tokenizer"]["kind"],
        "validation_fraction": windows.meta.get("validation_fraction"),
        "train_tokens": windows.meta["splits"]["train"]["tokens"],
        "validation_windows": count,
        "bytes_per_token": size / tokens.numel(),
        "unigram_nats": float(unigram),
    }
