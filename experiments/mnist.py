"""Every method on MNIST, with the same U-Net, batches and number of updates: bound, FID at 25, 50 and 100 steps, speed, memory.

    python experiments/mnist.py out/mnist              # on a GPU; rows that are done are not done again
    python experiments/mnist.py out/mnist --table      # from the rows' files: mnist.json, mnist.png, samples.png
    python experiments/mnist.py out/mnist --rows experiments/results/mnist.json   # go on from a table, on whatever machine

A row is what these commands do, in one process: `m2s train mnist --method NAME --seed 1` (fewer updates, a tenth of them
warm-up); `m2s evaluate bpd` on all test images; `m2s sample` of 5,000 images by the method's sampler; `m2s
evaluate fid --protocol mnist-5k`. The autoregressive row has a transformer for network, and one call for each pixel.
OUT/NAME.json appears when a row is done; one that failed holds its error, and the next call tries it again, after all others.

Training's images a second and memory are those after the first 20 updates, which compile and record. Memory is what
torch holds of the GPU for training, for a recorded update shows no single tensors.
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
from m2s.cli.evaluate.fid import PROTOCOLS, statistics
from m2s.cli.evaluate.fid import Images as Pictures
from m2s.data.source import ImageSource
from m2s.distributed import World
from m2s.errors import UserError, suggest
from m2s.evaluation import inception
from m2s.evaluation.bpd import Shard, dataset_nelbo, summary
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
STEPS = (25, 50, 100)
UPDATES, SEED = 3000, 1
PASSES, ROWS = 2, 250  # of the bound: times of an image, images of a call
MICRO = 500  # samples of a call
SHOWN, ACROSS = 64, 20  # samples that are kept, and of these in a line of the picture
WARM = 20  # updates before training is timed


class Watched(ImageSource):
    """MNIST, and a watch on who trains on it: from batch `warm` to the last. `quiet` returns when nothing else is at work."""

    def __init__(self, images: data.Images, device: torch.device, updates: int, quiet: Callable[[], None]) -> None:
        super().__init__(images)
        self.device, self.last, self.quiet = device, updates, quiet
        self.warm, self.asked, self.start, self.end = min(WARM, updates // 2), 0, 0.0, 0.0
        self.before, self.peak = self._reserved(torch.cuda.memory_reserved), 0

    def train(self, indices: Tensor) -> Batch:
        self.asked += 1
        if self.asked == self.warm:
            self.quiet()
            self._settle()
            self.start = time.monotonic()
        elif self.asked == self.last:
            self._settle(again=False)
            self.end, self.peak = time.monotonic(), self._reserved(torch.cuda.max_memory_reserved)
        return super().train(indices)

    def _settle(self, again: bool = True) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if again:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)

    def _reserved(self, ask: Callable[[torch.device], int]) -> int:
        return ask(self.device) if self.device.type == "cuda" else 0

    def seen(self, batch: int) -> dict[str, float | None]:
        """Images a second, and memory at its highest, above what was taken before the run."""
        peak = (self.peak - self.before) / 2**30
        rate = (self.last - self.warm) * batch / (self.end - self.start)
        return {"images_per_second": rate, "peak_gib": peak if self.device.type == "cuda" else None}


@dataclass(frozen=True)
class Lab:
    """What all rows share. Distances are found by one thread of their own while the GPU is at the next thing."""

    out: Path
    images: data.Images
    device: torch.device
    features: inception.Network
    reference: Statistics
    settings: dict[str, Any]
    pool: concurrent.futures.Executor
    pending: list[concurrent.futures.Future[Any]] = field(default_factory=list)

    def later(self, work: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
        self.pending.append(self.pool.submit(work, *arguments))
        return self.pending[-1]

    def quiet(self) -> None:
        concurrent.futures.wait(self.pending)

    @property
    def bf16(self) -> bool:
        return self.device.type == "cuda"

    def measure(self, name: str) -> None:
        """One row, from training to its file, which is written when the distances are known."""
        seconds: dict[str, float] = {}
        row: dict[str, Any] = {"method": name, "sampler": METHODS[name].sampler, "settings": self.settings}
        row |= self._timed(seconds, "training", lambda: self.train(name))
        checkpoint = m2s.load(self.out / "runs" / name, self.device)
        row["network"] = checkpoint.config["model"]["kind"]
        row["parameters"] = sum(weight.numel() for weight in checkpoint.model.parameters())
        row["bound"] = self._timed(seconds, "bound", lambda: self.bound(checkpoint))
        alone = checkpoint.head.sampler is not None  # a call for each site, whatever the steps
        row["samples"], distances = [], []
        for steps in (self.images.train.shape[1],) if alone else STEPS:
            tokens = self._timed(seconds, f"{steps} steps", lambda steps=steps: self.sample(checkpoint, name, steps))
            row["samples"].append({"steps": steps, "samples_per_second": len(tokens) / seconds[f"{steps} steps"]})
            pictures = Pictures(f"{name}, {steps} steps", tokens, self.images.shape, self.images.vocab)
            ours = self._timed(seconds, f"features {steps}", lambda pictures=pictures: statistics(pictures, self.features))
            distances.append(self.later(frechet, ours, self.reference))
        with atomic_write(self.out / f"{name}.npz") as temporary:
            np.savez_compressed(temporary, tokens=tokens[:SHOWN].numpy())
        row |= {"seconds": seconds, **provenance(self.device)}
        self.later(finish, self.out / f"{name}.json", row, distances)
        print(f"{name}: {', '.join(f'{part} {value:.1f} s' for part, value in seconds.items())}", flush=True)

    @staticmethod
    def _timed(seconds: dict[str, float], part: str, work: Callable[[], Any]) -> Any:
        start = time.monotonic()
        found = work()
        seconds[part] = time.monotonic() - start
        return found

    def train(self, name: str) -> dict[str, Any]:
        run = self.out / "runs" / name
        kept = run / "speed.json"
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than go on uncompiled, which is slower
        gc.collect()
        torch.cuda.empty_cache()
        source = Watched(self.images, self.device, self.settings["updates"], self.quiet)
        if not kept.exists():
            shutil.rmtree(run, ignore_errors=True)
        train(self.config(name, run), source)
        if not kept.exists():
            write_json(kept, source.seen(self.settings["batch"]))
        return json.loads(kept.read_text())

    def config(self, name: str, run: Path) -> Config:
        """The preset in fewer updates, with nothing but training on the way."""
        updates = self.settings["updates"]
        config = replace(PRESETS["mnist"], "method", name)
        settings = {"out": run, "steps": updates, "batch": self.settings["batch"], "seed": SEED, "device": str(self.device)}
        settings |= {"validate_every": 0, "validation_samples": min(ROWS, self.settings["test_images"])}
        settings |= {"save_every": updates, "keep": 1, "log_every": max(1, updates // 4), "optimizer.warmup": updates // 10}
        for key, value in settings.items():
            config = replace(config, key, value)
        return config

    def bound(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Bits per dimension of the bound on the test images and of its terms, with both errors."""
        count = self.settings["test_images"]
        rows = Shard(self.images.test, count)
        world = World(0, 1, self.device)
        found = dataset_nelbo(checkpoint.model, checkpoint.head, rows, PASSES, batch_size=ROWS, bf16=self.bf16, world=world)
        return {term: value["bits"] for term, value in summary(found).items()}

    def sample(self, checkpoint: Checkpoint, name: str, steps: int) -> Tensor:
        network = InferenceModel(checkpoint.model, checkpoint.head.process.states, self.bf16)
        shape = (self.settings["samples"], self.images.train.shape[1])
        tokens = m2s.sample(
            network,
            checkpoint.head,
            shape,
            steps=steps,
            sampler=METHODS[name].sampler,
            micro_batch=self.settings["micro_batch"],
            progress=True,
        )
        return tokens.to("cpu", torch.uint8)


