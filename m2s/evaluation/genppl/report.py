"""Generative perplexity: how surprised a judge is by samples, next to how varied they are.

samples = read_samples(Path("a.npz"), PROTOCOLS["mdlm"], tokenizer)
scores = score(samples, load_judge("gpt2-large"))
result = summary(scores)                                  # perplexity, entropy, intervals: what JSON can hold
gap = difference(scores, other)                           # the same, of two sets of samples in pairs

A low perplexity alone says little: repeating one likely sentence has a lower one than any good text. So the entropy of the
tokens and the number of distinct sequences stand beside every perplexity, and `draw` shows one against the other over files.
"""

import json
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError
from m2s.evaluation.bootstrap import Statistic, bootstrap, paired, reach
from m2s.evaluation.judge import END, Judge, Reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Protocol:
    """What is scored and how it is averaged. Whatever is done otherwise is named in the result."""

    name: str
    who: str
    judge: str  # the one that they used
    samples: int | None  # how many; None where they do not say
    tokens: int | None  # at most so many of a sample's own, and of the judge's when it reads the text anew
    retokenise: bool  # the judge reads the text; otherwise the sample's tokens as they are
    bos: bool  # the judge's BOS goes first where the judge wants one; otherwise never
    ends: Literal["all", "first"]  # which ends of documents count: all, or the first of each sequence
    average: Literal["tokens", "sequences"]  # exp of the mean NLL over all tokens, or the mean of each sequence's perplexity


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="paper",
            who="the M2S paper: exp of the mean NLL of the first 512 tokens. Its main table is the best of several seeds; this "
            "is one. It does not say what becomes of <|endoftext|>: here it is the judge's own end of a document, and counts",
            judge="google/gemma-2-9b",
            samples=1024,
            tokens=512,
            retokenise=True,
            bos=True,
            ends="all",
            average="tokens",
        ),
        Protocol(
            name="sedd",
            who="SEDD's released code: the samples' own GPT-2 tokens, no BOS, the mean over sequences of each one's perplexity",
            judge="gpt2-large",
            samples=None,
            tokens=1024,
            retokenise=False,
            bos=False,
            ends="all",
            average="sequences",
        ),
        Protocol(
            name="mdlm",
            who="MDLM's and DUO's released code: the text is read anew, and only the first <|endoftext|> of a sequence counts. "
            "Theirs also counts one token of padding in a text without any, if a longer one is in its batch; this does not",
            judge="gpt2-large",
            samples=None,
            tokens=1024,
            retokenise=True,
            bos=True,
            ends="first",
            average="tokens",
        ),
    )
}


@dataclass(frozen=True)
class Samples:
    """What of a file a protocol takes: texts, and the tokens they were decoded from where the file has them."""

    path: Path
    protocol: Protocol
    texts: list[str]
    tokens: Int[np.ndarray, "n L"] | None
    tokenizer: Tokenizer | None
    settings: dict[str, Any]  # of `m2s sample`

    def __len__(self) -> int:
        return len(self.texts)


def read_samples(path: Path, protocol: Protocol, tokenizer: Tokenizer | None = None, limit: int | None = None) -> Samples:
    """The first `limit` (by default: as many as the protocol takes) of a .npz or .txt of `m2s sample`, or of a .jsonl.

    The tokens of a .npz are decoded by `tokenizer`, each end of a document as <|endoftext|>; a .jsonl has a field "text".
    """
    limit = protocol.samples if limit is None else limit
    if not path.is_file():
        raise UserError(f"there is no file {path}: give samples as .npz or .txt of `m2s sample`, or .jsonl with a field text")
    try:
        if path.suffix == ".npz":
            samples = _read_npz(path, protocol, tokenizer, limit)
        elif path.suffix == ".txt":
            samples = Samples(path, protocol, _read_txt(path)[:limit], None, None, {})
        elif path.suffix == ".jsonl":
            samples = Samples(path, protocol, _read_jsonl(path)[:limit], None, None, {})
        else:
            raise UserError(f"{path} must end in .npz, .txt or .jsonl")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(samples) < 2:
        raise UserError(f"{path} gives {len(samples)} samples, but an interval needs at least 2")
    return samples


