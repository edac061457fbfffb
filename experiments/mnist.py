"""Compare all methods on MNIST with the same U-Net, batches and training steps: NELBO, FID, speed and memory.

    python experiments/mnist.py out/mnist              # on a GPU; finished rows are skipped
    python experiments/mnist.py out/mnist --table      # from the files of the rows: mnist.json, mnist.png, samples.png
    python experiments/mnist.py out/mnist --rows experiments/results/mnist.json   # continue a table, on any machine

A row runs the equivalent of these commands in one process: `m2s train mnist --method NAME --seed 1` with fewer training
steps, a tenth of them warmup; `m2s evaluate bpd` on all test images; `m2s sample` of 5,000 images with the sampler of the
method at 25, 50 and 100 steps; `m2s evaluate fid --protocol mnist-5k`. The autoregressive row uses a transformer and one
network call per pixel. OUT/NAME.json is written when a row is finished. The file of a failed row holds the error. The next
call repeats failed rows after all others.

Images per second and memory of training exclude the first 20 training steps, which compile and capture CUDA graphs. Memory is
what torch reserves on the GPU, because a captured training step does not report single tensors.
"""

import argparse
import concurrent.futures
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

PROTOCOL = PROTOCOLS["mnist-5k"]
SAMPLING_STEPS = (25, 50, 100)
TRAINING_STEPS, SEED = 3000, 1
PASSES, BATCH_SIZE = 2, 250  # of the NELBO: times per image, images per network call
MICRO_BATCH = 500  # samples per network call
SAVED, PER_LINE = 64, 20  # samples in the .npz file, and of these in a line of samples.png
UNTIMED_STEPS = 20  # training steps before timing starts


class TimedSource(ImageSource):
    """MNIST as a data source that measures the speed and memory of the training run that reads it.

    Timing starts at batch `min(UNTIMED_STEPS, steps // 2)` and ends at the last batch.

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
        self.reserved_before, self.peak = self._reserved(torch.cuda.memory_reserved), 0

    def train(self, indices: Tensor) -> Batch:
        """Return a batch, and start or end the measurement."""
        self.batches += 1
        if self.batches == self.first:
            self.wait()
            self._synchronize(reset_memory=True)
            self.start = time.monotonic()
        elif self.batches == self.steps:
            self._synchronize(reset_memory=False)
            self.end, self.peak = time.monotonic(), self._reserved(torch.cuda.max_memory_reserved)
        return super().train(indices)

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
        rate = (self.steps - self.first) * batch / (self.end - self.start)
        return {"images_per_second": rate, "peak_gib": peak if self.device.type == "cuda" else None}


@dataclass(frozen=True)
class Experiment:
    """Everything that the rows have in common, and the methods that compute a row.

    Frechet distances are computed by a background thread while the GPU continues.

    Args:
        out: Folder of the rows.
        images: The data set.
        device: Device of all computations.
        features: The Inception network.
        reference: Feature statistics of the test images.
        settings: Settings that are written to each row.
        pool: Executor with one thread.
        pending: Jobs given to the executor.
    """

    out: Path
    images: data.ImageDataset
    device: torch.device
    features: inception.Network
    reference: Statistics
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

    @property
    def bf16(self) -> bool:
        """Whether networks run in bfloat16."""
        return self.device.type == "cuda"

    def measure(self, name: str) -> None:
        """Compute a row, from training to samples. The background thread writes its file after the distances."""
        seconds: dict[str, float] = {}
        row: dict[str, Any] = {"method": name, "sampler": METHODS[name].sampler, "settings": self.settings}
        row |= self._timed(seconds, "training", lambda: self.train(name))
        checkpoint = m2s.load(self.out / "runs" / name, self.device)
        row["network"] = checkpoint.config["model"]["kind"]
        row["parameters"] = sum(weight.numel() for weight in checkpoint.model.parameters())
        row["nelbo"] = self._timed(seconds, "nelbo", lambda: self.nelbo(checkpoint))
        autoregressive = checkpoint.head.generates_left_to_right  # one network call per site; the steps have no effect
        row["samples"], distances = [], []
        for steps in (self.images.train.shape[1],) if autoregressive else SAMPLING_STEPS:
            tokens = self._timed(seconds, f"{steps} steps", lambda steps=steps: self.sample(checkpoint, name, steps))
            row["samples"].append({"steps": steps, "samples_per_second": len(tokens) / seconds[f"{steps} steps"]})
            drawn = ImageTokens(f"{name}, {steps} steps", tokens, self.images.shape, self.images.vocab)
            found = self._timed(seconds, f"features {steps}", lambda drawn=drawn: statistics(drawn, self.features))
            distances.append(self.submit(frechet, found, self.reference))
        with atomic_write(self.out / f"{name}.npz") as temporary:
            np.savez_compressed(temporary, tokens=tokens[:SAVED].numpy())
        row |= {"seconds": seconds, **provenance(self.device)}
        self.submit(write_row, self.out / f"{name}.json", row, distances)
        print(f"{name}: {', '.join(f'{part} {value:.1f} s' for part, value in seconds.items())}", flush=True)

    @staticmethod
    def _timed(seconds: dict[str, float], part: str, work: Callable[[], Any]) -> Any:
        """Return what a function returns, and store its duration in `seconds[part]`."""
        start = time.monotonic()
        found = work()
        seconds[part] = time.monotonic() - start
        return found

    def train(self, name: str) -> dict[str, Any]:
        """Train a method; return its speed and memory."""
        run = self.out / "runs" / name
        speed = run / "speed.json"
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # an uncompiled row would be slower than the others
        gc.collect()
        torch.cuda.empty_cache()
        source = TimedSource(self.images, self.device, self.settings["updates"], self.wait)
        if not speed.exists():  # a resumed run would measure only its second part
            shutil.rmtree(run, ignore_errors=True)
        train(self.config(name, run), source)
        if not speed.exists():
            write_json(speed, source.measurements(self.settings["batch"]))
        return json.loads(speed.read_text())

    def config(self, name: str, run: Path) -> Config:
        """Return the preset with fewer training steps, and without validation during the run."""
        steps = self.settings["updates"]
        config = replace(PRESETS["mnist"], "method", name)
        settings = {"out": run, "steps": steps, "batch": self.settings["batch"], "seed": SEED, "device": str(self.device)}
        settings |= {"validate_every": 0, "validation_samples": min(BATCH_SIZE, self.settings["test_images"])}
        settings |= {"save_every": steps, "keep": 1, "log_every": max(1, steps // 4), "optimizer.warmup": steps // 10}
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
        settings: Settings of the table.
        error: The exception that ended the row.
    """
    text = f"{type(error).__name__}: {error}"
    print(f"{name} failed: {text}", file=sys.stderr, flush=True)
    write_json(path, {"method": name, "settings": settings, "error": text})


