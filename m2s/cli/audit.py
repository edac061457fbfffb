"""`m2s audit CHECKPOINT`: does a posterior stand behind the scores of a trained network?"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.sample import BAR, Sample, _advance
from m2s.report import Refused, folder, target, whole, write_json

if TYPE_CHECKING:
    from m2s.evaluate import audit
    from m2s.hub import Checkpoint
    from m2s.sampler.options import Options
    from m2s.sampler.parts import Parts


@dataclass(frozen=True)
class Audit:
    """Draw samples from a checkpoint and look at the score of every position at every step: how many have a posterior.

    Writes audit.json (all counts, overall and step by step), audit.txt (the table of the paper, and the steps) and audit.png
    (four panels) into a folder. The samples are those of m2s sample; the scores are looked at as they are, and once more after
    projection. For uniform, absorbing (masked positions only), hybrid and tabulated processes, a free score or a posterior. A
    killed audit goes on where it stopped when the same command is given again.

    Example: m2s audit runs/sedd --n 128 --out audit/
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A folder with config.json and model.safetensors, or a repository owner/name of the Hugging Face hub."""
    out: Path
    """The folder for audit.json, audit.txt and audit.png."""
    n: int = 64
    """How many samples."""
    steps: int = 128
    """Steps from noise to data."""
    sampler: str = "analytic"
    """How to take a step: analytic (SEDD's release, whose weights can be negative), or any of m2s sample."""
    grid: str = "linear"
    """Where the times lie: linear (SEDD's release) or cosine."""
    seed: int = 0
    """Of all randomness."""
    length: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens of each sample; by default what the network was trained on."""
    batch_size: int = 16
    """Samples drawn together, and kept together if the audit is interrupted."""
    device: str = ""
    """cpu or cuda; by default the best there is."""
    overwrite: bool = False
    """Replace a finished audit."""

    def run(self) -> None:
        from m2s.report.audit import table, write_figure
        from m2s.sampler.parts import Parts

        files = [self.out / f"audit{suffix}" for suffix in (".json", ".txt", ".png")]
        refuse_existing(files[:1] if begun(files[0]) else files, self.overwrite)
        asked = Sample(
            self.checkpoint,
            self.out / "audit.npz",
            n=self.n,
            steps=self.steps,
            sampler=self.sampler,
            grid=self.grid,
            seed=self.seed,
            length=self.length,
            batch_size=self.batch_size,
        )
        checkpoint, options = prepare(asked, self.device)
        folder(self.out)
        for path in files:
            target(path, (path.suffix,))
        parts = Parts(files[0], self.n, options.shape[1], self.batch_size, asked._settings(checkpoint, None))
        found = describe(self.checkpoint, checkpoint, parts.settings, watch(checkpoint, options, parts, "auditing"))
        with whole(files[1]) as temporary:
            temporary.write_text(table(found) + "\n", encoding="utf-8")
        write_figure(found, files[2])
        write_json(files[0], found)
        parts.close()
        print(table(found, rows=9))
        print(f"\n{', '.join(map(str, files))} written")


def begun(out: Path) -> bool:
    """Whether a run that was interrupted has left parts of what is to be joined in `out`."""
    return out.with_name(out.name + ".parts").is_dir()


def refuse_existing(files: list[Path], overwrite: bool) -> None:
    there = next((path for path in files if path.exists()), None)
    if there is not None and not overwrite:
        raise Refused(f"{there} is there already: give another --out, or --overwrite to replace it")


def prepare(asked: Sample, device: str) -> "tuple[Checkpoint, Options]":
    """The checkpoint and what is to be drawn from it, or why there is nothing to audit."""
    import torch

    from m2s.evaluate.audit import refuse

    if asked.n < 1 or asked.batch_size < 1:
        raise Refused(f"--n is {asked.n} and --batch-size is {asked.batch_size}, but both must be at least 1")
    checkpoint = asked._load(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        refuse(checkpoint.head)
    except TypeError as error:
        raise Refused(f"{asked.checkpoint} cannot be audited: {error}") from error
    return checkpoint, asked._options(checkpoint, *asked._length(checkpoint))


def watch(checkpoint: "Checkpoint", options: "Options", parts: "Parts", what: str) -> "audit.Audit":
    """Draw and audit what is yet missing, with a bar."""
    from tqdm import tqdm

    from m2s.evaluate.audit import audit_parts
    from m2s.sampler.parts import Damaged

    windows = len(list(options.windows()))
    try:
        if done := parts.open():
            print(f"going on: {done} of {parts.n} samples were drawn before")
        with tqdm(total=float(parts.n - done), desc=what, unit="sample", bar_format=BAR) as bar:
            return audit_parts(checkpoint.model, options, parts, lambda step: _advance(bar, step, windows))
    except Damaged as error:
        raise Refused(str(error)) from error
    except (ValueError, TypeError) as error:
        raise Refused(f"the audit came to a halt: {error}") from error


def describe(name: str, checkpoint: "Checkpoint", settings: dict[str, Any], found: "audit.Audit") -> dict[str, Any]:
    """What audit.json holds."""
    import m2s

    head = checkpoint.head
    return {
        "m2s": m2s.__version__,
        "command": sys.argv,
        "checkpoint": name,
        "head": repr(head),
        "process": type(head.process).__name__,
        "settings": settings,
        **found.summary(),
    }
