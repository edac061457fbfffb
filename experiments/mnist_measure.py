"""The measurements of a row of experiments/mnist.py: training with its speed and memory, NELBO, samples and FID."""

import concurrent.futures
import functools
import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mnist_rows import RowKey, read_training, write_row
from torch import Tensor

import m2s
from m2s import data
from m2s.cli.evaluate.fid import PROTOCOLS, ImageTokens, statistics
from m2s.data.source import ImageSource
from m2s.distributed import World
from m2s.evaluation import inception
from m2s.evaluation.bpd import Shard, dataset_nelbo, summarize
from m2s.evaluation.fid import Statistics, frechet
from m2s.hub import Checkpoint
from m2s.io import atomic_write, write_json
from m2s.methods import METHODS
from m2s.presets import PRESETS
from m2s.provenance import provenance
from m2s.samplers.inference_model import InferenceModel
from m2s.training import Batch, Config, train
from m2s.training.config import replace

PROTOCOL = PROTOCOLS["mnist-5k"]
SAMPLING_STEPS = (25, 50, 100)
PASSES, BATCH_SIZE = 2, 250  # of the NELBO: times per image, images per network call
MICRO_BATCH = 500  # samples per network call
SAVED = 64  # samples in the .npz file
UNTIMED_STEPS = 20  # training steps before timing starts


