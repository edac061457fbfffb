"""GPT-2's byte-level BPE from its list of merges, through the package tiktoken."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from m2s.data.files import root
from m2s.data.tokenizer.base import Tokenizer
from m2s.data.tokenizer.byte_level import BYTE_OF, BYTES

if TYPE_CHECKING:
    from tiktoken import Encoding

TOKENS = 50_257  # <|endoftext|> is the last
NAMES = ("vocab.bpe", "merges.txt")
PUBLIC = "https://huggingface.co/openai-community/gpt2/resolve/main/merges.txt"
# GPT-2's rule that cuts text into words before any merge
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class GPT2(Tokenizer):
    """GPT-2's tokenizer: 50,256 tokens and <|endoftext|> = 50256.

    Only the list of merges is needed, not the table of tokens (`encoder.json`, `vocab.json`).

    Args:
        path: The list of merges, or its folder: OpenAI's `vocab.bpe`, or `merges.txt` of openai-community/gpt2 on the Hugging
            Face hub. By default the folder `gpt2` in $M2S_DATA (~/.cache/m2s).
        extra: The number of ids after <|endoftext|>, such as the [PAD] that DUO and GIDD add. No text is encoded to one of
            them, and they are decoded to nothing.
    """

    path: str | None = None
    extra: int = 0
    kept: ClassVar[str | None] = "merges.txt"

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return TOKENS + self.extra

    @property
    def end(self) -> int:  # type: ignore[override]
        return 50_256

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([i for i in self._known(ids) if i < TOKENS], errors="replace")

    def token_bytes(self, token: int) -> bytes:
        (token,) = self._known([token])
        return b"" if token >= self.end else self._encoding.decode_single_token_bytes(token)

    def to_dict(self) -> dict[str, Any]:
        """Return the class and its arguments, for `m2s.data.tokenizer.from_dict`. `extra` is left out where it is 0."""
        described = super().to_dict()
        return described if self.extra else {name: value for name, value in described.items() if name != "extra"}

    def file_contents(self) -> bytes:
        return _find_merges(self.path).read_bytes()

    @functools.cached_property
    def _encoding(self) -> "Encoding":
        return _read_merges(_find_merges(self.path))


def _find_merges(path: str | None) -> Path:
    """Return the path of the list of merges."""
    start = root() / "gpt2" if path is None else Path(path).expanduser()
    for candidate in (start, *(start / name for name in NAMES)):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"GPT-2's merges are not at {start}: run `m2s data download gpt2`, or put {PUBLIC} into {root() / 'gpt2'}, or set "
        "$M2S_DATA to a folder that holds gpt2/merges.txt (OpenAI's vocab.bpe is the same list; vocab.json and encoder.json "
        "are not needed)"
    )


@functools.lru_cache(maxsize=2)
def _read_merges(merges: Path) -> "Encoding":
    """Build the encoding. Its ids are the 256 bytes in GPT-2's order, then the merges in order, then <|endoftext|>."""
    try:
        from tiktoken import Encoding
    except ImportError:
        raise ImportError("the GPT-2 tokenizer needs tiktoken: pip install tiktoken") from None
    ranks = {bytes([byte]): i for i, byte in enumerate(BYTES)}
    text = merges.read_text(encoding="utf-8")
    wrong = f"it is not GPT-2's list of merges, {' or '.join(NAMES)} (encoder.json and vocab.json are lists of tokens)"
    if foreign := set(text) - set(BYTE_OF) - {" ", "\n"}:
        raise ValueError(f"{merges} holds {min(foreign)!r}, which stands for no byte: {wrong}")
    for line in (line for line in text.split("\n") if line and not line.startswith("#version")):
        ranks[bytes(BYTE_OF[character] for character in line if character != " ")] = len(ranks)
    if len(ranks) != 50_256:
        raise ValueError(f"{merges} gives {len(ranks)} tokens, but GPT-2 has 50256 before <|endoftext|>: {wrong}")
    return Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50_256})
