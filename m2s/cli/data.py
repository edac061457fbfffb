"""`m2s data download | prepare | check | list | adversaries`: get data, pack text, verify data, list data, test metrics."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from m2s.cli.help_text import help_from_source
from m2s.cli.next_step import next_command, next_preset_command
from m2s.errors import UserError, counted, print_escaped, suggest
from m2s.progress import bar_class
from m2s.training.config import Number


@dataclass(frozen=True)
@help_from_source
class Prepare:
    """Encode text and pack it into token files for training, with a meta.json of counts and checksums.

    SOURCE is a folder (searched at any depth) or a file. A .txt holds documents separated by lines <|endoftext|>, or one
    document. A .jsonl or .parquet has the documents in the field or column `text`, or --text-field. SOURCE may also be a data
    set of the Hugging Face hub: openwebtext, lm1b, text8, or any OWNER/NAME (these need: pip install datasets).

    1 % of the tokens are held out for validation, or 10 % of a text of fewer than 100,000 tokens. They are every 100th (10th)
    document. The last one may be cut, so that the number is exact. A text of fewer documents gives its last tokens. A data set
    of the hub keeps its validation split where it has one.

    The same command, given again, resumes an interrupted preparation. The result is the same to the byte. A folder that holds
    a different preparation is an error.

    Example: m2s data prepare texts/ --out packed/ --tokenizer gpt2
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """The text: a folder, a file, or the name of a data set on the hub."""
    out: Path
    """The folder to write: new, empty, or that of an interrupted run to resume."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="gpt2|bytes|chars|PATH|OWNER/NAME")] = "gpt2"
    """The tokenizer. gpt2: byte-level BPE, 50,257 tokens; bytes: UTF-8, 257 tokens; chars: one token for each character of
    --alphabet. Or a tokenizer.json, a folder with one, or the name of a tokenizer on the Hugging Face hub. A copy is stored
    with the tokens."""
    merges: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """gpt2: its vocab.bpe or merges.txt, or their folder; by default $M2S_DATA/gpt2. A copy is saved with the tokens."""
    alphabet: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """chars: all characters, in the order of their ids; by default those of text8, a space and a to z."""
    text_field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """The field or column of .jsonl, .parquet and the hub that holds the document."""
    validation_fraction: Number = None
    """The fraction of the tokens that is held out for validation, such as 0.05; 0: none. By default 0.01, or 0.1 where there
    are fewer than 100,000 tokens."""
    test: Annotated[str, tyro.conf.arg(metavar="PATTERN")] = "*-test.*"
    """Files whose names match this pattern form the test split."""
    shard_tokens: int = 2**27
    """Tokens in one file. A token takes two bytes, or four where there are more than 65,536 tokens."""

    def run(self) -> None:
        """Prepare the text, print the counts and the next command.

        Raises:
            UserError: An option is out of range, or the text cannot be read.
        """
        if self.shard_tokens < 1:
            raise UserError(option="--shard-tokens", value=self.shard_tokens, expected="at least 1")
        if self.validation_fraction is not None and not 0 <= self.validation_fraction < 1:
            raise UserError(option="--validation-fraction", value=self.validation_fraction, expected="at least 0 and below 1")
        from m2s.data import prepare_text
        from m2s.data.documents import require_source
        from m2s.data.tokenizer import make_tokenizer

        require_source(self.source)  # before the files of the tokenizer: a mistyped path is the more likely error
        try:
            tokenizer = make_tokenizer(self.tokenizer, None if self.merges is None else str(self.merges), self.alphabet)
        except UserError as error:
            raise UserError(self._about_tokenizer(error)) from error
        meta = prepare_text(
            self.source, self.out, tokenizer, self.validation_fraction, self.test, self.shard_tokens, self.text_field
        )
        print("\n".join(format_counts(meta)))
        print_escaped(f"{self.out} holds the tokens and meta.json. Next:\n{next_command(self.out, meta)}")

    def _about_tokenizer(self, error: UserError) -> str:
        """The message of an error of the tokenizer. A source that is not on this machine comes first."""
        from m2s.data.hub import HUB_TEXTS

        text = str(error)
        if self.tokenizer == "gpt2" and isinstance(error.__cause__, FileNotFoundError):
            text += ". --merges FILE says where the merges are; --tokenizer bytes needs none"
        elif self.tokenizer == "gpt2" and isinstance(error.__cause__, ImportError):
            text += "; --tokenizer bytes needs no package"
        if self.source in HUB_TEXTS or Path(self.source).expanduser().exists():
            return text
        return f"there is no folder or file {self.source}; if you mean the data set of the Hugging Face hub: {text}"


@dataclass(frozen=True)
@help_from_source
class Get:
    """Download a data set into $M2S_DATA, verify it, and unpack it. m2s train finds it there.

    mnist and cifar10: images. text8: text, which is prepared too. openwebtext: text as .parquet files, for m2s data prepare.
    gpt2: the merges of GPT-2's tokenizer.

    The same command, given again, continues an interrupted download. Without a network it prints which files to download
    elsewhere and where to put them.

    Example: m2s data download mnist
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="mnist|cifar10|text8|openwebtext|gpt2")]
    """The data set."""

    def run(self) -> None:
        """Download the files and print the next command.

        Raises:
            UserError: There is no data set of that name.
            DownloadError: A file cannot be downloaded, or is not the one that is expected.
        """
        from m2s.data.download import DOWNLOADS, DownloadError, download
        from m2s.data.files import root

        if self.name not in DOWNLOADS:
            raise UserError(f"there is no data set {self.name!r} to download: {suggest(self.name, DOWNLOADS)}")
        data = DOWNLOADS[self.name]
        try:
            with _bars() as report:
                new = download(data, report)
        except DownloadError:
            print("\n".join(data.manual()))
            raise
        command = data.next_command.format(root=shlex.quote(str(root()))) or next_preset_command(self.name)
        print_escaped(f"{self.name} is {'now' if new else 'already'} in {root()}, verified. Next:\n{command}")


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """A function that shows how much of each file has arrived, where stderr is a terminal."""
    bars: dict[str, Any] = {}

    def report(name: str, done: int, total: int | None) -> None:
        if name not in bars:
            for bar in bars.values():
                bar.close()
            bars[name] = bar_class()(desc=name, total=total, unit="B", unit_scale=True, unit_divisor=1000, disable=None)
        bars[name].total = total
        bars[name].update(done - bars[name].n)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()