def _read_npz(path: Path, protocol: Protocol, tokenizer: Tokenizer | None, limit: int | None) -> Samples:
    try:
        with np.load(path, allow_pickle=False) as file:
            if "tokens" not in file:
                raise UserError(f"{path} has no array `tokens`, only {', '.join(file) or 'nothing'}: it is not of `m2s sample`")
            tokens = file["tokens"]
            settings = json.loads(str(file["settings"])) if "settings" in file else {}
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged or not a .npz of `m2s sample` ({error}): draw the samples again") from error
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"tokens in {path} are {tokens.dtype} of shape {list(tokens.shape)}, expected integers [samples, length]"
        )
    if tokenizer is None:
        raise UserError(f"{path} holds tokens, and nothing says how to decode them: give --checkpoint RUN or --tokenizer NAME")
    tokens = tokens[:limit, : protocol.tokens].astype(np.int64)
    wrong = np.argwhere((tokens < 0) | (tokens >= tokenizer.vocab))
    if len(wrong):
        row, column = wrong[0]
        raise UserError(
            f"sample {row} of {path} holds the token {tokens[row, column]} at {column}, but {type(tokenizer).__name__} has "
            f"0..{tokenizer.vocab - 1}: the samples are of another tokenizer (or of images)"
        )
    try:
        return Samples(path, protocol, [decode(tokenizer, row) for row in tokens], tokens, tokenizer, settings)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(str(error)) from error


def decode(tokenizer: Tokenizer, tokens: Int[np.ndarray, "L"]) -> str:
    """The text of `tokens`, every end of a document written as <|endoftext|>."""
    ends = np.flatnonzero(tokens == tokenizer.end) if tokenizer.end is not None else np.zeros(0, np.int64)
    pieces = np.split(tokens, np.stack([ends, ends + 1], 1).ravel())[::2]
    return END.join(tokenizer.decode(piece.tolist()) for piece in pieces)


HEADING = re.compile(r"(?:\A|\n\n)--- sample (\d+) ---\n")


def _read_txt(path: Path) -> list[str]:
    """The texts under lines "--- sample 0 ---", as `m2s sample --out a.txt` writes them."""
    before, *parts = HEADING.split(path.read_bytes().decode("utf-8").removesuffix("\n"))
    numbers, texts = [int(number) for number in parts[::2]], parts[1::2]
    if before or not parts:
        raise UserError(
            f"{path} does not begin with a line like --- sample 0 ---: it is not of `m2s sample`; use .jsonl instead"
        )
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise UserError(
            f"the samples in {path} are not numbered one after the other: a part is missing, or a text has such a line"
        )
    return texts


def _read_jsonl(path: Path) -> list[str]:
    texts = []
    for number, line in enumerate(path.read_bytes().decode("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"])
            texts[-1].encode("utf-8")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f'line {number} of {path} is not an object with a text, like {{"text": "once"}}') from error
    return texts


NLL, TOKENS, BYTES, PERPLEXITY, SCORED, ENTROPY, ONE = range(7)  # columns of Scores.columns


@dataclass(frozen=True)
class Scores:
    """What a judge says of each sample, in the order of the file."""

    samples: Samples
    judge: dict[str, Any]
    nll: Float[np.ndarray, "n"]  # nats, summed over the scored tokens
    tokens: Float[np.ndarray, "n"]  # scored tokens
    bytes: Float[np.ndarray, "n"]  # bytes of the text that they stand for
    entropy: Float[np.ndarray, "n"]  # nats, of the tokens within each sequence
    corpus_entropy: float  # nats, of all tokens together
    entropy_of: str  # whose tokens the entropies count
    distinct: int

    @property
    def columns(self) -> Float[np.ndarray, "n 7"]:
        """A sequence with no scored token has no perplexity of its own: it is left out of the mean of those."""
        scored = self.tokens > 0
        perplexity = np.where(scored, np.exp(self.nll / np.maximum(self.tokens, 1)), 0.0)
        ones = np.ones_like(self.nll)
        return np.stack([self.nll, self.tokens, self.bytes, perplexity, scored.astype(np.float64), self.entropy, ones], axis=1)


STATISTICS: dict[str, Statistic] = {
    "perplexity_over_tokens": lambda sums: np.exp(sums[..., NLL] / sums[..., TOKENS]),
    "perplexity_over_sequences": lambda sums: sums[..., PERPLEXITY] / sums[..., SCORED],
    "nats_per_token": lambda sums: sums[..., NLL] / sums[..., TOKENS],
    "nats_per_byte": lambda sums: sums[..., NLL] / sums[..., BYTES],
    "bits_per_byte": lambda sums: sums[..., NLL] / sums[..., BYTES] / math.log(2),
    "entropy_bits": lambda sums: sums[..., ENTROPY] / sums[..., ONE] / math.log(2),
    "entropy_nats": lambda sums: sums[..., ENTROPY] / sums[..., ONE],
}


