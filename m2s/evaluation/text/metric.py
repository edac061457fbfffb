"""What a metric of text receives and returns."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int

from m2s.data import Tokens
from m2s.evaluation.genppl import Samples, Scores
from m2s.evaluation.text.suffix_array import SuffixArray
from m2s.evaluation.text.words import count_words

CHUNK = 2**20  # tokens that are decoded at once

Value = dict[str, float | None]
"""A measured number: "value", and "low" and "high" of its 95% interval or None."""


@dataclass(frozen=True)
class MeasuredText:
    """A set of texts: samples, or held-out text of the same length.

    Args:
        samples: The texts and their tokens.
        scores: What the judge gives for them; None for a metric that needs no judge.
    """

    samples: Samples
    scores: Scores | None = None

    @property
    def tokens(self) -> Int[np.ndarray, "n L"]:
        """The tokens, [n, L]."""
        assert self.samples.tokens is not None  # `m2s evaluate text` reads .npz files
        return self.samples.tokens

    @property
    def judged(self) -> Scores:
        """What the judge gives.

        Raises:
            ValueError: The text was not judged.
        """
        if self.scores is None:
            raise ValueError(f"{self.samples.path} was not read by a judge: the metric must declare that it needs one")
        return self.scores


class TrainingText:
    """The text that a model was trained on, with a suffix array and a count of words, made when a metric asks for them.

    Args:
        folder: The folder that `m2s data prepare` made.
        limit: The greatest number of tokens, from its start; None: all.
        device: Where the suffix array is built and searched.
    """

    def __init__(self, folder: Path, limit: int | None = None, device: torch.device | str = "cpu") -> None:
        self._tokens, self.device = Tokens(folder, "train", 1), device
        self.total = len(self._tokens)
        self.count = self.total if limit is None else min(limit, self.total)
        self._index: SuffixArray | None = None

    @property
    def fingerprint(self) -> str:
        """What identifies the tokens: the checksum of the files, and how many of them are used."""
        return f"{self._tokens.fingerprint}:{self.count}"

    def index(self, depth: int) -> SuffixArray:
        """Return the suffix array.

        Args:
            depth: The length up to which matches are needed.
        """
        if self._index is None or self._index.depth < depth:
            self._index = SuffixArray(self._tokens.stream(self.count), depth, self.device)
        return self._index

    @functools.cached_property
    def words(self) -> Counter[str]:
        """How often each word occurs (`m2s.evaluation.text.words`)."""
        tokenizer, stream, found, rest = self._tokens.tokenizer, self._tokens.stream(self.count), Counter[str](), ""
        for start in range(0, len(stream), CHUNK):
            tokens = stream[start : start + CHUNK]
            # Some tokenizers decode the end of a document to nothing, which would join two words.
            documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.end)) if tokenizer.end is not None else [tokens]
            text = rest + " ".join(tokenizer.decode(document.tolist()) for document in documents)
            complete = len(re.sub(r"[^\W\d_]+$", "", text))  # the last word may continue in the next part
            found.update(count_words(text[:complete]))
            rest = text[complete:]
        found.update(count_words(rest))
        return found


@dataclass(frozen=True)
class TextContext:
    """What samples are compared with, and the settings that metrics share.

    Args:
        reference: Held-out text of the same length, as the samples are.
        training: The text that the model was trained on; None where no metric needs it.
        resamples: The number of bootstrap resamples.
        seed: The seed of the bootstrap and of k-means.
        device: Where embeddings are compared.
    """

    reference: MeasuredText
    training: TrainingText | None = None
    resamples: int = 2000
    seed: int = 0
    device: torch.device | str = "cpu"


@dataclass(frozen=True)
class Column:
    """A number that a metric gives.

    Args:
        name: Its key in the result of the metric.
        better: Which samples are ranked first: those with the lowest or the highest value, or with the value that is closest
            to that of held-out text.
        description: What it is.
        format: How a value is printed, as Python's `format` takes it.
        printed: Whether it is in the printed table; otherwise it is only in the file.
    """

    name: str
    better: Literal["lowest", "highest", "closest"]
    description: str
    format: str = ".3f"
    printed: bool = True


@dataclass(frozen=True)
class TextMetric:
    """A metric of a set of texts.

    Args:
        measure: The function `measure(text, context)`. It returns a `Value` for every column, and may return more keys, which
            are written to the file.
        columns: The numbers that it gives.
        needs: The resources that it needs: "judge", "training text".
        version: Changed whenever the metric computes something else, so that stored results are not used.
    """

    measure: Callable[[MeasuredText, TextContext], Mapping[str, Any]]
    columns: tuple[Column, ...]
    needs: frozenset[str] = frozenset()
    version: int = 1
