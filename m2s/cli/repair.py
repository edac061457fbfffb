"""`m2s repair CHECKPOINT`: draw the same samples with and without projection, and measure both."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.audit import AuditArgs, is_unfinished, remove_finished_parts
from m2s.cli.errors import message
from m2s.cli.help_text import help_from_source
from m2s.cli.options import command_options
from m2s.cli.sample_files import write_samples
from m2s.devices import resolve_device
from m2s.errors import UserError, print_escaped
from m2s.io import atomic_write, output_file, output_folder, require_absent, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.hub import Checkpoint
    from m2s.samplers.shards import SampleShards

MEASURES = ("genppl", "fid", "none")
MAX_PAIRS = 32  # in the picture

Measure = Callable[[dict[str, Path]], dict[str, Any] | None]  # from the files of both arms to the content of repair.json


@dataclass(frozen=True)
@help_from_source
class Repair(AuditArgs):
    """Sample an unconstrained score twice from the same noise, once as it is and once projected, and measure both.

    The measure is generative perplexity for text (with intervals over pairs of sequences), FID for images, or none. Without a
    measure the command still counts the classes of the scores, negative weights, and the tokens that changed.

    Writes repair.json, repair.txt, unprojected.npz and projected.npz into a folder, and pairs.png (images) or unprojected.txt
    and projected.txt (text). The same command, given again, resumes an interrupted run.

    Example: m2s repair runs/sedd --n 1024 --judge gpt2-large --protocol mdlm --out repair/

    Example: m2s repair runs/sedd --n 64 --measure none --out repair/
    """

    out: Path
    """The folder for all files."""
    n: int = 1024
    """Number of pairs of samples."""
    audited: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Classify the scores of the first so many pairs, in complete batches, which takes most of the time of a large text
    model; 0: of none. By default of all."""
    measure: Annotated[str, tyro.conf.arg(metavar="genppl|fid|none")] = ""
    """What is measured: genppl, fid or none; by default genppl for text and fid for images."""
    protocol: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Protocol of the measure, as in m2s evaluate. genppl: paper (the default), sedd or mdlm. fid: mnist-5k or
    cifar10-50k."""
    judge: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER|FILE")] = ""
    """genppl: the causal language model that scores the text; by default SmolLM2-135M, and for the protocols sedd and
    mdlm gpt2-large."""
    against: Annotated[str, tyro.conf.arg(metavar="NAME:SPLIT")] = ""
    """fid: the data to compare with, instead of a protocol, such as mnist:test."""
    inception: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """fid: weights of Inception, as in m2s evaluate fid."""
    few: bool = False
    """fid: accept too few samples for a covariance of full rank, for a quick trial."""
    resamples: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Bootstrap resamples of the pairs, for the intervals; by default 2,000, and 100 for FID."""

    def run(self) -> None:
        """Draw both arms, measure them, write the files and print the table.

        Raises:
            UserError: The checkpoint predicts a posterior, or a file cannot be written.
        """
        from m2s.data.tokenizer import check_tokenizer
        from m2s.evaluation.repair import ARMS, count_changes, format_table
        from m2s.samplers.shards import read_unfinished

        if self.audited is not None and self.audited < 0:
            raise UserError(option="audited", value=self.audited, expected="at least 0")
        samples = {arm: self.out / f"{arm}.npz" for arm in ARMS}
        numbers, words = self.out / "repair.json", self.out / "repair.txt"
        remove_finished_parts(numbers, {path: ("audits", arm, "settings") for arm, path in samples.items()})
        others = [path for path in samples.values() if not is_unfinished(path)]
        require_absent([numbers, *others, *([words] if len(others) == len(samples) else [])], self.overwrite)
        checkpoint = self.load_auditable()
        if checkpoint.head.has_posterior:
            raise UserError(f"{self.checkpoint} predicts a posterior already ({checkpoint.head}): there is nothing to repair")
        if checkpoint.tokenizer is not None:
            check_tokenizer(checkpoint.tokenizer)
        # Both arms have the same number, also where only one was started before.
        rows = self.resumed_micro_batch(*(read_unfinished(path) for path in samples.values()))
        options = {arm: self.options(checkpoint, project=arm == "projected", micro_batch=rows) for arm in ARMS}
        measure = self._find_measure(checkpoint)
        output_folder(self.out)
        for path in (numbers, words, *samples.values()):
            output_file(path, (path.suffix,))
        tokens: dict[str, Tensor] = {}
        audits: dict[str, Any] = {}
        shards: list[SampleShards] = []
        self.print_padding(options["unprojected"])
        for arm in ARMS:
            parts = self.shards(samples[arm], checkpoint, options[arm], self.audited)
            audits[arm] = self.audit(checkpoint, options[arm], parts, arm, self.audited)
            tokens[arm] = parts.read_all()
            write_samples(samples[arm], tokens[arm], checkpoint, parts.settings)
            shards.append(parts)
        self._write_pairs(checkpoint, tokens)
        first = audits["unprojected"]
        result = {
            **{name: first[name] for name in ("command", "device", "versions", "checkpoint", "head", "process")},
            "changes": count_changes(tokens["unprojected"], tokens["projected"]),
            "measure": measure(samples),
            "audits": audits,
        }
        with atomic_write(words) as temporary:
            temporary.write_text(format_table(result) + "\n", encoding="utf-8")
        write_json(numbers, result)
        for parts in shards:
            parts.delete()
        print_escaped(f"\n{format_table(result)}\n\n{numbers} and {words} written")

    def _write_pairs(self, checkpoint: "Checkpoint", tokens: "dict[str, Tensor]") -> None:
        """Write the images of both arms side by side, or their texts."""
        import torch

        from m2s.report.samples import write_pictures, write_text

        data = checkpoint.data or {}
        if data.get("kind") == "image":
            count = max(1, 2 * math.isqrt(min(self.n, MAX_PAIRS) // 2) ** 2)  # an even width keeps pairs in one row
            pairs = torch.stack([tokens["unprojected"][:count], tokens["projected"][:count]], 1).flatten(0, 1)
            write_pictures(self.out / "pairs.png", pairs, tuple(data["shape"]), data["levels"])
        elif checkpoint.tokenizer is not None:
            for arm, rows in tokens.items():
                write_text(self.out / f"{arm}.txt", rows, checkpoint.tokenizer)

    def _find_measure(self, checkpoint: "Checkpoint") -> Measure:
        """The function that measures the samples. Everything it needs is loaded here, before samples are drawn."""
        kind = (checkpoint.data or {}).get("kind")
        chosen = self.measure or {"image": "fid", "text": "genppl"}.get(str(kind), "none")
        if chosen not in MEASURES:
            raise UserError(option="measure", value=chosen, expected=f"one of {', '.join(MEASURES)}")
        if chosen == "none":
            return lambda _: None
        if self.resamples is not None and self.resamples < 100:
            raise UserError(option="resamples", value=self.resamples, expected="at least 100, for an interval")
        try:
            return self._generative_perplexity(checkpoint) if chosen == "genppl" else self._fid(checkpoint)
        except UserError as error:
            text = message(error, command_options(type(self)))
            raise UserError(f"{text} (--measure none does without)") from error

    def _generative_perplexity(self, checkpoint: "Checkpoint") -> Measure:
        """The perplexity of both arms under a judge."""
        from m2s.evaluation.genppl import PROTOCOLS, read_samples
        from m2s.evaluation.judge import load_judge
        from m2s.evaluation.repair import compare_by_judge

        tokenizer = checkpoint.tokenizer
        if tokenizer is None:
            raise UserError(f"{self.checkpoint} has no tokenizer to turn samples into text: {checkpoint.tokenizer_hint}")
        if (name := self.protocol or "paper") not in PROTOCOLS:
            raise UserError(f"there is no protocol {name!r} of genppl: choose from {', '.join(PROTOCOLS)}")
        if self.n < 2:
            raise UserError(option="n", value=self.n, expected="at least 2, for an interval over pairs")
        protocol = PROTOCOLS[name]
        judge = load_judge(self.judge or protocol.default_judge, self.device)

        def measure(samples: dict[str, Path]) -> dict[str, Any]:
            unprojected, projected = (read_samples(path, protocol, tokenizer, self.n) for path in samples.values())
            return compare_by_judge(unprojected, projected, judge, resamples=self.resamples or 2000, seed=self.seed)

        return measure

    def _fid(self, checkpoint: "Checkpoint") -> Measure:
        """The FID of both arms."""
        from m2s.cli.evaluate.fid import check_count, describe, find_protocol
        from m2s.cli.evaluate.images import load_split, read
        from m2s.cli.evaluate.statistics import statistics
        from m2s.evaluation import inception
        from m2s.evaluation.fid import ROWS, frechet
        from m2s.evaluation.repair import ARMS, fid_difference

        data = checkpoint.data or {}
        protocol = find_protocol(self.protocol, self.against)
        reference = load_split(protocol.against).first(protocol.count)
        network = inception.load(self.inception, resolve_device(self.device))
        if (list(reference.shape), reference.levels) != (list(data.get("shape", ())), data.get("levels")):
            raise UserError(
                f"{self.checkpoint} makes images of {data.get('shape')} in {data.get('levels')} levels, but {reference.name} "
                f"has {list(reference.shape)} in {reference.levels}: give data of the same size and levels"
            )
        least = 2 if self.few else max(protocol.samples or 0, network.width + 1)
        if self.n < least:
            raise UserError(option="n", value=self.n, expected=f"at least {least:,} for this FID")
        check_count(reference, network, self.few)

        def measure(samples: dict[str, Path]) -> dict[str, Any]:
            images = {arm: read(str(path), reference).first(protocol.samples) for arm, path in samples.items()}
            found = {arm: statistics(images[arm], network) for arm in ARMS}
            theirs = statistics(reference, network)
            unprojected, projected = (found[arm].rows for arm in ARMS)
            every = found["unprojected"].count <= ROWS
            gap = fid_difference(unprojected, projected, theirs, self.resamples or 100, self.seed) if every else None
            return {
                "kind": "fid",
                **{arm: frechet(found[arm], theirs) for arm in ARMS},
                "difference": gap,
                "samples": found["unprojected"].count,
                "reference": describe(reference),
                "network": describe(network),
            }

        return measure
