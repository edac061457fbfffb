"""Compare all methods on MNIST with the same U-Net, batches and training steps: NELBO, FID, speed and memory.

    python experiments/mnist.py out/mnist              # on a GPU; finished rows are skipped
    python experiments/mnist.py out/mnist --table      # from the files of the rows: mnist.json, mnist.png, mnist-samples.png
    python experiments/mnist.py out/mnist --rows experiments/results/mnist.json   # continue a table, on any machine

The 50 epochs of the preset, with the NELBO every 585 steps, are another table:

    python experiments/mnist.py out/mnist50 --steps 11700 --validate-every 585 --methods m2s-offset,m2s --seeds 1,2
    python experiments/mnist.py out/mnist50 --table --results experiments/results/mnist-50-epochs.json

A row is a method and a seed. It runs the equivalent of these commands in one process: `m2s train mnist --method NAME --seed N`
with another number of training steps, a tenth of them warmup, but at most the 500 of the preset; `m2s evaluate bpd` on all test
images; `m2s sample` of 5,000 images with the sampler of the method at 25, 50 and 100 steps; `m2s evaluate fid --protocol
mnist-5k`. The autoregressive row uses a transformer and one network call per pixel. OUT/NAME-seedN.json is written when a row
is finished. The file of a failed row holds the error. The next call repeats failed rows after all others. A row that failed
after its training run has the speed and the validations of that run in the table.

With `--validate-every` a row has the NELBO of the averaged weights on 2,048 test images on the way. The images are the same at
all steps and in all rows, and the noise is the same in all rows with the same seed and noise process.

Images per second and memory of training exclude validation and the first 20 training steps, which compile and capture CUDA
graphs. Memory is what torch reserves on the GPU, because a captured training step does not report single tensors.
"""

import argparse
import concurrent.futures
import functools
import gc
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import m2s
from m2s import data
from m2s.cli.evaluate.bpd import finite
from m2s.cli.evaluate.fid import PROTOCOLS, ImageTokens, statistics
from m2s.data.source import ImageSource
from m2s.distributed import World
from m2s.errors import UserError, suggest
from m2s.evaluation import inception
from m2s.evaluation.bpd import Shard, dataset_nelbo, summarize
from m2s.evaluation.earlier_names import with_current_names
from m2s.evaluation.fid import Statistics, frechet
from m2s.hub import Checkpoint
from m2s.io import atomic_write, output_folder, write_json
from m2s.methods import METHODS
from m2s.presets import PRESETS
from m2s.provenance import command, provenance
from m2s.samplers.inference_model import InferenceModel
from m2s.training import Batch, Config, train
from m2s.training.config import replace
from m2s.training.log import read_log

PROTOCOL = PROTOCOLS["mnist-5k"]
SAMPLING_STEPS = (25, 50, 100)
TRAINING_STEPS = 3000
PASSES, BATCH_SIZE = 2, 250  # of the NELBO: times per image, images per network call
MICRO_BATCH = 500  # samples per network call
SAVED, PER_LINE = 64, 20  # samples in the .npz file, and of these in a line of mnist-samples.png
UNTIMED_STEPS = 20  # training steps before timing starts
NELBO_TERMS = ("bits", "error", "integral", "prior", "reconstruction")  # of a validation, in bits per dimension


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
class RowKey:
    """The method and the seed of a row. As a string it names the files of the row.

    Args:
        method: The method.
        seed: The seed of the training run.
    """

    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method}-seed{self.seed}"

    @staticmethod
    def of(row: dict[str, Any]) -> "RowKey":
        """Return the key of a row.

        Args:
            row: The row.
        """
        return RowKey(row["method"], row["settings"]["seed"])


