"""`m2s data prepare | check | list`: pack text into token files, verify data, say what there is."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from m2s.errors import UserError


@dataclass(frozen=True)
class Prepare:
    """Encode text and pack it into token files that training reads, with a meta.json of counts and checksums.

    SOURCE is a folder (searched at any depth) or a file of .txt (documents separated by a line <|endoftext|>; without such a
    line the file is one document), .jsonl or .parquet (field or column `text`, or --text-field); or a data set of the Hugging
    Face hub: openwebtext, lm1b, text8, or any OWNER/NAME (these need: pip install datasets).

    Of each file, or train split of the hub, documents 0, 100, 200, ... go to validation; files of one document each are counted
    together, in the order of their names. If all there is is one document, its last tokens go there, one in 100. A data set
    of the hub keeps its own validation split where it has one.

    Interrupt it at any time: the same command goes on where it was, and the result is the same to the byte. A folder that
    holds another preparation is refused.

    Example: m2s data prepare texts/ --out packed/ --tokenizer gpt2
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A folder, a file, or the name of a data set on the hub."""
    out: Path
    """The folder to write: a new or an empty one, or the same as before to go on."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="gpt2|bytes|chars|PATH|OWNER/NAME")] = "gpt2"
    """gpt2: byte-level BPE, 50,257 tokens; bytes: UTF-8, 257 tokens; chars: one token for each character of --alphabet. Or a
    tokenizer.json, a folder with one, or the name of a tokenizer on the Hugging Face hub. A copy is stored with the tokens."""
    merges: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """For gpt2: its vocab.bpe or merges.txt, or their folder; by default $M2S_DATA/gpt2. A copy is kept with the tokens."""
    alphabet: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """For chars: all characters, in the order of their ids; by default text8's, a space and a to z."""
    text_field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """Of .jsonl, .parquet and the hub: the field or column that holds the document."""
    validation_every: int = 100
    """One document in so many goes to validation or, of a single document, one token; 0: none goes there."""
    test: Annotated[str, tyro.conf.arg(metavar="PATTERN")] = "*-test.*"
    """Files with such a name go to the test split as a whole."""
    shard_tokens: int = 2**27
    """How many tokens go into one file. A token takes two bytes, or four where there are more than 65,536 tokens."""

    def run(self) -> None:
        if self.shard_tokens < 1:
            raise UserError(f"--shard-tokens is {self.shard_tokens}, but it must be at least 1")
        if self.validation_every < 0:
            raise UserError(f"--validation-every is {self.validation_every}, but it must be 0 or more")
        from m2s.data import prepare_text
        from m2s.data.tokenizer import make_tokenizer

        try:
            tokenizer = make_tokenizer(self.tokenizer, None if self.merges is None else str(self.merges), self.alphabet)
        except UserError as error:
            if self.tokenizer == "gpt2" and isinstance(error.__cause__, FileNotFoundError):
                hint = "--merges FILE says where the merges are; --tokenizer bytes needs none"
                raise UserError(f"{error}. {hint}") from error
            raise
        meta = prepare_text(
            self.source, self.out, tokenizer, self.validation_every, self.test, self.shard_tokens, self.text_field
        )
        print("\n".join(counts(meta)))
        print(f"{self.out} holds the tokens and meta.json. Next:\n{next_command(self.out, meta)}")


@dataclass(frozen=True)
class Check:
    """Verify the SHA-256 of every file of a prepared text, or of an image data set, and print what it holds.

    Example: m2s data check packed/
    """

    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER|NAME")]
    """The folder of a prepared text, or the name of an image data set: digits, mnist, cifar10."""

    def run(self) -> None:
        from m2s.data import check_text, image_sets

        if self.what in image_sets():
            entry = image_sets()[self.what]
            entry.verify(entry.folder)
            images = entry.load()
            size = f"{len(images.train):,} train and {len(images.test):,} test images"
            print(f"{size} of shape {list(images.shape)}, {images.vocab} levels")
            print(f"every file of {self.what} in {entry.folder} has the SHA-256 it should have")
        else:
            meta = check_text(self.what)
            print("\n".join(counts(meta)))
            print(f"every file in {self.what} has the SHA-256 that its meta.json says")


@dataclass(frozen=True)
class List:
    """Say which data sets there are, where they are looked for, and whether they are there.

    Example: m2s data list
    """

    def run(self) -> None:
        from importlib.util import find_spec

        from m2s.data import image_sets, root
        from m2s.data.hub import HUB_TEXTS

        print(f"Data lies in {root()} (set M2S_DATA to change that).\n\nImages:")
        for name, entry in image_sets().items():
            missing = entry.missing(entry.folder)
            print(f"  {'missing' if missing else 'here   '}  {name:8s} {entry.summary}")
            print(f"           {'':8s} shape {list(entry.shape)}, {entry.vocab} levels, in {entry.folder}")
            if missing:
                print(f"           {'':8s} lacks {', '.join(missing)}: get them from {entry.origin}")
        print("\nText: any folder of .txt, .jsonl or .parquet, through `m2s data prepare`. Prepared ones there:")
        prepared = sorted(path.parent for path in root().glob("*/meta.json"))
        print("\n".join(f"  {path}" for path in prepared) or "  none")
        extra = "installed" if find_spec("datasets") else "not installed: pip install datasets"
        print(f"\nOn the Hugging Face hub, by name: {', '.join(HUB_TEXTS)}, or any OWNER/NAME (`datasets` is {extra}).")


@tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
@dataclass(frozen=True)
class Data:
    """Pack text into token files (prepare), verify data (check), or say what there is (list).

    Example: m2s data prepare texts/ --out packed/ --tokenizer gpt2
    """

    action: (
        Annotated[Prepare, tyro.conf.subcommand("prepare")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[List, tyro.conf.subcommand("list")]
    )

    def run(self) -> None:
        self.action.run()


def next_command(out: Path, meta: dict[str, Any]) -> str:
    """How to train on it, in windows no longer than the text; without text to train or to validate on, what else it is for."""
    from m2s.presets import PRESETS

    tokens = min(meta["splits"][split]["tokens"] for split in ("train", "validation"))
    folder, run = shlex.quote(str(out)), shlex.quote(f"runs/{out.resolve().name}")
    if not tokens:
        return f"m2s evaluate bpd RUN --data {folder}"
    length = "" if tokens >= PRESETS["owt"].data.length else f" --data.length {2 ** (tokens.bit_length() - 1)}"
    return f"m2s train owt --data.folder {folder}{length} --out {run}"


def counts(meta: dict[str, Any]) -> list[str]:
    """Documents, tokens and files of each split, for people."""
    lines = [f"{'':12s}{'documents':>12s}{'tokens':>16s}{'files':>7s}"]
    for split, entry in meta["splits"].items():
        lines.append(f"{split:12s}{entry['documents']:>12,}{entry['tokens']:>16,}{len(entry['shards']):>7}")
    held = meta["splits"]["validation"]
    if held["tokens"] and not held["documents"]:
        every = meta["validation_every"]
        lines.append(f"the text is one document: its last {held['tokens']:,} tokens, one in {every}, are validation")
    blank = sum(count["blank"] for count in meta["counts"].values())
    kind, end = meta["tokenizer"]["kind"], meta["end"]
    after = "no token between documents" if end is None else f"token {end} after each document"
    lines.append(
        f"{len(meta['sources'])} sources, {blank} blank documents left out; tokenizer {kind}, {meta['vocab']:,} tokens, {after}"
    )
    return lines