class TimedSource(ImageSource):
    """MNIST as a data source that measures the speed and memory of the training run that reads it.

    Timing starts at batch `min(UNTIMED_STEPS, steps // 2)` and ends at the last batch. Validations are left out, each with the
    training step after it: the next call of `train` comes after the gradient of that step.

    Args:
        images: The data set.
        device: Device of the training run.
        steps: Number of training steps.
        wait: Called before timing starts; returns when no background work is left.
    """

    def __init__(self, images: data.ImageDataset, device: torch.device, steps: int, wait: Callable[[], None]) -> None:
        super().__init__(images)
        self.device, self.steps, self.wait = device, steps, wait
        self.first, self.batches, self.start, self.end = min(UNTIMED_STEPS, steps // 2), 0, 0.0, 0.0
        self.paused: float | None = None  # the start of the current validation
        self.pauses: list[float] = []
        self.reserved_before, self.peak = self._reserved(torch.cuda.memory_reserved), 0

    def train(self, indices: Tensor) -> Batch:
        """Return a batch, and start or end the measurement."""
        self.batches += 1
        if self.paused is not None:
            self._synchronize(reset_memory=False)
            self.pauses.append(time.monotonic() - self.paused)
            self.paused = None
        if self.batches == self.first:
            self.wait()
            self._synchronize(reset_memory=True)
            self.start, self.pauses, self.peak = time.monotonic(), [], 0
        elif self.batches == self.steps:
            self._synchronize(reset_memory=False)
            self.end, self.peak = time.monotonic(), self.peak or self._reserved(torch.cuda.max_memory_reserved)
        return super().train(indices)

    def validation(self, indices: Tensor) -> Batch:
        """Return a batch of test images, and pause the measurement."""
        if self.paused is None:
            self._synchronize(reset_memory=False)
            self.peak = self.peak or self._reserved(torch.cuda.max_memory_reserved)  # of training alone
            self.paused = time.monotonic()
        return super().validation(indices)

    def _synchronize(self, reset_memory: bool) -> None:
        """Wait for the GPU, so that the clock measures finished work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if reset_memory:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)

    def _reserved(self, statistic: Callable[[torch.device], int]) -> int:
        """Return a memory statistic of torch in bytes; 0 on a CPU."""
        return statistic(self.device) if self.device.type == "cuda" else 0

    def measurements(self, batch: int) -> dict[str, float | None]:
        """Return images per second, and peak memory minus the memory reserved before the run."""
        peak = (self.peak - self.reserved_before) / 2**30
        steps = self.steps - self.first - len(self.pauses)
        rate = steps * batch / (self.end - self.start - sum(self.pauses))
        return {"images_per_second": rate, "peak_gib": peak if self.device.type == "cuda" else None}


@dataclass(frozen=True)
class Experiment:
    """Everything that the rows have in common, and the methods that compute a row.

    Frechet distances are computed by a background thread while the GPU continues.

    Args:
        out: Folder of the rows.
        images: The data set.
        device: Device of all computations.
        inception: File of the Inception weights; None: the default place.
        settings: Settings that are written to each row, without the seed.
        pool: Executor with one thread.
        pending: Jobs given to the executor.
    """

    out: Path
    images: data.ImageDataset
    device: torch.device
    inception: Path | None
    settings: dict[str, Any]
    pool: concurrent.futures.Executor
    pending: list[concurrent.futures.Future[Any]] = field(default_factory=list)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
        """Run a function in the background thread."""
        self.pending.append(self.pool.submit(work, *arguments))
        return self.pending[-1]

    def wait(self) -> None:
        """Return when all background jobs are finished."""
        concurrent.futures.wait(self.pending)

    @functools.cached_property
    def features(self) -> inception.Network:
        """The Inception network."""
        return inception.load(self.inception, self.device)

    @functools.cached_property
    def reference(self) -> Statistics:
        """Feature statistics of the test images."""
        count = min(PROTOCOL.count or 0, self.settings["test_images"])
        images = ImageTokens(PROTOCOL.against, self.images.test[:count], self.images.shape, self.images.vocab)
        return statistics(images, self.features)

    @property
    def bf16(self) -> bool:
        """Whether networks run in bfloat16."""
        return self.device.type == "cuda"

    def row_settings(self, row: RowKey) -> dict[str, Any]:
        """Return the settings of a row."""
        return {**self.settings, "seed": row.seed}

    def measure(self, key: RowKey) -> None:
        """Compute a row, from training to samples. The background thread writes its file after the distances."""
        seconds: dict[str, float] = {}
        name = key.method
        row: dict[str, Any] = {"method": name, "sampler": METHODS[name].sampler, "settings": self.row_settings(key)}
        row |= self._timed(seconds, "training", lambda: self.train(key))
        checkpoint = m2s.load(self.out / "runs" / str(key), self.device)
        row["network"] = checkpoint.config["model"]["kind"]
        row["parameters"] = sum(weight.numel() for weight in checkpoint.model.parameters())
        row["nelbo"] = self._timed(seconds, "nelbo", lambda: self.nelbo(checkpoint))
        autoregressive = checkpoint.head.generates_left_to_right  # one network call per site; the steps have no effect
        self._timed(seconds, "inception", lambda: self.reference)
        row["samples"], distances = [], []
        for steps in (self.images.train.shape[1],) if autoregressive else SAMPLING_STEPS:
            tokens = self._timed(seconds, f"{steps} steps", lambda steps=steps: self.sample(checkpoint, name, steps))
            row["samples"].append({"steps": steps, "samples_per_second": len(tokens) / seconds[f"{steps} steps"]})
            drawn = ImageTokens(f"{name}, {steps} steps", tokens, self.images.shape, self.images.vocab)
            found = self._timed(seconds, f"features {steps}", lambda drawn=drawn: statistics(drawn, self.features))
            distances.append(self.submit(frechet, found, self.reference))
        with atomic_write(self.out / f"{key}.npz") as temporary:
            np.savez_compressed(temporary, tokens=tokens[:SAVED].numpy())
        row |= {"seconds": seconds, **provenance(self.device)}
        self.submit(write_row, self.out / f"{key}.json", row, distances)
        print(f"{key}: {', '.join(f'{part} {value:.1f} s' for part, value in seconds.items())}", flush=True)

    @staticmethod
    def _timed(seconds: dict[str, float], part: str, work: Callable[[], Any]) -> Any:
        """Return what a function returns, and store its duration in `seconds[part]`."""
        start = time.monotonic()
        found = work()
        seconds[part] = time.monotonic() - start
        return found

    def train(self, row: RowKey) -> dict[str, Any]:
        """Train a method; return its speed, memory and validations."""
        run = self.out / "runs" / str(row)
        speed = run / "speed.json"
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # an uncompiled row would be slower than the others
        gc.collect()
        torch.cuda.empty_cache()
        source = TimedSource(self.images, self.device, self.settings["updates"], self.wait)
        if not speed.exists():  # a resumed run would measure only its second part
            shutil.rmtree(run, ignore_errors=True)
        train(self.config(row, run), source)
        if not speed.exists():
            write_json(speed, source.measurements(self.settings["batch"]))
        return read_training(run, self.settings)

    def config(self, row: RowKey, run: Path) -> Config:
        """Return the preset with the steps and the seed of a row. Without `validate_every` the only validation is the last."""
        steps, test_images = self.settings["updates"], self.settings["test_images"]
        config = replace(PRESETS["mnist"], "method", row.method)
        settings = {"out": run, "steps": steps, "batch": self.settings["batch"], "seed": row.seed, "device": str(self.device)}
        settings |= {"validate_every": self.settings.get("validate_every", 0)}
        settings |= {"validation_samples": self.settings.get("validation_images", min(BATCH_SIZE, test_images))}
        settings |= {"save_every": steps, "keep": 1, "log_every": max(1, steps // 4)}
        settings |= {"optimizer.warmup": min(config.optimizer.warmup, steps // 10)}
        for key, value in settings.items():
            config = replace(config, key, value)
        return config

    def nelbo(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the NELBO on the test images and its terms in bits per dimension, with both standard errors."""
        test = Shard(self.images.test, self.settings["test_images"])
        world = World(0, 1, self.device)
        found = dataset_nelbo(
            checkpoint.model, checkpoint.head, test, PASSES, seed=0, batch_size=BATCH_SIZE, bf16=self.bf16, world=world
        )
        return {term: value["bits"] for term, value in summarize(found).items()}

    def sample(self, checkpoint: Checkpoint, name: str, steps: int) -> Tensor:
        """Return samples [N, L] of a trained method, uint8 on the CPU."""
        network = InferenceModel(checkpoint.model, checkpoint.head.process.states, self.bf16)
        shape = (self.settings["samples"], self.images.train.shape[1])
        tokens = m2s.sample(
            network,
            checkpoint.head,
            shape,
            steps=steps,
            sampler=METHODS[name].sampler,
            micro_batch=self.settings["micro_batch"],
            seed=0,
            progress=True,
        )
        return tokens.to("cpu", torch.uint8)
