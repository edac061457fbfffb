"""Tokenizers: text to integers and back.

tokenizer.encode("a text")  -> list of ids        tokenizer.vocab     how many ids there are
tokenizer.decode(ids)       -> str                tokenizer.end       the id that ends a document, or None
tokenizer.token_bytes(id)   -> bytes
"""

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from m2s.data.files import root
from m2s.errors import UserError
from m2s.io import fsync

if TYPE_CHECKING:
    from tiktoken import Encoding


class Tokenizer(ABC):
    """Base of every tokenizer. Subclasses are dataclasses, so that a file can hold their arguments."""

    vocab: int
    end: int | None
    kept: ClassVar[str | None] = None
    """The name of a copy of the file that it is read from; None: it is read from none."""

    @property
    def file(self) -> Path | None:
        """The file that it is read from, which its argument `path` names."""
        return None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`. No end-of-text id is added, and none is read out of the text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. What is no valid text (half a character) shows as U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character; of the end of a document, none."""
        return b"" if token == self.end else self.decode([token]).encode("utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The class and its arguments, for `from_dict`."""
        return {"kind": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]

    def _known(self, ids: Iterable[int]) -> list[int]:
        listed = [int(i) for i in ids]
        for i in listed:
            if not 0 <= i < self.vocab:
                raise ValueError(f"ids holds {i}, but the ids of {type(self).__name__} lie in 0..{self.vocab - 1}")
        return listed


@dataclass(frozen=True)
class Bytes(Tokenizer):
    """UTF-8 bytes, and 256 for the end of a document, which decodes to nothing."""

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return 257

    @property
    def end(self) -> int:  # type: ignore[override]
        return 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in self._known(ids) if i != self.end).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes(i for i in self._known([token]) if i != self.end)


@dataclass(frozen=True)
class Characters(Tokenizer):
    """One id for each character of a given alphabet, in its order; text8's alphabet unless another is given."""

    alphabet: str = " abcdefghijklmnopqrstuvwxyz"

    def __post_init__(self) -> None:
        if len(self.alphabet) < 2 or len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet is {self.alphabet!r}, but it must hold at least two characters, each of them once")

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return len(self.alphabet)

    @property
    def end(self) -> None:  # type: ignore[override]
        return None

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {character: i for i, character in enumerate(self.alphabet)}

    def encode(self, text: str) -> list[int]:
        try:
            return [self._index[character] for character in text]
        except KeyError as error:
            at = text.index(error.args[0])
            raise ValueError(
                f"text[{at}] is {error.args[0]!r}, which is not in the alphabet {self.alphabet!r}: normalise the text first"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i] for i in self._known(ids))


@dataclass(frozen=True)
class GPT2(Tokenizer):
    """GPT-2's byte-level BPE: 50,256 tokens and <|endoftext|> = 50256, from its list of merges.

    `path` is that list (OpenAI's `vocab.bpe`, or `merges.txt` of openai-community/gpt2 on the Hugging Face hub) or a folder
    with it; by default the folder `gpt2` in $M2S_DATA (~/.cache/m2s). The table of tokens beside it (`encoder.json`,
    `vocab.json`) is not needed. It is read when first needed, so that a checkpoint loads on a machine without it.
    """

    path: str | None = None
    kept: ClassVar[str | None] = "merges.txt"

    @property
    def file(self) -> Path:
        return _merges(self.path)

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return 50_257

    @property
    def end(self) -> int:  # type: ignore[override]
        return 50_256

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(self._known(ids), errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.end else self._encoding.decode_single_token_bytes(*self._known([token]))

    @functools.cached_property
    def _encoding(self) -> "Encoding":
        return _gpt2(self.file)


NAMES = ("vocab.bpe", "merges.txt")
PUBLIC = "https://huggingface.co/openai-community/gpt2/resolve/main/merges.txt"
# GPT-2's way of cutting text into words, before any merge
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _merges(path: str | None) -> Path:
    """The file of merges."""
    start = root() / "gpt2" if path is None else Path(path).expanduser()
    for candidate in (start, *(start / name for name in NAMES)):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"GPT-2's merges are not at {start}: put {PUBLIC} into {root() / 'gpt2'}, or set $M2S_DATA to a folder that holds "
        "gpt2/merges.txt (OpenAI's vocab.bpe is the same list; vocab.json and encoder.json are not needed)"
    )


@functools.lru_cache(maxsize=2)
def _gpt2(merges: Path) -> "Encoding":
    """The ids are the 256 bytes in GPT-2's order, then the merges in theirs, then <|endoftext|>."""
    try:
        from tiktoken import Encoding
    except ImportError:
        raise ImportError("the GPT-2 tokenizer needs tiktoken: pip install tiktoken") from None
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]  # written in the file as the characters from 256 on
    byte_of = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    ranks = {bytes([byte]): i for i, byte in enumerate([*shown, *hidden])}
    text = merges.read_text(encoding="utf-8")
    wrong = f"it is not GPT-2's list of merges, {' or '.join(NAMES)} (encoder.json and vocab.json are lists of tokens)"
    if foreign := set(text) - set(byte_of) - {" ", "\n"}:
        raise ValueError(f"{merges} holds {min(foreign)!r}, which stands for no byte: {wrong}")
    for line in (line for line in text.split("\n") if line and not line.startswith("#version")):
        ranks[bytes(byte_of[character] for character in line if character != " ")] = len(ranks)
    if len(ranks) != 50_256:
        raise ValueError(f"{merges} gives {len(ranks)} tokens, but GPT-2 has 50256 before <|endoftext|>: {wrong}")
    return Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50_256})


TOKENIZERS: dict[str, type[Tokenizer]] = {cls.__name__: cls for cls in (Bytes, Characters, GPT2)}
KEPT = tuple(kind.kept for kind in TOKENIZERS.values() if kind.kept is not None)  # names of copies of their files


def check_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, if all is here that it needs to encode and decode."""
    try:
        tokenizer.decode([0])
    except (OSError, ImportError, ValueError) as error:
        raise UserError(str(error)) from error
    return tokenizer


def save_tokenizer_files(tokenizer: Tokenizer, folder: Path) -> Path | None:
    """A copy in `folder` of the file that the tokenizer is read from, for `from_dict`; None: it is read from none."""
    file = tokenizer.file
    if file is None or tokenizer.kept is None:
        return None
    copy, temporary = folder / tokenizer.kept, folder / f"{tokenizer.kept}.tmp"
    temporary.write_bytes(file.read_bytes())
    fsync(temporary)
    os.replace(temporary, copy)
    return copy


def from_dict(description: Mapping[str, Any], folder: Path | None = None) -> Tokenizer:
    """The tokenizer that `to_dict` described, from the copy of its file that `keep` put into `folder` if there is one.

    A file that is no longer where the description says is looked for where the tokenizer looks by itself.
    """
    arguments = dict(description)
    kind = arguments.pop("kind", None)
    if kind not in TOKENIZERS:
        raise ValueError(f"the tokenizer's kind is {kind!r}, but it must be one of {', '.join(TOKENIZERS)}")
    known = [field.name for field in fields(TOKENIZERS[kind])]  # type: ignore[arg-type]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"the tokenizer {kind} has no argument {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    kept = TOKENIZERS[kind].kept
    if folder is not None and kept is not None and (folder / kept).is_file():
        arguments["path"] = str((folder / kept).absolute())
    elif arguments.get("path") is not None and not Path(arguments["path"]).expanduser().exists():
        del arguments["path"]
    return TOKENIZERS[kind](**arguments)