def score(samples: Samples, judge: Judge, batch_size: int = 8) -> Scores:
    """Let the judge read every sample as the protocol says."""
    protocol = samples.protocol
    if protocol.retokenise:
        readings = [judge.read(text, protocol.tokens, protocol.bos) for text in samples.texts]
    else:
        readings = _as_they_are(samples, judge)
    counted = [_counted(reading.ids, judge, protocol) for reading in readings]
    tokens = np.array([float(mask.sum()) for mask in counted])
    if not tokens.any():
        raise UserError(f"no sample in {samples.path} has a token to score: they are empty, or of one token and without a BOS")
    nll = judge.nll([reading.ids for reading in readings], batch_size)
    first = int(protocol.bos and judge.bos is not None)
    own = [reading.ids[first:] for reading in readings] if samples.tokens is None else list(samples.tokens)
    return Scores(
        samples=samples,
        judge=judge.describe(),
        nll=np.array([float(values[mask].sum()) for values, mask in zip(nll, counted, strict=True)]),
        tokens=tokens,
        bytes=np.array([float(reading.bytes) for reading in readings]),
        entropy=np.array([entropy(row) for row in own]),
        corpus_entropy=entropy(np.concatenate(own)),
        entropy_of="judge" if samples.tokens is None else "sample",
        distinct=len(set(samples.texts)),
    )


def _as_they_are(samples: Samples, judge: Judge) -> list[Reading]:
    """The samples' tokens as the judge's, if the two mean the same by them."""
    name, rows, tokenizer = samples.protocol.name, samples.tokens, samples.tokenizer
    if rows is None or tokenizer is None:
        raise UserError(
            f"the protocol {name} scores the samples' own tokens, but {samples.path} holds text: give the .npz, or choose a "
            "protocol that reads text (paper, mdlm)"
        )
    for token in np.unique(rows).tolist():
        theirs = judge.tokenizer.decode([token], clean_up_tokenization_spaces=False) if token < judge.vocab else None
        if theirs != tokenizer.decode([token]):
            raise UserError(
                f"the protocol {name} scores the samples' own tokens, but {token} of {type(tokenizer).__name__} is another "
                f"token to the judge {judge.name}: choose a judge with the same tokens ({samples.protocol.judge}), or a "
                "protocol that reads the text anew (paper, mdlm)"
            )
    return [Reading(row.tolist(), len(decode(tokenizer, row[1:]).replace(END, "").encode())) for row in rows]


def _counted(ids: Sequence[int], judge: Judge, protocol: Protocol) -> Bool[np.ndarray, "_"]:
    """Which predicted tokens count [len(ids) - 1]: all, or of the ends of documents only the first in the sequence."""
    end = np.asarray(ids, dtype=np.int64) == (-1 if judge.end is None else judge.end)
    if protocol.bos and judge.bos is not None:
        end[0] = False
    kept = ~end | (end.cumsum() == 1) | (protocol.ends == "all")
    return kept[1:]


def entropy(tokens: Any) -> float:
    """-sum p log p of the frequencies of the tokens, in nats."""
    _, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
    p = counts / max(counts.sum(), 1)
    return float(-(p * np.log(p)).sum()) + 0.0


