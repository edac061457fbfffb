"""The words of a text: maximal runs of letters, in lower case."""

import re
from collections import Counter

WORD = re.compile(r"[^\W\d_]+")
END = "<|endoftext|>"  # the end of a document, which is no word


def count_words(text: str) -> Counter[str]:
    """Count the words of a text.

    Args:
        text: The text.

    Returns:
        How often each word occurs.
    """
    return Counter(WORD.findall(text.replace(END, " ").lower()))


def inner_words(text: str) -> list[str]:
    """Return the words of a text without those at its ends, which may be cut.

    Args:
        text: The text.

    Returns:
        The words, in their order.
    """
    text = text.lower()
    inner = [found for found in WORD.finditer(text) if found.start() > 0 and found.end() < len(text)]
    # An end of a document is within the text, so its letters are found as a word.
    return [found[0] for found in inner if text[found.start() - 2 : found.end() + 2] != END]
