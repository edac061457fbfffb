"""`m2s evaluate genppl SAMPLES ...`: generative perplexity, and the entropy of the samples."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.help_text import help_from_source
from m2s.errors import UserError, print_escaped
from m2s.io import atomic_write, output_file, require_absent, write_json
from m2s.provenance import is_rerun

if TYPE_CHECKING:
    from m2s.data import Tokenizer
    from m2s.evaluation.genppl import Protocol
    from m2s.evaluation.judge import Judge

PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
@help_from_source
class GenPPL:
    """Score samples with a language model, the judge: perplexity with its 95% interval, entropy, and distinct sequences.

    Numbers of different judges cannot be compared, so the judge stands beside every number. The default, SmolLM2-135M, runs on
    a CPU. The judges of papers are larger.

    Protocols: paper (Gemma2-9B, 1,024 samples, 512 tokens, exp of the mean NLL); sedd (GPT-2 large on the tokens of the
    samples, mean of the perplexities of the sequences); mdlm (also DUO's: GPT-2 large on the decoded text, only the first end
    of a document counts). The result lists every departure from the protocol, such as another judge.

    Several files, such as samples at several temperatures, give the frontier of perplexity against entropy: a table and, with
    --out frontier.png, a figure. Files that differ in the temperature alone are one curve. With several curves, the area below
    each is compared over the entropies that all of them cover. m2s evaluate text has metrics that perplexity and entropy lack.

    Example: m2s evaluate genppl samples.npz --checkpoint runs/owt --judge gpt2-large --protocol mdlm --out genppl.json
    """

    samples: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="SAMPLES")]
    """Files of samples: .npz or .txt of m2s sample, or .jsonl with a field "text"."""
    judge: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER|FILE")] = ""
    """The causal language model that scores the text: a name on the Hugging Face hub, a folder, or a .gguf file. Names are
    searched in $M2S_DATA/judges first. By default SmolLM2-135M, and gpt2-large for the protocols sedd and mdlm."""
    protocol: Annotated[str, tyro.conf.arg(metavar="paper|sedd|mdlm")] = "paper"
    """What is scored and how it is averaged: paper, sedd or mdlm, as described above."""
    checkpoint: Annotated[str, tyro.conf.arg(metavar="RUN")] = ""
    """The checkpoint that an .npz was drawn from, whose tokenizer decodes the tokens; by default the tokenizer that the .npz
    names."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="gpt2|bytes|chars")] = ""
    """The tokenizer that decodes the tokens of an .npz, instead of --checkpoint."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Samples to compare with, in pairs: sample i of one file with sample i of the other."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Samples of each file that are scored; by default the number of the protocol."""
    resamples: int = 2000
    """Bootstrap resamples of the sequences, for the intervals."""
    seed: int = 0
    """Seed of the resampling."""
    batch_size: int = 8
    """Sequences in each call of the judge."""
    dtype: Annotated[str, tyro.conf.arg(metavar="float32|bfloat16|float16")] = ""
    """Dtype of the judge's weights; by default float32 on the CPU, and the stored one elsewhere."""
    device: str = ""
    """cpu, cuda, cuda:1 or mps; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json, or a figure of the frontier as .png, .pdf or .svg with the .json beside it; by default the
    result is only printed."""
    overwrite: bool = False
    """Replace a finished result."""

    def run(self) -> None:
        """Score the samples, print the table and write it to --out.

        Raises:
            UserError: The samples cannot be paired, or the judge cannot score them.
        """
        from m2s.evaluation.genppl import (
            format_areas,
            format_notes,
            format_table,
            frontier_areas,
            paired_difference,
            read_samples,
            require_file,
            score,
            sort_by_temperature,
            summarize,
        )
        from m2s.evaluation.judge import load_judge

        protocol = self._protocol()
        if self.out is not None:
            numbers = self.out.with_suffix(".json")
            require_absent([self.out, numbers], self.overwrite or is_rerun(numbers))
        out = None if self.out is None else output_file(self.out, (".json", *PICTURES))
        files = self._files()
        for path in files:  # before the files of the tokenizer: a mistyped path is the more likely error
            require_file(path)
        tokenizer = self._tokenizer()
        read = [read_samples(path, protocol, tokenizer or recorded_tokenizer(path), self.limit) for path in files]
        if self.against is not None and len({len(samples) for samples in read}) > 1:
            raise UserError(
                f"the files give {', '.join(str(len(samples)) for samples in read)} samples, but pairs need the same "
                "number from each: draw the same number, or give --limit"
            )
        judge = load_judge(self.judge or protocol.default_judge, self.device, self.dtype)
        scores = {path: score(samples, judge, self.batch_size) for path, samples in zip(files, read, strict=True)}
        try:
            results = [summarize(one, self.resamples, self.seed) for one in scores.values()]
            gaps = [
                paired_difference(scores[path], scores[self.against], self.resamples, self.seed)
                for path in files
                if self.against is not None and path != self.against
            ]
        except ValueError as error:
            raise UserError(str(error)) from error
        ordered = sort_by_temperature(results)
        areas = frontier_areas(ordered, self.resamples, self.seed)
        lines = [*format_table(ordered), *format_notes(ordered), *format_areas(areas), *(_difference(gap) for gap in gaps)]
        print_escaped("\n".join(lines))
        if out is not None:
            self._write(out, ordered, {"differences": gaps, "frontier": areas}, judge)

    def _files(self) -> list[Path]:
        """Every file to read, once."""
        return list(dict.fromkeys([*self.samples, *([] if self.against is None else [self.against])]))

    def _protocol(self) -> "Protocol":
        """The protocol. UserError where options are invalid or do not fit together."""
        from m2s.evaluation.genppl import PROTOCOLS

        if self.protocol not in PROTOCOLS:
            raise UserError(f"there is no protocol {self.protocol!r}: choose from {', '.join(PROTOCOLS)}")
        if not self.samples:
            raise UserError("there is no file of samples: give one, such as samples.npz")
        least = {"--limit": (self.limit, 2), "--batch-size": (self.batch_size, 1), "--resamples": (self.resamples, 100)}
        for name, (value, smallest) in (least | {"--seed": (self.seed, 0)}).items():
            if value is not None and value < smallest:
                raise UserError(option=name, value=value, expected=f"at least {smallest}")
        if self.against is not None and self._files() == [self.against]:
            raise UserError(f"--against is {self.against} itself: give other samples to compare with it")
        if self.out is not None and self.out.suffix in PICTURES and len(self._files()) < 2:
            raise UserError(f"{self.out} would be a figure of one point: give several files, or a name that ends in .json")
        return PROTOCOLS[self.protocol]

    def _tokenizer(self) -> "Tokenizer | None":
        """The tokenizer of --tokenizer or --checkpoint, None where neither is given."""
        from m2s.cli.sampling_args import load_checkpoint
        from m2s.data.tokenizer import KEPT, from_dict, make_tokenizer
        from m2s.hub import builtin, formats
        from m2s.hub.description import read_config
        from m2s.hub.folder import CONFIG
        from m2s.remote import locate

        if self.checkpoint and self.tokenizer:
            raise UserError("--checkpoint and --tokenizer both choose the tokenizer: give one of them")
        if self.tokenizer:
            return make_tokenizer(self.tokenizer)
        if not self.checkpoint:
            return None
        try:
            place = builtin.locate(self.checkpoint)
            folder = place if place.exists() else locate(self.checkpoint, (CONFIG, *KEPT))
            if folder.is_file() or formats.recognize(folder) is not None:  # of another project: the weights say which tokenizer
                loaded = load_checkpoint(self.checkpoint)
                if loaded.tokenizer is None:
                    raise UserError(f"{self.checkpoint} has no tokenizer to turn samples into text: {loaded.tokenizer_hint}")
                return loaded.tokenizer
            described = read_config(folder).get("tokenizer")
            if described is None:
                raise UserError(f"{self.checkpoint} has no tokenizer, so that its samples are not text")
            return from_dict(described, folder)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(str(error)) from error

    def _write(self, out: Path, results: list[Any], compared: dict[str, Any], judge: "Judge") -> None:
        """Write the .json and, where asked for, the figure."""
        from m2s.evaluation.genppl import plot_frontier
        from m2s.provenance import provenance

        numbers = out.with_suffix(".json")
        found = {"results": results, **compared, **provenance(judge.device, "transformers")}
        with contextlib.ExitStack() as stack:  # the figure is drawn before either file gets its name
            if out != numbers:
                plot_frontier(results).savefig(stack.enter_context(atomic_write(out)), dpi=200)
            write_json(numbers, found)
        print_escaped(f"{out}{'' if out == numbers else f' and {numbers}'} written")


