"""`m2s audit CHECKPOINT`: count how many scores of a trained network have a posterior."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from m2s.cli.help_text import help_from_source
from m2s.cli.sample_files import advance, settings
from m2s.cli.sampling_args import SamplingArgs
from m2s.errors import UserError, print_escaped
from m2s.io import atomic_write, output_file, output_folder, read_regular, require_absent, write_json
from m2s.methods.config import AutoInt
from m2s.progress import Progress

if TYPE_CHECKING:
    from m2s.hub import Checkpoint
    from m2s.samplers.options import SamplingOptions
    from m2s.samplers.shards import SampleShards


@dataclass(frozen=True)
@help_from_source
class AuditArgs(SamplingArgs):
    """What to draw while every score is classified. The defaults are those of SEDD's release."""

    sampler: str = "auto"
    """The rule for one step: any sampler of m2s sample that supports the model. auto is analytic (SEDD's release), or euler
    where rates are tabulated."""
    grid: str = "linear"
    """Spacing of the times: linear (as in SEDD's release) or cosine (small steps first)."""
    least_batch: ClassVar[int] = 16
    batch_size: AutoInt = None
    """Samples drawn together. An interrupted run resumes after the last complete batch. auto: 16, or --micro-batch if that is
    more."""
    device: str = ""
    """cpu, cuda or cuda:1; by default cuda where there is a GPU, otherwise cpu."""

    def load_auditable(self) -> "Checkpoint":
        """Load the checkpoint.

        Returns:
            The checkpoint, on the device.

        Raises:
            UserError: It cannot be read, or has no scores to audit.
        """
        from m2s.evaluation.audit import check_auditable

        checkpoint = self.load()
        try:
            check_auditable(checkpoint.head)
        except TypeError as error:
            raise UserError(f"{self.checkpoint} cannot be audited: {error}") from error
        return checkpoint

    def options(self, checkpoint: "Checkpoint", project: bool = False, **more: Any) -> "SamplingOptions":
        """Build the options of `m2s.sample`, with the audit's default sampler."""
        from m2s.samplers import default_sampler

        sampler = default_sampler(checkpoint.head, for_audit=True) if self.sampler == "auto" else self.sampler
        return SamplingArgs.options(replace(self, sampler=sampler), checkpoint, project, **more)

    def shards(
        self, out: Path, checkpoint: "Checkpoint", options: "SamplingOptions", audited: int | None = None
    ) -> "SampleShards":
        """Return the folder that holds samples and counts until all are drawn.

        Args:
            out: The folder.
            checkpoint: The model.
            options: The options of all samples together.
            audited: Audit only the batches that begin before this sample; None: all.
        """
        from m2s.samplers.shards import SampleShards, read_unfinished

        size = self.shard_size(options, read_unfinished(out))
        given = settings(self, checkpoint, options) | ({} if audited is None else {"audited": audited})
        return SampleShards(out, self.n, options.shape[1], size, given)

    def audit(
        self,
        checkpoint: "Checkpoint",
        options: "SamplingOptions",
        parts: "SampleShards",
        title: str,
        audited: int | None = None,
    ) -> dict[str, Any]:
        """Draw and audit the samples that are missing, and show the progress.

        Args:
            checkpoint: The model.
            options: The options of all samples together.
            parts: Where samples and counts are saved, batch by batch.
            title: The title of the progress.
            audited: Audit only the batches that begin before this sample; None: all.

        Returns:
            The content of audit.json.

        Raises:
            UserError: A shard is damaged, or the network or the sampler fails.
        """
        from m2s.evaluation.audit import audit_parts
        from m2s.ops import use_backend
        from m2s.provenance import provenance
        from m2s.samplers.shards import CorruptShardError

        windows = len(list(options.windows()))
        try:
            if done := parts.open(self.overwrite):
                print(f"resuming: {done} of {parts.n} samples were drawn before")
            with use_backend(self.kernels), Progress(float(parts.n - done), title, "sample") as progress:
                network = self.network(checkpoint)
                found = audit_parts(network, options, parts, lambda step: advance(progress, step, windows), audited)
        except CorruptShardError as error:
            raise UserError(str(error)) from error
        except (ValueError, TypeError) as error:
            raise UserError(f"the audit failed: {error}") from error
        return {
            **provenance(next(checkpoint.model.parameters()).device),
            "checkpoint": self.checkpoint,
            "head": repr(checkpoint.head),
            "process": type(checkpoint.head.process).__name__,
            "settings": parts.settings,
            **found.summary(),
        }


@dataclass(frozen=True)
@help_from_source
class Audit(AuditArgs):
    """Draw samples from a checkpoint and classify the score of every position at every step: how many have a posterior?

    Writes three files into a folder: audit.json (all counts, overall and for each step), audit.txt (the table of the paper, and
    the steps) and audit.png (four panels). The samples are those of m2s sample with the same sampler and grid. The scores are
    measured as they are, and again after projection.

    Supports uniform, absorbing (masked positions only), hybrid and tabulated processes, with an unconstrained score or a
    posterior. The same command, given again, resumes an interrupted audit.

    Example: m2s audit runs/sedd --n 128 --out audit/
    """

    out: Path
    """The folder for audit.json, audit.txt and audit.png."""
    n: int = 64
    """Number of samples."""

    def run(self) -> None:
        """Audit the checkpoint, write the files and print the table."""
        from m2s.report.audit import format_table, write_figure
        from m2s.samplers.shards import read_unfinished

        files = [self.out / f"audit{suffix}" for suffix in (".json", ".txt", ".png")]
        remove_finished_parts(files[0], {files[0]: ("settings",)})
        require_absent(files[:1] if is_unfinished(files[0]) else files, self.overwrite)
        checkpoint = self.load_auditable()
        options = self.options(checkpoint, micro_batch=self.resumed_micro_batch(read_unfinished(files[0])))
        output_folder(self.out)
        for path in files:
            output_file(path, (path.suffix,))
        parts = self.shards(files[0], checkpoint, options)
        self.print_padding(options)
        found = self.audit(checkpoint, options, parts, "auditing")
        with atomic_write(files[1]) as temporary:
            temporary.write_text(format_table(found) + "\n", encoding="utf-8")
        write_figure(found, files[2])
        write_json(files[0], found)
        parts.delete()
        print(format_table(found, rows=9))
        print_escaped(f"\n{', '.join(map(str, files))} written")


def remove_finished_parts(result: Path, parts: dict[Path, tuple[str, ...]]) -> None:
    """Delete what a run left that was killed after it had written its result.

    Args:
        result: The .json that is written last.
        parts: The files whose batches were joined, and where the result records the settings of each.
    """
    from m2s.samplers.shards import remove_finished

    if not result.is_file():
        return
    for out, keys in parts.items():
        try:
            settings = json.loads(read_regular(result))
            for key in keys:
                settings = settings[key]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            settings = None
        remove_finished(out, settings)


def is_unfinished(out: Path) -> bool:
    """Return whether an interrupted run has left batches that are to be joined in `out`.

    Args:
        out: The file that the run was to write.
    """
    return out.with_name(out.name + ".parts").is_dir()