@dataclass(frozen=True)
@help_from_source
class Check:
    """Verify the SHA-256 of every file of a prepared text or an image data set, and print its size.

    Example: m2s data check packed/
    """

    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER|NAME")]
    """The folder of a prepared text, or the name of an image data set: digits, mnist or cifar10."""

    def run(self) -> None:
        """Verify the files and print the counts."""
        from m2s.data import check_text, image_sets

        if self.what in image_sets():
            entry = image_sets()[self.what]
            entry.verify(entry.folder)
            images = entry.load()
            size = f"{len(images.train):,} train and {len(images.test):,} test images"
            print(f"{size} of shape {list(images.shape)}, {images.vocab} levels")
            print_escaped(f"every file of {self.what} in {entry.folder} has the SHA-256 it should have")
        else:
            meta = check_text(self.what)
            print_escaped("\n".join(format_counts(meta)))
            print_escaped(f"every file in {self.what} has the SHA-256 that its meta.json says")


@dataclass(frozen=True)
@help_from_source
class List:
    """List the data sets, their folders, and which of them are on this machine; and the weights that ship with m2s.

    Example: m2s data list
    """

    def run(self) -> None:
        """Print the list."""
        from importlib.util import find_spec

        from m2s.data import image_sets, root
        from m2s.data.hub import HUB_TEXTS
        from m2s.hub import builtin

        print_escaped(f"Data folder: {root()} (set M2S_DATA to change it).\n\nImages:")
        for name, entry in image_sets().items():
            missing = entry.missing(entry.folder)
            print(f"  {'missing' if missing else 'here   '}  {name:8s} {entry.summary}")
            print_escaped(f"           {'':8s} shape {list(entry.shape)}, {entry.vocab} levels, in {entry.folder}")
            if missing:
                way = f"m2s data download {name}" if entry.downloadable else f"get them from {entry.origin}"
                print(f"           {'':8s} lacks {', '.join(missing)}: {way}")
        print("\nText: any folder of .txt, .jsonl or .parquet, through `m2s data prepare`. Prepared ones there:")
        prepared = sorted(path.parent for path in root().glob("*/meta.json"))
        print_escaped("\n".join(f"  {path}" for path in prepared) or "  none")
        extra = "installed" if find_spec("datasets") else "not installed: pip install datasets"
        print(f"\nOn the Hugging Face hub, by name: {', '.join(HUB_TEXTS)}, or any OWNER/NAME (`datasets` is {extra}).")
        print("\nWeights that ship with m2s, for every command that takes a checkpoint:")
        width = max(len(name) for name in builtin.names())
        print("\n".join(f"  {builtin.PREFIX}{name:{width}s}  {builtin.summary(name)}" for name in builtin.names()))