def read_training(run: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a training run measured: images per second, peak memory and, where the settings ask for it, validations.

    A validation has the step, the NELBO, its standard error over images and its terms.

    Args:
        run: Folder of the run.
        settings: Settings of the row.

    Returns:
        Keys of the row; none if the run has not ended.
    """
    if not (run / "speed.json").exists():
        return {}
    found: dict[str, Any] = json.loads((run / "speed.json").read_text(encoding="utf-8"))
    if settings.get("validate_every"):
        records = [line.record or {} for line in read_log(run / "log.jsonl")]
        found["validation"] = [
            {"step": record["step"], **{term: record[f"validation_{term}"] for term in NELBO_TERMS}}
            for record in records
            if "validation_bits" in record
        ]
    return found


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


def write_row(path: Path, row: dict[str, Any], distances: list[concurrent.futures.Future[float]]) -> None:
    """Wait for the Frechet distances of a row, and write its file.

    Args:
        path: File of the row.
        row: The row without distances.
        distances: One for each entry of `row["samples"]`.
    """
    try:
        for samples, distance in zip(row["samples"], distances, strict=True):
            samples["fid"] = distance.result()
        write_json(path, finite(row))
    except Exception as error:
        write_error(path, row["method"], row["settings"], error)


def write_error(path: Path, name: str, settings: dict[str, Any], error: Exception) -> None:
    """Write the file of a row that failed.

    Args:
        path: File of the row.
        name: The method.
        settings: Settings of the row.
        error: The exception that ended the row.
    """
    text = f"{type(error).__name__}: {error}"
    print(f"{path.stem} failed: {text}", file=sys.stderr, flush=True)
    write_json(path, {"method": name, "settings": settings, "error": text})


def read_rows(out: Path) -> dict[RowKey, dict[str, Any]]:
    """Return the rows that have a file, in the order of the methods and then of the seeds.

    Failed rows have the results of their training run, if it ended.

    Args:
        out: Folder of the rows.

    Raises:
        UserError: A file is not JSON.
    """
    found = {}
    for path in out.glob("*-seed*.json"):
        name, _, seed = path.stem.rpartition("-seed")
        if name in METHODS and seed.isdecimal():
            try:
                found[RowKey(name, int(seed))] = with_current_names(json.loads(path.read_text(encoding="utf-8")))
            except ValueError as error:
                raise UserError(f"{path} is not JSON ({error}): remove it to compute the row again") from error
    for key, row in found.items():
        if "error" in row:
            row |= read_training(out / "runs" / str(key), row["settings"])
    order = list(METHODS)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0].method), item[0].seed)))


def import_rows(table: Path, out: Path) -> None:
    """Write a file for each row of a table that has none in the folder.

    Args:
        table: The file that `--table` wrote, such as mnist.json.
        out: Folder of the rows.

    Raises:
        UserError: The table cannot be read, or has other settings than the rows of the folder.
    """
    try:
        rows = with_current_names(json.loads(table.read_text(encoding="utf-8"))["rows"])
        found = {RowKey.of(row): row for row in rows if "error" not in row and row["method"] in METHODS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--rows is {table}, but no rows can be read there: {type(error).__name__}: {error}") from error
    existing = read_rows(out)
    if rows := {**found, **existing}:
        check_settings(out, rows, next(iter(rows.values()))["settings"])
    output_folder(out)
    for key, row in found.items():
        if "error" in existing.get(key, {"error": "missing"}):
            write_json(out / f"{key}.json", row)


def check_settings(out: Path, rows: dict[RowKey, dict[str, Any]], settings: dict[str, Any]) -> None:
    """Raise an error unless all rows have the given settings. Seeds may differ.

    Args:
        out: Folder of the rows.
        rows: The rows.
        settings: The expected settings.

    Raises:
        UserError: A row has other settings.
    """
    for name, row in rows.items():
        for key in {**settings, **row["settings"]}:
            if key != "seed" and row["settings"].get(key) != settings.get(key):
                raise UserError(
                    f"{out / str(name)}.json was made with {key} {row['settings'].get(key)}, not {settings.get(key)}, but all "
                    "rows of a table must have the same settings except for the seed: use another folder, or the same settings"
                )


def run(options: argparse.Namespace, started: float) -> bool:
    """Compute the rows that are not finished.

    Args:
        options: Command line options.
        started: `time.monotonic()` at the start of the process.

    Returns:
        Whether no row failed.
    """
    limit = options.limit or 10**9
    images = data.load("mnist")
    preset = PRESETS["mnist"].run
    samples, test_images = min(PROTOCOL.samples or 0, limit), min(len(images.test), limit)
    settings = {"updates": options.steps, "batch": min(preset.batch, limit), "test_images": test_images, "passes": PASSES}
    settings |= {"samples": samples, "micro_batch": min(MICRO_BATCH, samples), "grid": "cosine"}
    if options.validate_every:
        validation_images = min(preset.validation_samples, test_images)
        settings |= {"validate_every": options.validate_every, "validation_images": validation_images}
    done = read_rows(options.out)
    check_settings(options.out, done, settings)
    wanted = [RowKey(name, seed) for seed in options.seeds for name in options.methods]
    todo = [key for key in wanted if key not in done] + [key for key in wanted if "error" in done.get(key, {})]
    if not todo:
        print("all rows are finished")
        return True
    # A row that is trained without these weights has no FID, and its network is lost with the machine.
    inception.load(options.inception)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output_folder(options.out)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        experiment = Experiment(options.out, images, device, options.inception, settings, pool)
        for number, key in enumerate(todo):
            if time.monotonic() - started > options.seconds:
                print(f"{options.seconds:g} s have passed, not started: {', '.join(map(str, todo[number:]))}")
                break
            print(f"{key} ({number + 1} of {len(todo)}), at {time.monotonic() - started:.0f} s", flush=True)
            try:
                experiment.measure(key)
            except Exception as error:
                write_error(options.out / f"{key}.json", key.method, experiment.row_settings(key), error)
                if device.type == "cuda":  # a failed graph capture leaves its stream current
                    torch.cuda.set_stream(torch.cuda.default_stream())
                if not responds(device):
                    print("the device fails: run the same command again to continue in a new process", file=sys.stderr)
                    break
    return not any("error" in row for row in read_rows(options.out).values())


def responds(device: torch.device) -> bool:
    """Return whether the device still computes: some GPU errors persist until the process ends.

    Args:
        device: The device.
    """
    try:
        return float(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False


def format_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the Markdown table.

    Args:
        rows: The rows, finished or failed.
    """
    columns = ["method", "bits per dimension", *(f"FID, {steps}" for steps in SAMPLING_STEPS)]
    columns += ["training images/s", "peak GiB", f"samples/s, {SAMPLING_STEPS[-1]}", "sampler"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row, label in zip(rows, row_labels(rows), strict=True):
        cells = [label]
        if "error" in row:
            lines.append(f"| {cells[0]} | failed: {row['error'].splitlines()[0]} |" + " |" * (len(columns) - 2))
            continue
        bits, samples = row["nelbo"]["nelbo"], {entry["steps"]: entry for entry in row["samples"]}
        cells.append(f"{formatted(bits['value'], '.4f')} ± {formatted(bits['rows_error'], '.4f')}")
        cells += [formatted(samples.get(steps, {}).get("fid"), ".2f") for steps in SAMPLING_STEPS]
        last = row["samples"][-1]
        if last["steps"] not in SAMPLING_STEPS:
            cells[-1] = f"{formatted(last['fid'], '.2f')} ({last['steps']} steps)"
        cells += [formatted(row["images_per_second"], ",.0f"), formatted(row["peak_gib"], ".1f")]
        cells += [formatted(last["samples_per_second"], ",.1f"), row["sampler"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def format_validations(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table of the NELBO on the way: a line for each step, a column for each row.

    Args:
        rows: The rows, finished or failed. Those without validations are left out.

    Returns:
        The lines; none without validations.
    """
    curves = {
        label: {point["step"]: point["bits"] for point in row["validation"]}
        for row, label in zip(rows, row_labels(rows), strict=True)
        if row.get("validation")
    }
    if not curves:
        return []
    lines = [f"| step | {' | '.join(curves)} |", "|---" * (len(curves) + 1) + "|"]
    for step in sorted(set().union(*curves.values())):
        lines.append(f"| {step:,} | {' | '.join(formatted(curve.get(step), '.4f') for curve in curves.values())} |")
    return lines


def row_labels(rows: list[dict[str, Any]]) -> list[str]:
    """Return the label of each row in a Markdown table: the method, and the seed where the table has several.

    Args:
        rows: The rows.
    """
    keys = [RowKey.of(row) for row in rows]
    several = len({key.seed for key in keys}) > 1
    return [f"`{key.method}`, seed {key.seed}" if several else f"`{key.method}`" for key in keys]


def formatted(value: float | None, spec: str) -> str:
    """Return a number in the given format, or "-" if there is none.

    Args:
        value: The number.
        spec: Format specification, such as ".2f".
    """
    return "-" if value is None else f"{value:{spec}}"


def write_table(out: Path, results: Path) -> None:
    """Print the table, and write it with two figures from the files of the rows. The figures show the first seed of a method.

    Args:
        out: Folder of the rows.
        results: File of the table, such as mnist.json. The figures are mnist.png and mnist-samples.png beside it.

    Raises:
        UserError: The folder has no rows, or rows with different settings.
    """
    from m2s.report.methods import (  # loads matplotlib, which a training machine may lack
        plot_method_comparison,
        plot_sample_sheet,
    )

    found = read_rows(out)
    if not found:
        raise UserError(f"{out} has no rows: compute them with python experiments/mnist.py {out}")
    rows = list(found.values())
    check_settings(out, found, rows[0]["settings"])
    print("\n".join(format_table(rows)))
    transformers = [label for row, label in zip(rows, row_labels(rows), strict=True) if row.get("network") == "dit"]
    if transformers:
        print(f"\nA causal transformer in place of the U-Net, with one network call per pixel: {', '.join(transformers)}.")
    if lines := format_validations(rows):
        print("\nNELBO on the way, in bits per dimension:\n")
        print("\n".join(lines))
    settings = {key: value for key, value in rows[0]["settings"].items() if key != "seed"}
    output_folder(results.parent)
    write_json(results, {"command": command(), "settings": settings, "rows": rows})
    plotted: dict[str, RowKey] = {}
    for key, row in found.items():
        if "error" not in row:
            plotted.setdefault(key.method, key)
    pictures = {}
    for name, key in plotted.items():
        if (out / f"{key}.npz").exists():  # an imported row has none
            with np.load(out / f"{key}.npz", allow_pickle=False) as file:
                pictures[name] = file["tokens"][:PER_LINE].reshape(-1, *(math.isqrt(file["tokens"].shape[1]),) * 2)
    compared = [found[key] for key in plotted.values()]
    for path, figure in (
        (results.with_suffix(".png"), compared and plot_method_comparison(compared, SAMPLING_STEPS)),
        (results.with_name(f"{results.stem}-samples.png"), pictures and plot_sample_sheet(pictures)),
    ):
        if figure:
            with atomic_write(path) as temporary:
                figure.savefig(temporary, dpi=200, bbox_inches="tight")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read and validate the command line.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Raises:
        UserError: A value is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="A,B,C", help="only these methods")
    parser.add_argument("--seeds", default="1", metavar="A,B,C", help="seeds of the training runs (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after this many seconds")
    parser.add_argument("--steps", type=int, default=TRAINING_STEPS, help="training steps of each row (%(default)s)")
    parser.add_argument("--validate-every", type=int, default=0, metavar="N", help="record the NELBO every N training steps")
    parser.add_argument(
        "--limit", type=int, help="for a quick trial: at most N images per batch, test set and samples", metavar="N"
    )
    parser.add_argument("--inception", type=Path, metavar="FILE", help="Inception weights (those in $M2S_DATA/inception)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="a table, such as mnist.json: import its finished rows")
    parser.add_argument("--table", action="store_true", help="write the table and the figures from the files of the rows")
    parser.add_argument("--results", type=Path, metavar="FILE", help="the table that --table writes (OUT/mnist.json)")
    options = parser.parse_args(arguments)
    options.results = options.results or options.out / "mnist.json"
    options.methods = options.methods.split(",")
    seeds = options.seeds.split(",")
    if not all(seed.isdecimal() for seed in seeds):
        raise UserError(f"--seeds is {options.seeds}, but it must be whole numbers with commas between them, such as 1,2,3")
    options.seeds = list(dict.fromkeys(map(int, seeds)))
    if options.validate_every < 0 or options.validate_every == 1:
        raise UserError(
            f"--validate-every is {options.validate_every}, but it must be 0 or at least 2: the step after a validation is not "
            "timed"
        )
    if options.results.suffix != ".json":
        raise UserError(f"--results is {options.results}, but it must end in .json")
    for name in options.methods:
        if name not in METHODS:
            raise UserError(f"there is no method {name!r}: {suggest(name, METHODS)}")
    if options.steps < 2:
        raise UserError(f"--steps is {options.steps}, but it must be at least 2: the first steps are not timed")
    if options.limit is not None and options.limit < 2:
        raise UserError(f"--limit is {options.limit}, but a covariance needs at least 2 images")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    started = time.monotonic()
    try:
        options = parse(arguments)
        if options.rows:
            import_rows(options.rows, options.out)
        if options.table:
            write_table(options.out, options.results)
            return 0
        return 0 if run(options, started) else 1
    except UserError as error:
        print(f"mnist.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
