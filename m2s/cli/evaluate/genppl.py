"""`m2s evaluate genppl SAMPLES ...`: generative perplexity, next to the entropy of the samples."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.errors import UserError
from m2s.io import atomic_write, output_file, write_json

if TYPE_CHECKING:
    from m2s.data import Tokenizer
    from m2s.evaluation.genppl import Protocol
    from m2s.evaluation.judge import Judge

PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class GenPPL:
    """Let a language model judge samples: perplexity with its 95% interval, beside the entropy and the distinct sequences.

    Protocols: paper (Gemma2-9B, 1,024 samples, 512 tokens, exp of the mean NLL), sedd (GPT-2 large on the samples' own tokens,
    mean of each sequence's perplexity), mdlm (and DUO: GPT-2 large, text read anew, only the first end of a document counts).
    What is done otherwise, such as another judge, is said in the result.

    Several files, such as samples at several temperatures, give the frontier of perplexity against entropy: a table and, with
    --out frontier.png, a figure.

    Example: m2s evaluate genppl samples.npz --checkpoint runs/owt --judge gpt2-large --protocol mdlm --out genppl.json
    """

    samples: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="SAMPLES")]
    """Files of samples: .npz or .txt of m2s sample, or .jsonl with a field text."""
    judge: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER|FILE")] = ""
    """A causal language model: a name on the Hugging Face hub, a folder, or a .gguf file; by default the protocol's."""
    protocol: Annotated[str, tyro.conf.arg(metavar="paper|sedd|mdlm")] = "paper"
    """What is scored, and how it is averaged; see above."""
    checkpoint: Annotated[str, tyro.conf.arg(metavar="RUN")] = ""
    """The checkpoint that a .npz was drawn from: its tokenizer decodes the tokens, by default the one that the .npz names."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="gpt2|bytes|chars")] = ""
    """Or the tokenizer itself."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Samples to compare with: sample i of one is paired with sample i of the other."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """How many samples of each file; by default as many as the protocol has."""
    resamples: int = 2000
    """Of the sequences, for the intervals."""
    seed: int = 0
    """Of the resampling."""
    batch_size: int = 8
    """Sequences that the judge reads at once."""
    dtype: Annotated[str, tyro.conf.arg(metavar="float32|bfloat16|float16")] = ""
    """Of the judge's weights; by default float32 on the CPU, and as they were stored elsewhere."""
    device: str = ""
    """cpu, cuda, mps; by default the best there is."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json, or a figure of the frontier as .png, .pdf or .svg with the .json beside it."""

    def run(self) -> None:
        from m2s.evaluation.genppl import difference, in_order, notes, read_samples, score, summary, table
        from m2s.evaluation.judge import load_judge

        protocol = self._protocol()
        out = None if self.out is None else output_file(self.out, (".json", *PICTURES))
        tokenizer = self._tokenizer()
        files = self._files()
        read = [read_samples(path, protocol, tokenizer or recorded(path), self.limit) for path in files]
        if self.against is not None and len({len(samples) for samples in read}) > 1:
            raise UserError(
                f"the files give {', '.join(str(len(samples)) for samples in read)} samples, but pairs need as many of each: "
                "draw as many, or give --limit"
            )
        judge = load_judge(self.judge or protocol.judge, self.device, self.dtype)
        scores = {path: score(samples, judge, self.batch_size) for path, samples in zip(files, read, strict=True)}
        try:
            results = [summary(one, self.resamples, self.seed) for one in scores.values()]
            gaps = [
                difference(scores[path], scores[self.against], self.resamples, self.seed)
                for path in files
                if self.against is not None and path != self.against
            ]
        except ValueError as error:
            raise UserError(str(error)) from error
        ordered = in_order(results)
        print("\n".join([*table(ordered), *notes(ordered), *(said(gap) for gap in gaps)]))
        if out is not None:
            self._write(out, ordered, gaps, judge)

    def _files(self) -> list[Path]:
        """Every file that is read, once."""
        return list(dict.fromkeys([*self.samples, *([] if self.against is None else [self.against])]))

    def _protocol(self) -> "Protocol":
        """The protocol that was named, if the rest of what was asked makes sense."""
        from m2s.evaluation.genppl import PROTOCOLS

        if self.protocol not in PROTOCOLS:
            raise UserError(f"there is no protocol {self.protocol!r}: choose from {', '.join(PROTOCOLS)}")
        if not self.samples:
            raise UserError("no file of samples was given, such as samples.npz")
        least = {"--limit": (self.limit, 2), "--batch-size": (self.batch_size, 1), "--resamples": (self.resamples, 100)}
        for name, (value, smallest) in (least | {"--seed": (self.seed, 0)}).items():
            if value is not None and value < smallest:
                raise UserError(f"{name} is {value}, but it must be at least {smallest}")
        if self.against is not None and self._files() == [self.against]:
            raise UserError(f"--against is {self.against} itself: give other samples to compare with it")
        if self.out is not None and self.out.suffix in PICTURES and len(self._files()) < 2:
            raise UserError(f"{self.out} would be a figure of one point: give several files, or a name that ends in .json")
        return PROTOCOLS[self.protocol]

    def _tokenizer(self) -> "Tokenizer | None":
        from m2s.data.tokenizer import KEPT, from_dict, make_tokenizer
        from m2s.hub.checkpoint import read_config
        from m2s.hub.folder import CONFIG
        from m2s.hub.remote import locate

        if self.checkpoint and self.tokenizer:
            raise UserError("--checkpoint and --tokenizer both say how to decode tokens: give one of them")
        if self.tokenizer:
            return make_tokenizer(self.tokenizer)
        if not self.checkpoint:
            return None
        try:
            folder = locate(self.checkpoint, (CONFIG, *KEPT))
            described = read_config(folder).get("tokenizer")
            if described is None:
                raise UserError(f"{self.checkpoint} has no tokenizer, so its samples are no text")
            return from_dict(described, folder)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(str(error)) from error

    def _write(self, out: Path, results: list[Any], gaps: list[Any], judge: "Judge") -> None:
        from m2s.evaluation.genppl import draw
        from m2s.provenance import provenance

        numbers = out.with_suffix(".json")
        write_json(numbers, {"results": results, "differences": gaps, **provenance(judge.device, "transformers")})
        if out != numbers:
            with atomic_write(out) as temporary:
                draw(results).savefig(temporary, dpi=200)
        print(f"{out}{'' if out == numbers else f' and {numbers}'} written")


def recorded(path: Path) -> "Tokenizer | None":
    """The tokenizer that a .npz of `m2s sample` names in its settings; None where it names none or cannot be read."""
    import json
    import zipfile

    import numpy as np

    from m2s.data.tokenizer import check_tokenizer, from_dict

    try:
        with np.load(path, allow_pickle=False) as file:
            described = dict(json.loads(str(file["settings"]))["data"]["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    try:
        return check_tokenizer(from_dict(described))
    except ValueError as error:
        raise UserError(f"{path} names a tokenizer: {error}; or give --checkpoint RUN, from which it was drawn") from error


def said(gap: dict[str, Any]) -> str:
    """A paired difference in words."""
    nats, perplexity = (
        f"{gap[name]['value']:+.4f} [{gap[name]['low']:+.4f}, {gap[name]['high']:+.4f}]"
        for name in ("nats_per_token", "perplexity")
    )
    noise = {
        True: "drawn from the same noise",
        False: "drawn from other noise",
        None: "whether from the same noise is not known",
    }
    pair = f"{Path(gap['file']).name} less {Path(gap['against']).name}"
    return f"{pair}: {nats} nats a token, {perplexity} of perplexity; sequences in pairs, {noise[gap['same_noise']]}"