def recorded_tokenizer(path: Path) -> "Tokenizer | None":
    """Return the tokenizer that an .npz of `m2s sample` names in its settings.

    Args:
        path: The file.

    Returns:
        The tokenizer; None where the file names none or cannot be read.

    Raises:
        UserError: A file of the tokenizer is missing.
    """
    import json

    from m2s.data.tokenizer import check_tokenizer, from_dict
    from m2s.npz import read_npz

    try:
        described = dict(json.loads(str(read_npz(path, ["settings"])["settings"]))["data"]["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    described.pop("path", None)  # a file from others must not name files of this machine
    try:
        return check_tokenizer(from_dict(described))
    except ValueError as error:
        raise UserError(f"{path} names a tokenizer: {error}; or give --checkpoint RUN, from which it was drawn") from error


def _difference(gap: dict[str, Any]) -> str:
    """A line about a paired difference."""
    nats, perplexity = (
        f"{gap[name]['value']:+.4f} [{gap[name]['low']:+.4f}, {gap[name]['high']:+.4f}]"
        for name in ("nats_per_token", "perplexity")
    )
    noise = {
        True: "drawn from the same noise",
        False: "drawn from different noise",
        None: "it is unknown whether their noise is the same",
    }
    pair = f"{Path(gap['file']).name} less {Path(gap['against']).name}"
    judge = Path(gap["judge"]).name
    return f"{pair}: {nats} nats a token, {perplexity} of perplexity by {judge}; paired sequences, {noise[gap['same_noise']]}"