def summary(scores: Scores, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Everything that is known of one file, with 95% intervals over its sequences."""
    columns = scores.columns
    result = {name: asdict(bootstrap(columns, statistic, resamples, seed)) for name, statistic in STATISTICS.items()}
    return {
        "file": str(scores.samples.path),
        "protocol": asdict(scores.samples.protocol),
        "departures": departures(scores),
        "judge": scores.judge,
        "samples": len(scores.samples),
        "distinct": scores.distinct,
        "unscored": int((scores.tokens == 0).sum()),
        "tokens": int(scores.tokens.sum()),
        "bytes": int(scores.bytes.sum()),
        "perplexity": result[f"perplexity_over_{scores.samples.protocol.average}"],
        **result,
        "entropy_of_all_bits": scores.corpus_entropy / math.log(2),
        "entropy_of_all_nats": scores.corpus_entropy,
        "entropy_counts_tokens_of": scores.entropy_of,
        "bootstrap": {"resamples": resamples, "seed": seed, "level": 0.95, "unit": "sequence"},
        "settings": scores.samples.settings,
        "sequences": {
            "nll": scores.nll.tolist(),
            "tokens": scores.tokens.astype(int).tolist(),
            "bytes": scores.bytes.astype(int).tolist(),
            "entropy_nats": scores.entropy.tolist(),
        },
    }


def departures(scores: Scores) -> list[str]:
    """What is not as the protocol has it."""
    protocol, count, found = scores.samples.protocol, len(scores.samples), []
    if Path(scores.judge["name"]).name.lower() != Path(protocol.judge).name.lower():
        found.append(f"the judge is {scores.judge['name']}, not {protocol.judge}")
    if protocol.samples not in (None, count):
        found.append(f"{count} samples, not {protocol.samples}")
    tokens = scores.samples.tokens
    if tokens is None and protocol.tokens is not None:
        found.append(f"the file holds no tokens: texts are cut at {protocol.tokens} tokens of the judge instead of the sample")
    elif tokens is not None and protocol.tokens is not None and tokens.shape[1] < protocol.tokens:
        found.append(f"samples of {tokens.shape[1]} tokens, not {protocol.tokens}")
    return found


def difference(first: Scores, second: Scores, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """first - second, sample i of one paired with sample i of the other, with 95% intervals over pairs."""
    seeds = [(one.samples.settings.get("seed"), one.samples.settings.get("start")) for one in (first, second)]
    unknown = any(None in pair for pair in seeds)
    gaps = {
        name: asdict(paired(first.columns, second.columns, statistic, resamples, seed))
        for name, statistic in STATISTICS.items()
    }
    return {
        "file": str(first.samples.path),
        "against": str(second.samples.path),
        "same_noise": None if unknown else seeds[0] == seeds[1],
        "perplexity": gaps[f"perplexity_over_{first.samples.protocol.average}"],
        **gaps,
    }


def _temperatures(results: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """The temperature of each file, if each says one and all differ."""
    known = [result["settings"].get("temperature") for result in results]
    return None if None in known or len(set(known)) < len(known) else known


def in_order(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Along the frontier: by temperature where the files differ in that, else as they are."""
    return sorted(results, key=lambda result: result["settings"]["temperature"]) if _temperatures(results) else list(results)


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each file, for people."""
    width = max(len(Path(result["file"]).name) for result in results)
    average = results[0]["protocol"]["average"]
    head = (
        f"{'file':{width}s}  {'T':>5s}  {'samples':>7s}  {'distinct':>8s}  {'entropy':>7s}  {'perplexity':>10s}  {'95%':>19s}"
    )
    lines = [f"{head}  {'nats/token':>10s}  {'bits/byte':>9s}  {'mean of PPL' if average == 'tokens' else 'PPL of mean':>11s}"]
    other = "perplexity_over_sequences" if average == "tokens" else "perplexity_over_tokens"
    for result in results:
        p, nats, bits = (result[name] for name in ("perplexity", "nats_per_token", "bits_per_byte"))
        span = f"{p['low']:.2f} .. {p['high']:.2f}"
        lines.append(
            f"{Path(result['file']).name:{width}s}  {result['settings'].get('temperature', ''):>5}  {result['samples']:>7,}  "
            f"{result['distinct']:>8,}  {result['entropy_bits']['value']:>7.3f}  {p['value']:>10.2f}  {span:>19s}  "
            f"{nats['value']:>10.4f}  {bits['value']:>9.4f}  {result[other]['value']:>11.2f}"
        )
    return lines


def notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the numbers of the table are, and what is not as the protocol has it."""
    result = results[0]
    protocol = result["protocol"]
    how = (
        "exp of the mean NLL over tokens" if protocol["average"] == "tokens" else "mean over sequences of each one's perplexity"
    )
    whose = " or ".join(sorted({f"the {one['entropy_counts_tokens_of']}'s" for one in results}))
    lines = [
        f"perplexity: {how}, by {result['judge']['name']}, protocol {protocol['name']} ({protocol['who']})",
        f"entropy: bits of {whose} tokens within a sequence, mean over sequences (others give nats: bits x 0.693)",
    ]
    for found in dict.fromkeys(found for one in results for found in one["departures"]):
        names = [Path(one["file"]).name for one in results if found in one["departures"]]
        where = "" if len(names) == len(results) else f" ({', '.join(names)})"
        lines.append(f"not as in the protocol{where}: {found}")
    lines += [
        f"{Path(one['file']).name}: {one['unscored']} samples have no token to score" for one in results if one["unscored"]
    ]
    return lines


INK, MUTED, BLUE = "#1A1A1A", "#5A5A5A", "#004F8A"


def draw(results: Sequence[Mapping[str, Any]]) -> "Figure":
    """Perplexity against entropy: one point a file, with 95% intervals, joined where the files differ in temperature."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    x, y = (reach([result[name] for result in results]) for name in ("entropy_bits", "perplexity"))
    temperatures = _temperatures(results)
    form = "o" if temperatures is None else "o-"
    axes.errorbar(x[0], y[0], xerr=x[1], yerr=y[1], fmt=form, color=BLUE, ecolor=MUTED, lw=1.6, elinewidth=1.0, ms=6, capsize=2)
    names = [Path(result["file"]).stem for result in results] if temperatures is None else [f"T = {t:g}" for t in temperatures]
    for name, at in zip(names, zip(x[0], y[0], strict=True), strict=True):
        axes.annotate(name, at, xytext=(6, -11), textcoords="offset points", fontsize=9, color=INK)
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(ScalarFormatter())
    if y[0].max() > 4 * y[0].min():
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("entropy of the tokens of a sample, bits", color=INK)
    axes.set_ylabel(f"generative perplexity, {Path(results[0]['judge']['name']).name}", color=INK)
    axes.set_title("Right is more varied, down is more likely", loc="left", fontsize=11, color=INK)
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.margins(0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
