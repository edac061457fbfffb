"""`m2s audit CHECKPOINT`: does a posterior stand behind the scores of a trained network?"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2s.cli.drawing import BAR, Drawing, advance, settings
from m2s.report import Refused, folder, refuse_existing, target, whole, write_json

if TYPE_CHECKING:
    from m2s.hub import Checkpoint
    from m2s.sampler.options import Options
    from m2s.sampler.parts import Parts


@dataclass(frozen=True)
class Watched(Drawing):
    """What is drawn with an eye on every score, by default as SEDD's release draws."""

    sampler: str = "auto"
    """How to take a step, by any sampler of m2s sample that serves the model. auto: analytic (SEDD's release), or euler where
    rates are tabulated."""
    grid: str = "linear"
    batch_size: int = 16
    device: str = ""
    """cpu or cuda; by default the best there is."""

    def prepare(self) -> "Checkpoint":
        """The checkpoint, or why there is nothing to audit."""
        from m2s.evaluate.audit import refuse

        checkpoint = self.load()
        try:
            refuse(checkpoint.head)
        except TypeError as error:
            raise Refused(f"{self.checkpoint} cannot be audited: {self.typed(error)}") from error
        return checkpoint

    def options(self, checkpoint: "Checkpoint", project: bool = False, **more: Any) -> "Options":
        """What is asked for; of samplers the audit's own, whatever the head."""
        from m2s.evaluate.audit import usual

        sampler = usual(checkpoint.head.process) if self.sampler == "auto" else self.sampler
        return Drawing.options(replace(self, sampler=sampler), checkpoint, project, **more)

    def parts(self, out: Path, checkpoint: "Checkpoint", options: "Options") -> "Parts":
        """Where samples and counts are kept until all are there."""
        from m2s.sampler.parts import Parts

        return Parts(out, self.n, options.shape[1], self.batch_size, settings(self, checkpoint, options))

    def watch(self, checkpoint: "Checkpoint", options: "Options", parts: "Parts", what: str) -> dict[str, Any]:
        """Draw and audit what is yet missing, with a bar; what audit.json holds."""
        from tqdm import tqdm

        from m2s.evaluate.audit import audit_parts
        from m2s.ops import form
        from m2s.report.origin import origin
        from m2s.sampler.parts import Damaged

        windows = len(list(options.windows()))
        try:
            if done := parts.open():
                print(f"going on: {done} of {parts.n} samples were drawn before")
            bar = tqdm(total=float(parts.n - done), desc=what, unit="sample", bar_format=BAR)
            with form(self.kernels), bar:
                found = audit_parts(self.network(checkpoint), options, parts, lambda step: advance(bar, step, windows))
        except Damaged as error:
            raise Refused(str(error)) from error
        except (ValueError, TypeError) as error:
            raise Refused(f"the audit came to a halt: {self.typed(error)}") from error
        return {
            **origin(next(checkpoint.model.parameters()).device),
            "checkpoint": self.checkpoint,
            "head": repr(checkpoint.head),
            "process": type(checkpoint.head.process).__name__,
            "settings": parts.settings,
            **found.summary(),
        }


@dataclass(frozen=True)
class Audit(Watched):
    """Draw samples from a checkpoint and look at the score of every position at every step: how many have a posterior.

    Writes audit.json (all counts, overall and step by step), audit.txt (the table of the paper, and the steps) and audit.png
    (four panels) into a folder. The samples are those of m2s sample by the same sampler and grid; the scores are looked at as
    they are, and once more after projection. For uniform, absorbing (masked positions only), hybrid and tabulated processes, a
    free score or a posterior. A killed audit goes on where it stopped when the same command is given again.

    Example: m2s audit runs/sedd --n 128 --out audit/
    """

    out: Path
    """The folder for audit.json, audit.txt and audit.png."""
    n: int = 64

    def run(self) -> None:
        from m2s.report.audit import table, write_figure

        files = [self.out / f"audit{suffix}" for suffix in (".json", ".txt", ".png")]
        refuse_existing(files[:1] if begun(files[0]) else files, self.overwrite)
        checkpoint = self.prepare()
        options = self.options(checkpoint)
        folder(self.out)
        for path in files:
            target(path, (path.suffix,))
        parts = self.parts(files[0], checkpoint, options)
        found = self.watch(checkpoint, options, parts, "auditing")
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
