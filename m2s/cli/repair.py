"""`m2s repair CHECKPOINT`: the same samples with and without projection, measured."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.audit import AuditArgs, begun
from m2s.cli.sampling_args import write_samples
from m2s.devices import resolve_device
from m2s.errors import UserError
from m2s.io import atomic_write, output_file, output_folder, require_absent, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.hub import Checkpoint
    from m2s.samplers.shards import SampleShards

MEASURES = ("genppl", "fid", "none")
PAIRS = 32  # at most so many in the picture

Measure = Callable[[dict[str, Path]], dict[str, Any] | None]  # of the samples of both kinds


@dataclass(frozen=True)
class Repair(AuditArgs):
    """Sample a free score twice from the same noise, once as it is and once projected, and measure both.

    The measure is generative perplexity for text (with intervals over pairs of sequences), FID for images, or none: what is
    counted without a judge is the classes of the scores, negative weights, and the tokens that changed. Into the folder go
    repair.json, repair.txt, free.npz and projected.npz, and pairs.png (images) or free.txt and projected.txt (text). A killed
    run goes on where it stopped when the same command is given again.

    Example: m2s repair runs/sedd --n 1024 --judge gpt2-large --protocol mdlm --out repair/

    Example: m2s repair runs/sedd --n 64 --measure none --out repair/
    """

    out: Path
    """The folder for everything."""
    n: int = 1024
    """How many pairs."""
    measure: Annotated[str, tyro.conf.arg(metavar="genppl|fid|none")] = ""
    """By default genppl for text and fid for images."""
    protocol: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Of the measure, as in m2s evaluate: paper (the default), sedd or mdlm; mnist-5k or cifar10-50k."""
    judge: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER|FILE")] = ""
    """genppl: a causal language model; by default the protocol's."""
    against: Annotated[str, tyro.conf.arg(metavar="NAME:SPLIT")] = ""
    """fid: the data, where there is no protocol, such as mnist:test."""
    inception: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """fid: Inception's weights, as in m2s evaluate fid."""
    few: bool = False
    """fid: go on with too few samples, for a rehearsal."""
    resamples: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Of the pairs, for the intervals; by default 2,000, for FID 100."""

    def run(self) -> None:
        from m2s.data.tokenizer import check_tokenizer
        from m2s.evaluation.repair import ARMS, changes, table

        samples = {arm: self.out / f"{arm}.npz" for arm in ARMS}
        numbers, words = self.out / "repair.json", self.out / "repair.txt"
        others = [path for path in samples.values() if not begun(path)]
        require_absent([numbers, *others, *([words] if len(others) == len(samples) else [])], self.overwrite)
        checkpoint = self.prepare()
        if checkpoint.head.has_posterior:
            raise UserError(f"{self.checkpoint} predicts a posterior already ({checkpoint.head}): there is nothing to repair")
        if checkpoint.tokenizer is not None:
            check_tokenizer(checkpoint.tokenizer)
        options = {arm: self.options(checkpoint, project=arm == "projected") for arm in ARMS}
        measure = self._measure(checkpoint)
        output_folder(self.out)
        for path in (numbers, words, *samples.values()):
            output_file(path, (path.suffix,))
        tokens: dict[str, Tensor] = {}
        audits: dict[str, Any] = {}
        kept: list[SampleShards] = []
        for arm in ARMS:
            parts = self.parts(samples[arm], checkpoint, options[arm])
            audits[arm] = self.watch(checkpoint, options[arm], parts, arm)
            tokens[arm] = parts.join()
            write_samples(samples[arm], tokens[arm], checkpoint, parts.settings)
            kept.append(parts)
        self._show(checkpoint, tokens)
        result = {
            **{name: audits["free"][name] for name in ("command", "device", "versions", "checkpoint", "head", "process")},
            "changes": changes(tokens["free"], tokens["projected"]),
            "measure": measure(samples),
            "audits": audits,
        }
        with atomic_write(words) as temporary:
            temporary.write_text(table(result) + "\n", encoding="utf-8")
        write_json(numbers, result)
        for parts in kept:
            parts.close()
        print(f"\n{table(result)}\n\n{numbers} and {words} written")

    def _show(self, checkpoint: "Checkpoint", tokens: "dict[str, Tensor]") -> None:
        """Pairs side by side, or the texts."""
        import torch

        from m2s.report.samples import write_pictures, write_text

        data = checkpoint.data or {}
        if data.get("kind") == "image":
            shown = max(1, 2 * math.isqrt(min(self.n, PAIRS) // 2) ** 2)  # so that the square grid is even in width
            pairs = torch.stack([tokens["free"][:shown], tokens["projected"][:shown]], 1).flatten(0, 1)
            write_pictures(self.out / "pairs.png", pairs, tuple(data["shape"]), data["levels"])
        elif checkpoint.tokenizer is not None:
            for arm, rows in tokens.items():
                write_text(self.out / f"{arm}.txt", rows, checkpoint.tokenizer)

    def _measure(self, checkpoint: "Checkpoint") -> Measure:
        """What will be done with the samples; all that it needs is there, or this says what is not."""
        kind = (checkpoint.data or {}).get("kind")
        chosen = self.measure or {"image": "fid", "text": "genppl"}.get(str(kind), "none")
        if chosen not in MEASURES:
            raise UserError(f"--measure is {chosen!r}, but it must be one of {', '.join(MEASURES)}")
        if chosen == "none":
            return lambda _: None
        if self.resamples is not None and self.resamples < 100:
            raise UserError(f"--resamples is {self.resamples}, but an interval needs at least 100")
        try:
            return self._genppl(checkpoint) if chosen == "genppl" else self._fid(checkpoint)
        except UserError as error:
            raise UserError(f"{error} (--measure none does without)") from error

    def _genppl(self, checkpoint: "Checkpoint") -> Measure:
        from m2s.evaluation.genppl import PROTOCOLS, read_samples
        from m2s.evaluation.judge import load_judge
        from m2s.evaluation.repair import judged

        tokenizer = checkpoint.tokenizer
        if tokenizer is None:
            raise UserError(f"{self.checkpoint} has no tokenizer, so its samples are no text to judge")
        if (name := self.protocol or "paper") not in PROTOCOLS:
            raise UserError(f"there is no protocol {name!r} of genppl: choose from {', '.join(PROTOCOLS)}")
        if self.n < 2:
            raise UserError(f"--n is {self.n}, but an interval needs at least 2 pairs")
        protocol = PROTOCOLS[name]
        judge = load_judge(self.judge or protocol.judge, self.device)

        def measure(samples: dict[str, Path]) -> dict[str, Any]:
            free, projected = (read_samples(path, protocol, tokenizer, self.n) for path in samples.values())
            return judged(free, projected, judge, resamples=self.resamples or 2000, seed=self.seed)

        return measure

    def _fid(self, checkpoint: "Checkpoint") -> Measure:
        from m2s.cli.evaluate.fid import about, find_protocol, read, refuse_few, split, statistics
        from m2s.evaluation import inception
        from m2s.evaluation.fid import ROWS, frechet
        from m2s.evaluation.repair import ARMS, fid_difference

        data = checkpoint.data or {}
        protocol = find_protocol(self.protocol, self.against)
        reference = split(protocol.against).first(protocol.count)
        network = inception.load(self.inception, resolve_device(self.device))
        if (list(reference.shape), reference.levels) != (list(data.get("shape", ())), data.get("levels")):
            raise UserError(
                f"{self.checkpoint} makes images of {data.get('shape')} in {data.get('levels')} levels, but {reference.name} "
                f"has {list(reference.shape)} in {reference.levels}: compare like with like"
            )
        least = 2 if self.few else max(protocol.samples or 0, network.width + 1)
        if self.n < least:
            raise UserError(f"--n is {self.n}, but this FID needs at least {least:,} samples")
        refuse_few(reference, network, self.few)

        def measure(samples: dict[str, Path]) -> dict[str, Any]:
            images = {arm: read(str(path), reference).first(protocol.samples) for arm, path in samples.items()}
            found = {arm: statistics(images[arm], network) for arm in ARMS}
            theirs = statistics(reference, network)
            free, projected = (found[arm].rows for arm in ARMS)
            every = found["free"].count <= ROWS
            gap = fid_difference(free, projected, theirs, self.resamples or 100, self.seed) if every else None
            return {
                "kind": "fid",
                **{arm: frechet(found[arm], theirs) for arm in ARMS},
                "difference": gap,
                "samples": found["free"].count,
                "reference": about(reference),
                "network": about(network),
            }

        return measure
