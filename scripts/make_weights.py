"""Make the weights that ship with the package, `m2s/hub/weights/NAME`, and check the numbers of their model cards.

    python scripts/make_weights.py digits                      # all weights of a group: digits, chars or mnist
    python scripts/make_weights.py chars --text books.txt      # the text, the first time
    python scripts/make_weights.py digits --check              # measure again, and compare with the model cards

An interrupted call is resumed by the same call. The networks of a group have the same size, batches, training steps and noise.
The weights that ship are the averaged ones in bf16, and everything is measured with these. `figures.json` has the numbers that
the model card, README.md, quotes, and the commands of m2s that measured them.

The text of the group chars is a sample of Project Gutenberg with a line <|endoftext|> between documents. It is reduced to the
27 characters of text8 here: letters without accents in lower case, and single spaces.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weight_recipes import GROUPS, Group

import m2s
from m2s.cli import run as run_m2s
from m2s.errors import UserError, suggest
from m2s.hub import builtin
from m2s.hub.card import CARD, model_card
from m2s.io import atomic_write, output_folder, write_json
from m2s.provenance import recorded_command
from m2s.training import train
from m2s.training.config import RECORD, Config, replace

FIGURES = "figures.json"
LARGEST = 10 * 10**6  # bytes of all weights together
TOLERANCE = 1e-3  # relative difference of a number between two machines


def publish(name: str, summary: str, run: Path) -> Path:
    """Write the averaged weights of a run in bf16 to the package.

    Args:
        name: The name of the weights.
        summary: One line about them, for lists.
        run: The folder of the run.

    Returns:
        The folder of the weights.
    """
    checkpoint = m2s.load(run)
    checkpoint.model.bfloat16()
    extra = {key: checkpoint.config["extra"][key] for key in ("step", "method", "seed")}
    target = builtin.folder() / name
    shutil.rmtree(target, ignore_errors=True)
    m2s.hub.save(
        target, checkpoint.model, checkpoint.head, checkpoint.data, checkpoint.tokenizer, {**extra, "summary": summary}
    )
    config = json.loads((run / RECORD).read_text(encoding="utf-8"))["config"]
    config["run"]["out"] = f"runs/{name}"  # the record names no folder of this machine
    write_json(target / RECORD, {"config": config})
    return target


def measure(group: Group, work: Path) -> dict[str, dict[str, Any]]:
    """Run the commands of a group that measure its weights.

    Args:
        group: The group.
        work: A folder for the results of the commands.

    Returns:
        The contents of figures.json, by name of the weights.
    """
    for words in group.commands(work):
        print(f"$ m2s {' '.join(words)}", flush=True)
        with recorded_command(["m2s", *words]):
            run_m2s(words)
    return group.read(work)


def write_card(name: str, group: Group, figures: dict[str, Any]) -> None:
    """Write figures.json and the model card of weights.

    Args:
        name: The name of the weights.
        group: Their group.
        figures: The contents of figures.json.
    """
    folder = builtin.folder() / name
    write_json(folder / FIGURES, figures)
    checkpoint = m2s.load(builtin.PREFIX + name)
    made = f"python scripts/make_weights.py {group.name}"
    parts = (checkpoint.model, checkpoint.head, checkpoint.data, checkpoint.config)
    sections = {"Figures": group.card(name, figures), "Data": group.data}
    with atomic_write(folder / CARD) as temporary:
        temporary.write_text(model_card(*parts, made, builtin.PREFIX + name, sections), encoding="utf-8")


def make(group: Group, out: Path, text: Path | None) -> None:
    """Train, publish and measure the weights of a group.

    Args:
        group: The group.
        out: The folder of the runs.
        text: The text, for a group that is trained on text.

    Raises:
        UserError: The text is missing, or the weights are too large.
    """
    group.prepare(text)
    for name, recipe in group.recipes.items():
        config: Config = recipe.config
        train(replace(config, "out", output_folder(out / "runs") / name))
        publish(name, recipe.summary, out / "runs" / name)
    work = out / "measured" / group.name
    shutil.rmtree(work, ignore_errors=True)  # results of earlier weights
    for name, figures in measure(group, output_folder(work)).items():
        write_card(name, group, figures)
    size = sum(file.stat().st_size for file in builtin.folder().rglob("*") if file.is_file())
    print(f"{size / 1e6:.2f} MB of weights in {builtin.folder()}")
    if size > LARGEST:
        raise UserError(f"the weights have {size:,} bytes together, but at most {LARGEST:,} ship: make a network smaller")


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Return which numbers of two structures differ by more than rounding.

    Args:
        before: Numbers in dictionaries and lists.
        after: The same structure.
        where: The keys that lead here.

    Returns:
        One line for each number that differs.
    """
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return [line for key in before for line in differences(before[key], after[key], f"{where}.{key}".strip("."))]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for i, (ours, theirs) in pairs for line in differences(ours, theirs, f"{where}[{i}]")]
    if isinstance(before, int | float) and isinstance(after, int | float):
        return [] if abs(before - after) <= TOLERANCE * max(abs(before), abs(after)) else [f"{where}: {before} and {after}"]
    return [] if before == after else [f"{where}: {before} and {after}"]


def check(group: Group, out: Path) -> bool:
    """Measure the weights of a group again and compare with their figures.json.

    Args:
        group: The group.
        out: The folder of the results.

    Returns:
        Whether all numbers agree.
    """
    work = out / "checked" / group.name
    shutil.rmtree(work, ignore_errors=True)
    agree = True
    for name, found in measure(group, output_folder(work)).items():
        recorded = json.loads((builtin.folder() / name / FIGURES).read_text(encoding="utf-8"))
        lines = differences(recorded["values"], found["values"])
        agree &= not lines
        print("\n".join([f"{name}: {'the numbers of the card are reproduced' if not lines else 'other numbers:'}", *lines]))
    return agree


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Returns:
        0: done, 1: numbers of a model card differ, 2: the input is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--out", type=Path, default=Path("out/weights"), help="folder of the runs and results (%(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="chars: the text, the first time")
    parser.add_argument("--check", action="store_true", help="measure again, and compare with the model cards")
    options = parser.parse_args(arguments)
    try:
        if options.group not in GROUPS:
            raise UserError(f"there is no group {options.group!r}: {suggest(options.group, GROUPS)}")
        group = GROUPS[options.group]
        if options.check:
            return 0 if check(group, options.out) else 1
        make(group, options.out, options.text)
        return 0
    except UserError as error:
        print(f"make_weights.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
