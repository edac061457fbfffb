"""`m2s audit CHECKPOINT`: does a posterior stand behind the scores of a trained network?"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2s.cli.sampling_args import BAR, SamplingArgs, advance, settings
from m2s.errors import UserError
from m2s.io import atomic_write, output_file, output_folder, require_absent, write_json

if TYPE_CHECKING:
    from m2s.hub import Checkpoint
    from m2s.samplers.options import SamplingOptions
    from m2s.samplers.shards import SampleShards


@dataclass(frozen=True)
class AuditArgs(SamplingArgs):
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
        from m2s.evaluation.audit import check_auditable

        checkpoint = self.load()
        try:
            check_auditable(checkpoint.head)
        except TypeError as error:
            raise UserError(f"{self.checkpoint} cannot be audited: {self.typed(error)}") from error
        return checkpoint

    def options(self, checkpoint: "Checkpoint", project: bool = False, **more: Any) -> "SamplingOptions":
        """What is asked for; of samplers the audit's own, whatever the head."""
        from m2s.evaluation.audit import default_audit_sampler

        sampler = default_audit_sampler(checkpoint.head.process) if self.sampler == "auto" else self.sampler
        return SamplingArgs.options(replace(self, sampler=sampler), checkpoint, project, **more)

    def parts(self, out: Path, checkpoint: "Checkpoint", options: "SamplingOptions") -> "SampleShards":
        """Where samples and counts are kept until all are there."""
        from m2s.samplers.shards import SampleShards

        return SampleShards(out, self.n, options.shape[1], self.batch_size, settings(self, checkpoint, options))

    def watch(self, checkpoint: "Checkpoint", options: "SamplingOptions", parts: "SampleShards", what: str) -> dict[str, Any]:
        """Draw and audit what is yet missing, with a bar; what audit.json holds."""
        from tqdm import tqdm

        from m2s.evaluation.audit import audit_parts
        from m2s.ops import use_backend
        from m2s.provenance import provenance
        from m2s.samplers.shards import CorruptShardError

        windows = len(list(options.windows()))
        try:
            if done := parts.open():
                print(f"going on: {done} of {parts.n} samples were drawn before")
            bar = tqdm(total=float(parts.n - done), desc=what, unit="sample", bar_format=BAR)
            with use_backend(self.kernels), bar:
                found = audit_parts(self.network(checkpoint), options, parts, lambda step: advance(bar, step, windows))
        except CorruptShardError as error:
            raise UserError(str(error)) from error
        except (ValueError, TypeError) as error:
            raise UserError(f"the audit came to a halt: {self.typed(error)}") from error
        return {
            **provenance(next(checkpoint.model.parameters()).device),
            "checkpoint": self.checkpoint,
            "head": repr(checkpoint.head),
            "process": type(checkpoint.head.process).__name__,
            "settings": parts.settings,
            **found.summary(),
        }


@dataclass(frozen=True)
class Audit(AuditArgs):
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
        require_absent(files[:1] if begun(files[0]) else files, self.overwrite)
        checkpoint = self.prepare()
        options = self.options(checkpoint)
        output_folder(self.out)
        for path in files:
            output_file(path, (path.suffix,))
        parts = self.parts(files[0], checkpoint, options)
        found = self.watch(checkpoint, options, parts, "auditing")
        with atomic_write(files[1]) as temporary:
            temporary.write_text(table(found) + "\n", encoding="utf-8")
        write_figure(found, files[2])
        write_json(files[0], found)
        parts.close()
        print(table(found, rows=9))
        print(f"\n{', '.join(map(str, files))} written")


def begun(out: Path) -> bool:
    """Whether a run that was interrupted has left parts of what is to be joined in `out`."""
    return out.with_name(out.name + ".parts").is_dir()
