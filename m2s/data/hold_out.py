"""How much of a text is held out for validation, and which tokens.

Every k-th document goes to validation while the text is packed, where one in k is the fraction that is held out. This spreads
validation over the text. When the number of tokens is known, at the end, tokens are moved until the count is exact: the last
ones of validation to the end of train, or the last ones of train to the end of validation. So a text of few documents, or of
documents of very different length, has the same share of validation as any other. One document may be cut.
"""

from collections.abc import Iterable, Mapping

from m2s.data.documents import DocumentSource, is_filled
from m2s.data.encode import encode_document
from m2s.data.files import BadData
from m2s.data.shards import Shards
from m2s.data.tokenizer import Tokenizer

FRACTION, SMALL_FRACTION = 0.01, 0.1
"""The fraction of the tokens that is held out by default, and that of a text of fewer than `SMALL` tokens."""
SMALL = 100_000
_MOVED_AT_ONCE = 2**22  # tokens in memory while they are moved
_PREFIX = 2**20  # characters that are tokenized first to see whether a document is large


def default_fraction(sources: Iterable[DocumentSource], tokenizer: Tokenizer) -> float:
    """Return the fraction of the tokens to hold out where none is given.

    At most the first `SMALL` tokens or so are encoded, so that a large text costs no more than a small one.

    Args:
        sources: The text. Only sources without a split of their own count.
        tokenizer: The tokenizer.

    Returns:
        `SMALL_FRACTION` for fewer than `SMALL` tokens, else `FRACTION`.
    """
    tokens = 0
    for source in sources:
        if source.split is not None:
            continue
        for document in source.read(0):
            if not is_filled(document):
                continue
            for text in dict.fromkeys((document.text[:_PREFIX], document.text)):
                ids = encode_document(tokenizer, text)
                # Packing reports a document that cannot be encoded, with its place.
                count = 0 if isinstance(ids, str) else len(ids)
                if tokens + count >= SMALL:
                    return FRACTION
            tokens += count
    return SMALL_FRACTION


def spacing(fraction: float) -> int:
    """Return k: while a text is packed, every k-th document goes to validation.

    Args:
        fraction: The fraction of the tokens that is held out, in [0, 1).

    Returns:
        1 / fraction, rounded; 0 where nothing is held out.
    """
    return round(min(1 / fraction, 2.0**62)) if fraction else 0


def held_out(tokens: int, fraction: float) -> int:
    """Return the number of tokens for validation.

    Args:
        tokens: The number of tokens to divide.
        fraction: The fraction that is held out, in [0, 1).

    Returns:
        The fraction of the tokens, rounded. Both train and validation get a token where there are two.
    """
    return min(max(round(fraction * tokens), 1), tokens - 1) if fraction else 0


def move_tokens(
    shards: Mapping[str, Shards], target: int, end: int | None, tokens: dict[str, int], documents: dict[str, int]
) -> None:
    """Move tokens between train and validation until validation has `target` tokens.

    Tokens are copied to the end of one split. The caller stores the counts, and then cuts the other split to its new length. So
    an interruption loses and duplicates nothing.

    Args:
        shards: The files by split. They must be flushed.
        target: The number of tokens that validation shall have.
        end: The end token, which tells where documents begin; None: documents are not counted again.
        tokens: The number of tokens by split, changed in place.
        documents: The number of documents by split, changed in place. A document counts for the split in which it begins.

    Raises:
        BadData: The counts are impossible.
    """
    surplus = tokens["validation"] - target
    source, sink = ("validation", "train") if surplus > 0 else ("train", "validation")
    stop = tokens[source]
    start = stop - abs(surplus)
    if start < 0:
        raise BadData(f"{shards[source].folder / 'progress.json'} is damaged: delete the folder and prepare the text again")
    for first in range(start, stop, _MOVED_AT_ONCE):
        last = min(first + _MOVED_AT_ONCE, stop)
        shards[sink].append(shards[source].read(first, last))
        if end is not None:
            begun = int((shards[source].read(max(first - 1, 0), last - 1) == end).sum()) + (first == 0)
            documents[source] -= begun
            documents[sink] += begun
    tokens[source], tokens[sink] = start, shards[sink].tokens
