"""Tokenizers that need no file: bytes and characters."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from m2s.data.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Bytes(Tokenizer):
    """UTF-8 bytes; id 256 ends a document and decodes to nothing.

    Example:
        >>> Bytes().encode("aé")
        [97, 195, 169]
    """

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
    """One id for each character of an alphabet. Documents are not separated.

    Args:
        alphabet: The characters, in the order of their ids; by default those of text8.

    Raises:
        ValueError: The alphabet has fewer than two characters, or one of them twice.
    """

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
                f"text[{at}] is {error.args[0]!r}, which is not in the alphabet {self.alphabet!r}: normalize the text first"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i] for i in self._known(ids))
