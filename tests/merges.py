"""A list of merges that GPT-2's tokenizer takes for its own: 50,000 of the pairs of two bytes."""

import itertools
from pathlib import Path


def write_merges(path: Path) -> Path:
    """Every text is encoded and comes back, though not to GPT-2's ids."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [*map(chr, shown), *map(chr, range(256, 256 + 256 - len(shown)))]
    pairs = itertools.islice(itertools.product(letters, letters), 50_000)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs), encoding="utf-8")
    return path
