"""Draw the pictures of docs/concepts, for light and for dark pages, and write their numbers beside them.

    python scripts/concept_figures.py                       # all of them, half a minute on one core
    python scripts/concept_figures.py losses realizability  # some of them

For each NAME it writes docs/concepts/figures/NAME.json with every number that is drawn, NAME.svg and NAME-dark.svg. The numbers
of `samplers` come from experiments/convergence.py.
"""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from concept_pictures import losses, parameterizations, processes, randomness, realizability, samplers

from m2s.io import atomic_write, write_json
from m2s.report.blocks import svg_text

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "concepts" / "figures"
PICTURES: dict[str, ModuleType] = {
    "processes": processes,
    "parameterizations": parameterizations,
    "losses": losses,
    "samplers": samplers,
    "realizability": realizability,
    "randomness": randomness,
}


def write(name: str, folder: Path = FOLDER) -> None:
    """Compute one picture and write its three files.

    Args:
        name: A name in `PICTURES`.
        folder: Where the files go.
    """
    picture = PICTURES[name]
    write_json(folder / f"{name}.json", picture.compute())
    values = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    for suffix, dark in (("", False), ("-dark", True)):
        with atomic_write(folder / f"{name}{suffix}.svg") as temporary:
            temporary.write_text(svg_text(picture.draw(values), dark), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Draw the named pictures, or all of them; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.names or PICTURES:
        write(name)
        print(f"{FOLDER / name}.svg", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
