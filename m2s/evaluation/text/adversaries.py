"""Adversaries: samples that no good metric should rank above those of a model.

Each is a function of a prepared text. A metric that ranks one first can be raised without modeling language:

* `unigram`: independent tokens with the frequencies of the training text;
* `bigram`: a Markov chain with the transitions of the training text;
* `shuffled`: held-out text, with the tokens of each window in random order;
* `repeated`: one sentence of held-out text, repeated until the window is full; each sample has its own;
* `copied`: windows of the training text, word for word.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer

from m2s.data import Tokens
from m2s.errors import UserError
from m2s.registry import Registry
from m2s.rng import derived_seed

LONGEST_SENTENCE = 64  # tokens


@dataclass(frozen=True)
class AdversarySource:
    """A prepared text, from which adversaries are made.

    Args:
        folder: The folder that `m2s data prepare` made.
        length: The number of tokens of a sample.
        split: The split of held-out text.
    """

    folder: Path
    length: int
    split: str

    @property
    def held_out(self) -> Tokens:
        """The windows of held-out text."""
        return Tokens(self.folder, self.split, self.length)

    @property
    def training(self) -> Integer[np.ndarray, "N"]:
        """All tokens of the training text."""
        return Tokens(self.folder, "train", self.length).stream()


Adversary = Callable[[AdversarySource, int, np.random.Generator], Int64[np.ndarray, "n L"]]
"""Makes n samples of a source."""

ADVERSARIES: Registry[Adversary] = Registry("adversary")
"""Every adversary of `m2s data adversaries`."""


def make_adversary(name: str, source: AdversarySource, n: int, seed: int) -> Int64[np.ndarray, "n L"]:
    """Make the samples of an adversary.

    Args:
        name: A name in `ADVERSARIES`.
        source: The prepared text.
        n: The number of samples.
        seed: The seed. Different adversaries use independent random numbers.

    Returns:
        The tokens, [n, L].

    Raises:
        UserError: There is no such adversary, or too little text.
    """
    return ADVERSARIES.find(name)(source, n, np.random.default_rng(derived_seed(seed, "adversary", name)))


@ADVERSARIES.register("unigram")
def unigram(source: AdversarySource, n: int, generator: np.random.Generator) -> Int64[np.ndarray, "n L"]:
    """Draw independent tokens with the frequencies of the training text.

    Args:
        source: The prepared text.
        n: The number of samples.
        generator: The random numbers.

    Returns:
        The tokens, [n, L].
    """
    text = source.training
    return text[generator.integers(len(text), size=(n, source.length))].astype(np.int64)


@ADVERSARIES.register("bigram")
def bigram(source: AdversarySource, n: int, generator: np.random.Generator) -> Int64[np.ndarray, "n L"]:
    """Draw Markov chains with the transitions of the training text.

    The next token is the one after a random occurrence of the current token, which is a draw from the empirical transition
    probabilities. The first token, and the one after a token that occurs at the end of the text only, has the frequencies of
    the training text.

    Args:
        source: The prepared text.
        n: The number of samples.
        generator: The random numbers.

    Returns:
        The tokens, [n, L].
    """
    text = source.training
    occurrences = np.argsort(text[:-1], kind="stable")
    ends = np.bincount(text[:-1], minlength=int(text.max()) + 1).cumsum()
    counts = np.diff(ends, prepend=0)
    tokens = np.empty((n, source.length), np.int64)
    tokens[:, 0] = text[generator.integers(len(text), size=n)]
    for column in range(1, source.length):
        current = tokens[:, column - 1]
        known = counts[current] > 0
        nth = (generator.random(n) * counts[current]).astype(np.int64)
        at = occurrences[np.where(known, ends[current] - counts[current] + nth, 0)]
        tokens[:, column] = np.where(known, text[at + 1], text[generator.integers(len(text), size=n)])
    return tokens


@ADVERSARIES.register("shuffled")
def shuffled(source: AdversarySource, n: int, generator: np.random.Generator) -> Int64[np.ndarray, "n L"]:
    """Put the tokens of windows of held-out text into random order.

    Args:
        source: The prepared text.
        n: The number of samples.
        generator: The random numbers.

    Returns:
        The tokens, [n, L].
    """
    return generator.permuted(_windows(source.held_out, n, generator), axis=1)


@ADVERSARIES.register("repeated")
def repeated(source: AdversarySource, n: int, generator: np.random.Generator) -> Int64[np.ndarray, "n L"]:
    """Repeat one sentence of held-out text until the window is full.

    A sentence starts after one token that ends with . ! or ? and ends with the next, and has 5 to 64 tokens. A window without
    one gives its first 32 tokens. A sentence has at most half of the window.

    Args:
        source: The prepared text.
        n: The number of samples.
        generator: The random numbers.

    Returns:
        The tokens, [n, L].
    """
    windows = _windows(source.held_out, n, generator)
    ends = _ends_of_sentences(source.held_out)
    return np.stack([np.resize(_sentence(row, ends), source.length) for row in windows])


@ADVERSARIES.register("copied")
def copied(source: AdversarySource, n: int, generator: np.random.Generator) -> Int64[np.ndarray, "n L"]:
    """Take windows of the training text as they are.

    Args:
        source: The prepared text.
        n: The number of samples.
        generator: The random numbers.

    Returns:
        The tokens, [n, L].
    """
    return _windows(Tokens(source.folder, "train", source.length), n, generator)


def _windows(tokens: Tokens, n: int, generator: np.random.Generator) -> Int64[np.ndarray, "n L"]:
    """Draw n different windows."""
    if len(tokens) < n:
        raise UserError(
            f"{tokens.folder}: {tokens.split} has {len(tokens):,} windows of {tokens.length} tokens, and {n:,} samples need as "
            "many: give a smaller --n or --length"
        )
    return tokens[torch.from_numpy(generator.permutation(len(tokens))[:n])].numpy()


def _ends_of_sentences(tokens: Tokens) -> Bool[np.ndarray, "V"]:
    """Return which tokens end a sentence."""
    tokenizer = tokens.tokenizer
    return np.array([tokenizer.token_bytes(token).rstrip().endswith((b".", b"!", b"?")) for token in range(tokens.vocab)])


def _sentence(row: Int64[np.ndarray, "L"], ends: Bool[np.ndarray, "V"]) -> Int64[np.ndarray, "m"]:
    """Return the first sentence of a window that is neither too short nor too long."""
    longest = max(1, len(row) // 2)
    marks = np.flatnonzero(ends[row]) + 1
    for start, stop in itertools.pairwise(marks):
        if 5 <= stop - start <= min(LONGEST_SENTENCE, longest):
            return row[start:stop]
    return row[: min(32, longest)]