def read_rows(out: Path) -> dict[str, dict[str, Any]]:
    """Return the rows that have a file, in the order of the methods.

    Args:
        out: Folder of the rows.

    Raises:
        UserError: A file is not JSON.
    """
    found = {}
    for name in METHODS:
        path = out / f"{name}.json"
        if path.exists():
            try:
                found[name] = with_current_names(json.loads(path.read_text(encoding="utf-8")))
            except ValueError as error:
                raise UserError(f"{path} is not JSON ({error}): remove it to compute the row again") from error
    return found


def import_rows(table: Path, out: Path) -> None:
    """Write a file for each row of a mnist.json that has none in the folder.

    Args:
        table: The mnist.json.
        out: Folder of the rows.

    Raises:
        UserError: The table cannot be read, or has other settings than the rows of the folder.
    """
    try:
        rows = with_current_names(json.loads(table.read_text(encoding="utf-8"))["rows"])
        found = {row["method"]: row for row in rows if "error" not in row and row["method"] in METHODS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--rows is {table}, but no rows can be read there: {type(error).__name__}: {error}") from error
    existing = read_rows(out)
    if rows := {**found, **existing}:
        check_settings(out, rows, next(iter(rows.values()))["settings"])
    output_folder(out)
    for name, row in found.items():
        if "error" in existing.get(name, {"error": "missing"}):
            write_json(out / f"{name}.json", row)


def check_settings(out: Path, rows: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
    """Raise an error unless all rows have the given settings.

    Args:
        out: Folder of the rows.
        rows: Rows by method.
        settings: The expected settings.

    Raises:
        UserError: A row has other settings.
    """
    for name, row in rows.items():
        for key in settings:
            if row["settings"].get(key) != settings[key]:
                raise UserError(
                    f"{out / name}.json was made with {key} {row['settings'].get(key)}, not {settings[key]}, but all rows of "
                    "a table must have the same settings: use another folder, or the same settings"
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
    batch, samples = min(PRESETS["mnist"].run.batch, limit), min(PROTOCOL.samples or 0, limit)
    settings = {"updates": options.steps, "batch": batch, "seed": SEED, "test_images": min(len(images.test), limit)}
    settings |= {"passes": PASSES, "samples": samples, "micro_batch": min(MICRO_BATCH, samples), "grid": "cosine"}
    done = read_rows(options.out)
    check_settings(options.out, done, settings)
    missing = [name for name in options.methods if name not in done]
    todo = missing + [name for name in options.methods if "error" in done.get(name, {})]
    if not todo:
        print("all rows are finished")
        return True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    features = inception.load(options.inception, device)
    output_folder(options.out)
    reference = ImageTokens(PROTOCOL.against, images.test[: min(PROTOCOL.count or 0, limit)], images.shape, images.vocab)
    reference_statistics = statistics(reference, features)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        experiment = Experiment(options.out, images, device, features, reference_statistics, settings, pool)
        for number, name in enumerate(todo):
            if time.monotonic() - started > options.seconds:
                print(f"{options.seconds:g} s have passed, not started: {', '.join(todo[number:])}")
                break
            print(f"{name} ({number + 1} of {len(todo)}), at {time.monotonic() - started:.0f} s", flush=True)
            try:
                experiment.measure(name)
            except Exception as error:
                write_error(options.out / f"{name}.json", name, settings, error)
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
    for row in rows:
        cells = [f"`{row['method']}`"]
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


def formatted(value: float | None, spec: str) -> str:
    """Return a number in the given format, or "-" if there is none.

    Args:
        value: The number.
        spec: Format specification, such as ".2f".
    """
    return "-" if value is None else f"{value:{spec}}"


def write_table(out: Path) -> None:
    """Print the table, and write mnist.json, mnist.png and samples.png from the files of the rows.

    Args:
        out: Folder of the rows.

    Raises:
        UserError: The folder has no rows, or rows with different settings.
    """
    from m2s.report.methods import (  # loads matplotlib, which a training machine may lack
        plot_method_comparison,
        plot_sample_sheet,
    )

    rows = list(read_rows(out).values())
    if not rows:
        raise UserError(f"{out} has no rows: compute them with python experiments/mnist.py {out}")
    check_settings(out, {row["method"]: row for row in rows}, rows[0]["settings"])
    print("\n".join(format_table(rows)))
    transformers = [f"`{row['method']}`" for row in rows if row.get("network") == "dit"]
    if transformers:
        print(f"\nA causal transformer in place of the U-Net, with one network call per pixel: {', '.join(transformers)}.")
    write_json(out / "mnist.json", {"command": command(), "settings": rows[0]["settings"], "rows": rows})
    finished = [row for row in rows if "error" not in row]
    pictures = {}
    for name in (row["method"] for row in finished):
        if (out / f"{name}.npz").exists():  # an imported row has none
            with np.load(out / f"{name}.npz", allow_pickle=False) as file:
                pictures[name] = file["tokens"][:PER_LINE].reshape(-1, *(math.isqrt(file["tokens"].shape[1]),) * 2)
    for name, figure in (
        ("mnist.png", finished and plot_method_comparison(finished, SAMPLING_STEPS)),
        ("samples.png", pictures and plot_sample_sheet(pictures)),
    ):
        if figure:
            with atomic_write(out / name) as temporary:
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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after this many seconds")
    parser.add_argument("--steps", type=int, default=TRAINING_STEPS, help="training steps of each row (%(default)s)")
    parser.add_argument(
        "--limit", type=int, help="for a quick trial: at most N images per batch, test set and samples", metavar="N"
    )
    parser.add_argument("--inception", type=Path, metavar="FILE", help="Inception weights, as for m2s evaluate fid")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="a mnist.json: import its finished rows")
    parser.add_argument("--table", action="store_true", help="write the table and the figures from the files of the rows")
    options = parser.parse_args(arguments)
    options.methods = options.methods.split(",")
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
            write_table(options.out)
            return 0
        return 0 if run(options, started) else 1
    except UserError as error:
        print(f"mnist.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