def finish(path: Path, row: dict[str, Any], distances: list[concurrent.futures.Future[float]]) -> None:
    """The row with its distances into its file."""
    try:
        for drawn, distance in zip(row["samples"], distances, strict=True):
            drawn["fid"] = distance.result()
        write_json(path, finite(row))
    except Exception as error:
        fail(path, row["method"], row["settings"], error)


def fail(path: Path, name: str, settings: dict[str, Any], error: Exception) -> None:
    text = f"{type(error).__name__}: {error}"
    print(f"{name} failed: {text}", file=sys.stderr, flush=True)
    write_json(path, {"method": name, "settings": settings, "error": text})


def read_rows(out: Path) -> dict[str, dict[str, Any]]:
    """The rows that have a file, in the order of the methods."""
    found = {}
    for name in METHODS:
        path = out / f"{name}.json"
        if path.exists():
            try:
                found[name] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"{path} is no JSON ({error}): remove it, and the row is done again") from error
    return found


def take_over(table: Path, out: Path) -> None:
    """The rows of a mnist.json that have no file in the folder get one."""
    try:
        rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
        found = {row["method"]: row for row in rows if "error" not in row and row["method"] in METHODS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--rows is {table}, but no rows can be read there: {type(error).__name__}: {error}") from error
    there = read_rows(out)
    if rows := {**found, **there}:
        refuse_others(out, rows, next(iter(rows.values()))["settings"])
    output_folder(out)
    for name, row in found.items():
        if "error" in there.get(name, {"error": "not done"}):
            write_json(out / f"{name}.json", row)


def refuse_others(out: Path, rows: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
    """All rows were made alike."""
    for name, row in rows.items():
        for key in settings:
            if row["settings"].get(key) != settings[key]:
                raise UserError(
                    f"{out / name}.json was made with {key} {row['settings'].get(key)}, not {settings[key]}, and rows of one "
                    "table must be alike: give another folder, or the same numbers"
                )


def run(options: argparse.Namespace, started: float) -> bool:
    """Do the rows that are not done; whether none failed."""
    limit = options.limit or 10**9
    images = data.load("mnist")
    batch, samples = min(PRESETS["mnist"].run.batch, limit), min(PROTOCOL.samples or 0, limit)
    settings = {"updates": options.steps, "batch": batch, "seed": SEED, "test_images": min(len(images.test), limit)}
    settings |= {"passes": PASSES, "samples": samples, "micro_batch": min(MICRO, samples), "grid": "cosine"}
    done = read_rows(options.out)
    refuse_others(options.out, done, settings)
    missing = [name for name in options.methods if name not in done]
    todo = missing + [name for name in options.methods if "error" in done.get(name, {})]
    if not todo:
        print("all rows are done")
        return True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    features = inception.load(options.inception, device)
    output_folder(options.out)
    reference = Pictures(PROTOCOL.against, images.test[: min(PROTOCOL.count or 0, limit)], images.shape, images.vocab)
    theirs = statistics(reference, features)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        lab = Lab(options.out, images, device, features, theirs, settings, pool)
        for number, name in enumerate(todo):
            if time.monotonic() - started > options.seconds:
                print(f"{options.seconds:g} s are over, not begun: {', '.join(todo[number:])}")
                break
            print(f"{name} ({number + 1} of {len(todo)}), at {time.monotonic() - started:.0f} s", flush=True)
            try:
                lab.measure(name)
            except Exception as error:
                fail(options.out / f"{name}.json", name, settings, error)
                if device.type == "cuda":  # a recording that failed stays on its stream
                    torch.cuda.set_stream(torch.cuda.default_stream())
                if not answers(device):
                    print("the device no longer answers: the same command goes on in a new process", file=sys.stderr)
                    break
    return not any("error" in row for row in read_rows(options.out).values())


def answers(device: torch.device) -> bool:
    """Whether it still computes: some errors of a GPU last as long as the process."""
    try:
        return float(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    heads = ["method", "bits per dimension", *(f"FID, {steps}" for steps in STEPS)]
    heads += ["training images/s", "peak GiB", f"samples/s, {STEPS[-1]}", "sampler"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [f"`{row['method']}`"]
        if "error" in row:
            lines.append(f"| {cells[0]} | failed: {row['error'].splitlines()[0]} |" + " |" * (len(heads) - 2))
            continue
        bits, drawn = row["bound"]["bound"], {each["steps"]: each for each in row["samples"]}
        cells.append(f"{shown(bits['value'], '.4f')} ± {shown(bits['rows_error'], '.4f')}")
        cells += [shown(drawn.get(steps, {}).get("fid"), ".2f") for steps in STEPS]
        last = row["samples"][-1]
        if last["steps"] not in STEPS:
            cells[-1] = f"{shown(last['fid'], '.2f')} ({last['steps']} steps)"
        cells += [shown(row["images_per_second"], ",.0f"), shown(row["peak_gib"], ".1f")]
        cells += [shown(last["samples_per_second"], ",.1f"), row["sampler"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def summarise(out: Path) -> None:
    """mnist.json, mnist.png and samples.png from the rows' files; the table to the screen."""
    from m2s.report.methods import compared, sheet

    rows = list(read_rows(out).values())
    if not rows:
        raise UserError(f"{out} holds no rows: make them with python experiments/mnist.py {out}")
    refuse_others(out, {row["method"]: row for row in rows}, rows[0]["settings"])
    print("\n".join(table(rows)))
    transformers = [f"`{row['method']}`" for row in rows if row.get("network") == "dit"]
    if transformers:
        print(f"\nNot the U-Net but a causal transformer, with one call for each pixel: {', '.join(transformers)}.")
    write_json(out / "mnist.json", {"command": command(), "settings": rows[0]["settings"], "rows": rows})
    made = [row for row in rows if "error" not in row]
    pictures = {}
    for name in (row["method"] for row in made):
        if (out / f"{name}.npz").exists():  # a row that came here by itself has none
            with np.load(out / f"{name}.npz", allow_pickle=False) as file:
                pictures[name] = file["tokens"][:ACROSS].reshape(-1, *(math.isqrt(file["tokens"].shape[1]),) * 2)
    for name, figure in (("mnist.png", made and compared(made, STEPS)), ("samples.png", pictures and sheet(pictures))):
        if figure:
            with atomic_write(out / name) as temporary:
                figure.savefig(temporary, dpi=200, bbox_inches="tight")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="A,B,C", help="these only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so many")
    parser.add_argument("--steps", type=int, default=UPDATES, help="updates of a row, the same for all (%(default)s)")
    parser.add_argument("--limit", type=int, help="a rehearsal: so many images of a batch, of the test set, of the samples")
    parser.add_argument("--inception", type=Path, metavar="FILE", help="as m2s evaluate fid takes it")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="a mnist.json: its rows are done, but for those done here")
    parser.add_argument("--table", action="store_true", help="make the table and the figures from the rows' files")
    options = parser.parse_args(arguments)
    options.methods = options.methods.split(",")
    for name in options.methods:
        if name not in METHODS:
            raise UserError(f"there is no method {name!r}: {suggest(name, METHODS)}")
    if options.steps < 2:
        raise UserError(f"--steps is {options.steps}, but it must be at least 2: the first updates are not timed")
    if options.limit is not None and options.limit < 2:
        raise UserError(f"--limit is {options.limit}, but a covariance needs at least 2 images")
    return options


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    try:
        options = parse(arguments)
        if options.rows:
            take_over(options.rows, options.out)
        if options.table:
            summarise(options.out)
            return 0
        return 0 if run(options, started) else 1
    except UserError as error:
        print(f"mnist.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
