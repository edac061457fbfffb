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
import sys
import time
from pathlib import Path

import torch
from mnist_measure import MICRO_BATCH, PASSES, PROTOCOL, Experiment
from mnist_rows import RowKey, check_settings, import_rows, read_rows, write_error
from mnist_table import write_table

from m2s import data
from m2s.errors import UserError, suggest
from m2s.evaluation import inception
from m2s.io import output_folder
from m2s.methods import METHODS
from m2s.presets import PRESETS

TRAINING_STEPS = 3000


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
