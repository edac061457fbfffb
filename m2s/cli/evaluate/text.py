"""`m2s evaluate text SAMPLES ... --against FOLDER`: all metrics of text for many files, as one table."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.help_text import help_from_source
from m2s.errors import UserError, counted, print_escaped
from m2s.io import output_file, output_folder, require_absent, write_json
from m2s.provenance import is_rerun

if TYPE_CHECKING:
    from m2s.data import Tokenizer
    from m2s.evaluation.genppl import Protocol, Samples
    from m2s.evaluation.text import TrainingText
    from m2s.evaluation.text.table import Row

RESULT, PARTS = "text.json", "parts"
MANY = 500  # samples, from which MAUVE has 50 clusters
BATCHES = {"cpu": 8, "cuda": 64}  # sequences in each call of the judge


@dataclass(frozen=True)
class _Texts:
    """Everything that is measured, and the held-out text that it is compared with."""

    samples: list["Samples"]
    reference: "Samples"
    real: "Samples"
    split: str

    def __iter__(self) -> Iterator["Samples"]:
        yield from (*self.samples, self.real)


@dataclass(frozen=True)
@help_from_source
class Text:
    """Measure files of generated text by metrics that perplexity alone lacks, and compare with held-out text: one table.

    A generative perplexity is low for any text that the judge finds likely, also for one sentence again and again. So this
    table has more numbers, each with the number of held-out text beside it:

    perplexity: generative perplexity and the entropy of the tokens, as m2s evaluate genppl. mauve: overlap of the embeddings
    with those of held-out text, 0 to 1. frechet: distance of the embeddings. repetition: repeated n-grams, distinct n-grams,
    n-grams shared between samples. novelty: n-grams that are not in the training text, and the longest copy from it.
    vocabulary: words that occur in the training text.

    No number is safe alone. m2s data adversaries makes samples without a model, such as shuffled text. Give them too: a column
    that ranks an adversary before all samples, or above held-out text, is marked with !.

    Every judge reads each file once. Its scores and embeddings are stored beside the samples, in the folder judged. With --out
    DIR every result is stored, so the same command, given again, resumes. docs/evaluation.md defines all numbers.

    Example: m2s data adversaries packed --n 1024 --length 512 --out adversaries

    Example: m2s evaluate text a.npz b.npz adversaries/*.npz --against packed --judge gpt2-large --out runs/text
    """

    samples: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="SAMPLES")]
    """Files of samples: .npz of m2s sample or m2s data adversaries. All have the same number of samples of the same length."""
    against: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """The text that the models were trained on: a folder of m2s data prepare. Its held-out text is what samples should look
    like, its training text is searched for copies, and its tokenizer decodes the samples."""
    judge: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME|FOLDER|FILE")] = ()
    """One or more causal language models, as m2s evaluate genppl takes them; by default that of the protocol."""
    protocol: Annotated[str, tyro.conf.arg(metavar="paper|sedd|mdlm")] = "paper"
    """What the judge scores and how it is averaged, as in m2s evaluate genppl. It also sets the greatest number of samples and
    of tokens."""
    metrics: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Compute only these metrics: perplexity, mauve, frechet, repetition, novelty, vocabulary, or one of a plugin. Without the
    first three no judge is needed."""
    split: Annotated[str, tyro.conf.arg(metavar="test|validation|train")] = ""
    """The split of held-out text; by default test or, where that is too small, validation."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Samples of each file that are measured, from its start; by default the number of the protocol."""
    train_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Search only so many tokens of the training text, from its start. Then novelty is an upper bound, and copies are at least
    as long as reported. The search takes 60 bytes of memory per token. By default all are searched."""
    resamples: int = 2000
    """Bootstrap resamples of the sequences, for the intervals."""
    seed: int = 0
    """Seed of the resampling and of k-means."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Sequences in each call of the judge; by default 8 on a CPU and 64 on a GPU."""
    dtype: Annotated[str, tyro.conf.arg(metavar="float32|bfloat16|float16")] = ""
    """Dtype of the judge's weights; by default float32 on the CPU, and the stored one elsewhere."""
    device: str = ""
    """cpu, cuda, cuda:1 or mps; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write text.json into this folder, with all numbers, intervals and rankings, and store the result of each file there; by
    default the table is only printed."""
    overwrite: bool = False
    """Replace a finished text.json. Stored results of files that did not change are used."""

    def run(self) -> None:
        """Measure every file, print the tables and write them to --out.

        Raises:
            UserError: An option is out of range, or the files cannot be compared.
        """
        import torch

        from m2s.data import BadData
        from m2s.devices import resolve_device
        from m2s.evaluation.judge import load_judge
        from m2s.evaluation.text import TEXT_METRICS, MeasuredText, TextContext, TrainingText
        from m2s.evaluation.text.measure import JudgeReader, measure_texts
        from m2s.evaluation.text.store import ResultStore
        from m2s.evaluation.text.table import WITHOUT_JUDGE, format_columns, format_marks, format_rows, rank_all
        from m2s.provenance import provenance

        protocol = self._protocol()
        metrics = {name: TEXT_METRICS.find(name, "metrics") for name in self.metrics or TEXT_METRICS}
        if self.out is not None:
            require_absent([self.out / RESULT], self.overwrite or is_rerun(self.out / RESULT))
        device = resolve_device(self.device)
        numeric = device if device.startswith("cuda") else "cpu"  # other devices have no float64
        try:
            texts = self._read(protocol)
            training = TrainingText(self.against.expanduser(), self.train_tokens, numeric)
        except BadData as error:
            raise UserError(str(error)) from error
        if self.out is not None:
            output_file(output_folder(self.out) / RESULT, (".json",))
        store = ResultStore(None if self.out is None else output_folder(self.out / PARTS))
        context = TextContext(MeasuredText(texts.reference), training, self.resamples, self.seed, numeric)
        rows, judges = self._rows(texts), []
        try:
            if judged := {name: metric for name, metric in metrics.items() if "judge" in metric.needs}:
                for name in dict.fromkeys(self.judge or (protocol.default_judge,)):
                    judge = load_judge(name, self.device, self.dtype)
                    reader = JudgeReader(judge, self.batch_size or BATCHES.get(judge.device.type, BATCHES["cpu"]))
                    judges.append(reader.described)
                    self._add(rows, reader.name, measure_texts(list(texts), judged, context, store, reader))
            others = {name: metric for name, metric in metrics.items() if "judge" not in metric.needs}
            self._add(rows, WITHOUT_JUDGE, measure_texts(list(texts), others, context, store))
        except torch.OutOfMemoryError as error:
            raise UserError(f"the memory of {device} is too small: give --batch-size or --train-tokens") from error
        rankings = rank_all(rows, metrics, [judge["name"] for judge in judges])
        tables = format_rows(rows, rankings)
        notes = [*self._notes(texts, training), *(self._about(judge, rows) for judge in judges)]
        print_escaped("\n".join([*tables, "", *format_marks(rankings), *format_columns(rankings), *notes]))
        if self.out is not None:
            described = [
                {"name": row.name, "file": str(text.path), "kind": row.kind, "settings": text.settings, "values": row.values}
                for row, text in zip(rows, texts, strict=True)
            ]
            held_out = {"folder": str(self.against), "split": texts.split, "windows": len(texts.reference)}
            found = {
                "files": described,
                "rankings": [ranking.to_dict() for ranking in rankings],
                "held_out": held_out,
                "training": {"searched_tokens": training.count, "tokens": training.total},
                "judges": judges,
                "notes": notes,
                "bootstrap": {"resamples": self.resamples, "seed": self.seed, "level": 0.95, "unit": "sequence"},
            }
            write_json(self.out / RESULT, {**found, **provenance(device, *(["transformers"] if judges else []))})
            print_escaped(f"{self.out / RESULT} written")

    def _protocol(self) -> "Protocol":
        """The protocol. UserError where options are out of range."""
        from m2s.evaluation.genppl import PROTOCOLS

        if self.protocol not in PROTOCOLS:
            raise UserError(f"there is no protocol {self.protocol!r}: choose from {', '.join(PROTOCOLS)}")
        if not self.samples:
            raise UserError("there is no file of samples: give one, such as samples.npz")
        least = {"limit": (self.limit, 2), "batch_size": (self.batch_size, 1), "resamples": (self.resamples, 100)}
        for name, (value, smallest) in (least | {"seed": (self.seed, 0), "train_tokens": (self.train_tokens, 1)}).items():
            if value is not None and value < smallest:
                raise UserError(option=name, value=value, expected=f"at least {smallest}")
        return PROTOCOLS[self.protocol]

    def _read(self, protocol: "Protocol") -> _Texts:
        """Read the samples and the held-out text."""
        from m2s.data.tokens import Tokens, read_meta
        from m2s.evaluation.genppl import read_samples, require_file
        from m2s.evaluation.text.held_out import held_out_split, load_held_out

        files = list(dict.fromkeys(self.samples))
        for path in files:
            require_file(path)
            if path.suffix != ".npz":
                raise UserError(f"{path} must end in .npz: n-grams are those of the tokens, which text files do not hold")
        folder = self.against.expanduser()
        read_meta(folder)
        tokenizer = Tokens(folder, "train", 1).tokenizer
        samples = [read_samples(path, protocol, tokenizer, self.limit) for path in files]
        shapes = {shape(one) for one in samples}
        if len(shapes) > 1:
            sizes = ", ".join(f"{count} x {length}" for count, length in sorted(shapes))
            raise UserError(
                f"the files hold {sizes} tokens, but the metrics depend on both numbers: draw as many samples of the same "
                "length, give --limit, or measure the files apart"
            )
        for one in samples:
            _check_tokenizer(one, tokenizer, folder)
        count, length = shapes.pop()
        split = held_out_split(folder, length, self.split)
        return _Texts(samples, *load_held_out(folder, split, count, length, tokenizer, protocol), split)

    def _rows(self, texts: _Texts) -> list["Row"]:
        """An empty row for each file, and one for held-out text."""
        from m2s.evaluation.text.table import Row

        paths = [one.path for one in texts.samples]
        stems = [path.stem for path in paths]
        names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
        kinds = ["adversary" if "adversary" in one.settings else "samples" for one in texts.samples]
        held_out = "held-out text" if "held-out text" not in names else "held-out text of the data"
        return [Row(name, kind, {}) for name, kind in zip([*names, held_out], [*kinds, "held-out"], strict=True)]  # type: ignore[arg-type]

    @staticmethod
    def _add(rows: list["Row"], group: str, found: list[dict[str, Any]]) -> None:
        """Add the results of the metrics of one group to the rows."""
        for row, results in zip(rows, found, strict=True):
            row.values[group] = results

    def _about(self, judge: dict[str, Any], rows: list["Row"]) -> str:
        """A line about a judge and about what differs from the protocol."""
        measured = (row.values[judge["name"]].get("perplexity", {}) for row in rows)
        departures = dict.fromkeys(one for found in measured for one in found.get("departures", ()))
        line = f"judge: {judge['name']} in {judge['dtype']}, protocol {self.protocol}"
        return f"{line}; not as in the protocol: {', '.join(departures)}" if departures else line

    def _notes(self, texts: _Texts, training: "TrainingText") -> list[str]:
        """What a reader must know about the numbers."""
        count, windows, length = len(texts.samples[0]), len(texts.reference), shape(texts.reference)[1]
        lines = [
            f"held-out text: {self.against} ({texts.split}), {counted(windows, 'window')} of {length} tokens to compare with, "
            "and as many others as the row held-out text",
            "±: half of the 95% interval, whose ends are in the .json; for mauve half of the range over seeds of k-means",
        ]
        if min(windows, count) < MANY:
            lines.append(f"mauve: {min(windows, count)} samples are few, and it is noisy; the paper has 5,000")
        if windows < count:
            lines.append(
                f"there are {windows} windows of held-out text for {count} samples: mauve, frechet and the n-grams of all "
                "sequences are those of a smaller set in the row held-out text"
            )
        if training.count < training.total:
            lines.append(
                f"novelty: only the first {training.count:,} of {training.total:,} training tokens are searched, so the "
                "fraction of novel n-grams is an upper bound, and the length of copies a lower bound"
            )
        return lines


def shape(samples: "Samples") -> tuple[int, int]:
    """Return the number of samples and their length.

    Args:
        samples: Samples that have tokens.
    """
    assert samples.tokens is not None  # those of an .npz
    count, length = samples.tokens.shape
    return count, length


def _check_tokenizer(samples: "Samples", tokenizer: "Tokenizer", folder: Path) -> None:
    """Raise UserError where the samples name another tokenizer than that of the data."""
    from m2s.data.encode import tokenizer_description

    data = samples.settings.get("data")
    named = data.get("tokenizer") if isinstance(data, dict) else None
    if not isinstance(named, dict):
        return
    given = {key: value for key, value in named.items() if key != "path"}
    if given != tokenizer_description(tokenizer):
        raise UserError(
            f"{samples.path} was drawn with the tokenizer {given}, but {folder} has {tokenizer_description(tokenizer)}: give "
            "the data that the model was trained on"
        )