@dataclass(frozen=True)
@help_from_source
class MakeAdversaries:
    """Make baseline samples of text without a model, to test metrics: a good metric does not rank them first. m2s evaluate
    text measures them.

    unigram: independent tokens with the frequencies of the training text. bigram: a Markov chain with its transitions.
    shuffled: held-out text with the tokens of each window in random order. repeated: one sentence of held-out text, repeated;
    each sample has its own. copied: windows of the training text, word for word.

    Each is a file NAME.npz, as m2s sample writes it. The same seed gives the same samples.

    Example: m2s data adversaries packed --n 1024 --length 512 --out adversaries
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """The text: a folder of m2s data prepare."""
    out: Path
    """The folder for the files."""
    n: int = 1024
    """Number of samples of each adversary."""
    length: int = 512
    """Tokens of a sample: as many as the samples have that they are compared with."""
    names: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Make only these adversaries; by default all."""
    split: Annotated[str, tyro.conf.arg(metavar="test|validation|train")] = ""
    """The split of held-out text; by default test or, where that is too small, validation."""
    seed: int = 0
    """Seed of all randomness."""
    overwrite: bool = False
    """Replace files."""

    def run(self) -> None:
        """Make the samples and write them.

        Raises:
            UserError: An option is out of range, or there is too little text.
        """
        import json

        import numpy as np

        from m2s.data import BadData, Tokens
        from m2s.evaluation.text import ADVERSARIES, AdversarySource, make_adversary
        from m2s.evaluation.text.held_out import held_out_split
        from m2s.io import atomic_write, output_folder, require_absent
        from m2s.provenance import command

        for name, value, least in (("n", self.n, 2), ("length", self.length, 2), ("seed", self.seed, 0)):
            if value < least:
                raise UserError(option=name, value=value, expected=f"at least {least}")
        for name in self.names:
            ADVERSARIES.find(name, "names")
        chosen = self.names or tuple(ADVERSARIES)
        files = {name: self.out / f"{name}.npz" for name in chosen}
        require_absent(list(files.values()), self.overwrite)
        folder = self.folder.expanduser()
        try:
            source = AdversarySource(folder, self.length, held_out_split(folder, self.length, self.split))
            text = Tokens(folder, "train", self.length)
            made = {name: make_adversary(name, source, self.n, self.seed) for name in chosen}
        except (BadData, OSError, ImportError) as error:
            raise UserError(str(error)) from error
        output_folder(self.out)
        for name, tokens in made.items():
            settings = {"adversary": name, "seed": self.seed, "data": text.description, "text": text.fingerprint}
            with atomic_write(files[name]) as temporary:
                ids, words = tokens.astype(np.int32), json.dumps(command())
                np.savez_compressed(temporary, tokens=ids, settings=json.dumps(settings), command=words)
        print_escaped(f"{counted(self.n, 'sample')} of {self.length} tokens each: {', '.join(map(str, files.values()))}")


@tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
@dataclass(frozen=True)
class Data:
    """Download data sets (download), pack text into token files (prepare), verify data (check), list the data sets (list), or
    make samples without a model that test metrics of text (adversaries).

    Example: m2s data prepare texts/ --out packed/ --tokenizer gpt2
    """

    action: (
        Annotated[Get, tyro.conf.subcommand("download")]
        | Annotated[Prepare, tyro.conf.subcommand("prepare")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[List, tyro.conf.subcommand("list")]
        | Annotated[MakeAdversaries, tyro.conf.subcommand("adversaries")]
    )
    """What to do."""

    def run(self) -> None:
        """Run the subcommand."""
        self.action.run()


def format_counts(meta: dict[str, Any]) -> list[str]:
    """Return a table of the documents, tokens and files of each split.

    Args:
        meta: The meta.json of a prepared text.

    Returns:
        The lines of the table, with notes.
    """
    lines = [f"{'':12s}{'documents':>12s}{'tokens':>16s}{'files':>7s}"]
    for split, entry in meta["splits"].items():
        lines.append(f"{split:12s}{entry['documents']:>12,}{entry['tokens']:>16,}{len(entry['shards']):>7}")
    lines += _held_out(meta)
    blank = sum(count["blank"] for count in meta["counts"].values())
    kind, end = meta["tokenizer"]["kind"], meta["end"]
    after = "no token between documents" if end is None else f"token {end} after each document"
    lines.append(
        f"{counted(len(meta['sources']), 'source')}, {counted(blank, 'blank document')} left out; tokenizer {kind}, "
        f"{meta['vocab']:,} tokens, {after}"
    )
    return lines


def _held_out(meta: dict[str, Any]) -> list[str]:
    """A line about the tokens that are held out for validation. Folders of m2s 0.1 do not say how they were divided."""
    fraction, train, held = meta.get("validation_fraction"), *(meta["splits"][name] for name in ("train", "validation"))
    if fraction is None or not held["tokens"] or all(source.get("split") != "by index" for source in meta["sources"]):
        return []
    total = train["tokens"] + held["tokens"]
    cut = "" if held["documents"] else ", the last ones of the text"
    return [f"held out for validation: {held['tokens']:,} of {total:,} tokens ({100 * held['tokens'] / total:.3g} %){cut}"]
