"""Held-out text of the same length as samples: one set to compare with, and another that is measured like samples."""

from pathlib import Path

import torch

from m2s.data import BadData, Tokenizer, Tokens
from m2s.data.tokens import read_meta
from m2s.errors import UserError
from m2s.evaluation.genppl import Protocol, Samples, decode


def held_out_split(folder: Path, length: int, split: str = "") -> str:
    """Return the split of held-out text.

    Args:
        folder: The folder that `m2s data prepare` made.
        length: The number of tokens of a window.
        split: The split that was asked for; "": test, or validation where test has fewer than four windows.

    Raises:
        UserError: There is no such split, or it has fewer than four windows.
    """
    sizes = {name: entry["tokens"] // length for name, entry in read_meta(folder)["splits"].items()}
    found = split or ("test" if sizes.get("test", 0) >= 4 else "validation")
    if sizes.get(found, 0) < 4:
        raise UserError(
            f"{folder}: {found} has {sizes.get(found, 0)} windows of {length} tokens, and two sets of held-out text need at "
            "least 4: prepare more text, or a larger --validation-fraction"
        )
    return found


def load_held_out(
    folder: Path, split: str, count: int, length: int, tokenizer: Tokenizer, protocol: Protocol
) -> tuple[Samples, Samples]:
    """Load two disjoint sets of windows, spread evenly over a split. They alternate.

    Args:
        folder: The folder that `m2s data prepare` made.
        split: The split.
        count: The number of windows of each set. There are fewer where the split has fewer than 2 count windows.
        length: The number of tokens of a window.
        tokenizer: Decodes the tokens.
        protocol: The protocol by which they are scored.

    Returns:
        The windows that samples are compared with, and those that are measured like samples. The values of the latter are those
        of perfect samples, up to noise.

    Raises:
        BadData: The folder is damaged.
    """
    windows = Tokens(folder, split, length)
    each = min(count, len(windows) // 2)
    tokens = windows[torch.arange(2 * each) * len(windows) // (2 * each)].numpy()
    if int(tokens.max()) >= tokenizer.vocab:
        raise BadData(f"{folder} has tokens that its tokenizer does not have: prepare the text again")

    def samples(first: int, name: str) -> Samples:
        part = tokens[first::2]
        texts = [decode(tokenizer, row) for row in part]
        return Samples(folder / f"{split}-{name}", protocol, texts, part, tokenizer, {})

    return samples(0, "reference"), samples(1, "held-out")
