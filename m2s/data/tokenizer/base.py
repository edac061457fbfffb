"""The base class of every tokenizer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, ClassVar


class Tokenizer(ABC):
    """Base class of tokenizers.

    Subclasses are dataclasses, so that their arguments can be stored in a JSON file. They read their files when they are first
    needed. So a checkpoint loads on a machine that does not have them.
    """

    vocab: int
    """The number of tokens."""
    end: int | None
    """The id that ends a document; None where documents are not separated."""
    kept: ClassVar[str | None] = None
    """The name of the copy of its file in a checkpoint or in packed data; None for a tokenizer without a file."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. No end token is added, and a special token in the text is ordinary text.

        Args:
            text: The text.

        Raises:
            ValueError: The vocabulary has no token for a character (`Characters`).
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8, such as half a character, become U+FFFD.

        Args:
            ids: Token ids, each below `vocab`.

        Raises:
            ValueError: An id is not in the vocabulary.
        """

    def batch_decode(self, batch: Iterable[Any]) -> list[str]:
        """Return the text of each sequence, as the tokenizers of transformers do.

        Args:
            batch: Token ids, [B, L], as a tensor, an array or lists. Negative ids, which `m2s.sample` returns at padding, are
                left out.

        Returns:
            One text for each sequence.

        Raises:
            ValueError: An id is not in the vocabulary.
        """
        return [self.decode([int(i) for i in ids if int(i) >= 0]) for ids in batch]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for, which may be part of a character; none for the end token.

        Args:
            token: A token id.
        """
        return b"" if token == self.end else self.decode([token]).encode("utf-8")

    def file_contents(self) -> bytes | None:
        """Return the contents of the file that the tokenizer is read from, to be copied; None where there is no file."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the class and its arguments, for `m2s.data.tokenizer.from_dict`."""
        return {"kind": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]

    def _known(self, ids: Iterable[int]) -> list[int]:
        """Return the ids as a list; raise ValueError if one is not in the vocabulary."""
        listed = [int(i) for i in ids]
        for i in listed:
            if not 0 <= i < self.vocab:
                raise ValueError(f"ids holds {i}, but the ids of {type(self).__name__} lie in 0..{self.vocab - 1}")
        return listed
