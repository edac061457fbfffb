"""Score samples by a judge, a causal language model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32

from m2s.errors import UserError
from m2s.evaluation.bootstrap import Statistic
from m2s.evaluation.genppl.protocol import Protocol
from m2s.evaluation.genppl.samples import Samples, decode
from m2s.evaluation.judge import END, Judge, TokenizedText

NLL, TOKENS, BYTES, PERPLEXITY, SCORED, ENTROPY, ONE = range(7)  # columns of Scores.columns


@dataclass(frozen=True)
class Scores:
    """The judge's NLL and token counts of each sample, in the order of the file.

    Args:
        samples: The samples.
        judge: The description of the judge.
        nll: Nats, summed over the scored tokens, [n].
        tokens: The number of scored tokens, [n].
        bytes: The number of bytes of the text that they stand for, [n].
        entropy: The entropy of the tokens within each sequence, nats, [n].
        corpus_entropy: The entropy of all tokens together, nats.
        entropy_of: Whose tokens the entropies count: "sample" or "judge".
        distinct: The number of distinct texts.
        last: The judge's hidden state at the last token of each text, [n, H].
        mean: The mean of the judge's hidden states over the tokens of each text, [n, H].
    """

    samples: Samples
    judge: dict[str, Any]
    nll: Float[np.ndarray, "n"]
    tokens: Float[np.ndarray, "n"]
    bytes: Float[np.ndarray, "n"]
    entropy: Float[np.ndarray, "n"]
    corpus_entropy: float
    entropy_of: str
    distinct: int
    last: Float32[np.ndarray, "n H"]
    mean: Float32[np.ndarray, "n H"]

    @property
    def columns(self) -> Float[np.ndarray, "n 7"]:
        """The numbers of each sequence whose sums `STATISTICS` use, [n, 7]. See `sequence_columns`."""
        return sequence_columns(self.nll, self.tokens, self.bytes, self.entropy)


def sequence_columns(
    nll: Float[np.ndarray, "n"],
    tokens: Float[np.ndarray, "n"],
    bytes: Float[np.ndarray, "n"],
    entropy_nats: Float[np.ndarray, "n"],
) -> Float[np.ndarray, "n 7"]:
    """Return the numbers of each sequence whose sums `STATISTICS` use.

    Args:
        nll: Nats, summed over the scored tokens, [n].
        tokens: The number of scored tokens, [n].
        bytes: The number of bytes that they stand for, [n].
        entropy_nats: The entropy of the tokens within each sequence, [n].

    Returns:
        The columns, [n, 7]. A sequence without a scored token has no perplexity and is left out of the mean of perplexities.
    """
    scored = tokens > 0
    perplexity = np.where(scored, np.exp(nll / np.maximum(tokens, 1)), 0.0)
    ones = np.ones_like(nll)
    return np.stack([nll, tokens, bytes, perplexity, scored.astype(np.float64), entropy_nats, ones], axis=1)


STATISTICS: dict[str, Statistic] = {
    "perplexity_over_tokens": lambda sums: np.exp(sums[..., NLL] / sums[..., TOKENS]),
    "perplexity_over_sequences": lambda sums: sums[..., PERPLEXITY] / sums[..., SCORED],
    "nats_per_token": lambda sums: sums[..., NLL] / sums[..., TOKENS],
    "nats_per_byte": lambda sums: sums[..., NLL] / sums[..., BYTES],
    "bits_per_byte": lambda sums: sums[..., NLL] / sums[..., BYTES] / math.log(2),
    "entropy_bits": lambda sums: sums[..., ENTROPY] / sums[..., ONE] / math.log(2),
    "entropy_nats": lambda sums: sums[..., ENTROPY] / sums[..., ONE],
}
"""Each statistic as a function of the sums of `Scores.columns` over sequences, for the bootstrap."""


def score(samples: Samples, judge: Judge, batch_size: int = 8) -> Scores:
    """Score every sample as its protocol says.

    Args:
        samples: The samples.
        judge: The language model.
        batch_size: Sequences that the judge reads at once.

    Returns:
        NLL, tokens, bytes, entropy and embeddings of each sample.

    Raises:
        UserError: No token can be scored, or the judge cannot read the samples' tokens.
    """
    protocol = samples.protocol
    if protocol.retokenize:
        readings = judge.tokenize_all(samples.texts, protocol.tokens, protocol.bos)
    else:
        readings = _read_as_tokens(samples, judge)
    counted = [_counted_tokens(reading.ids, judge, protocol) for reading in readings]
    if not any(mask.any() for mask in counted):
        raise UserError(f"no sample in {samples.path} has a token to score: they are empty, or have one token and no BOS")
    first = int(protocol.bos and judge.bos is not None)
    output = judge.read([reading.ids for reading in readings], batch_size, first)
    sequences = [reading.ids[first:] for reading in readings] if samples.tokens is None else list(samples.tokens)
    return Scores(
        samples=samples,
        judge=judge.describe(),
        nll=np.array([float(values[mask].sum()) for values, mask in zip(output.nll, counted, strict=True)]),
        tokens=np.array([float(mask.sum()) for mask in counted]),
        bytes=np.array([float(reading.bytes) for reading in readings]),
        entropy=np.array([entropy(sequence) for sequence in sequences]),
        corpus_entropy=entropy(np.concatenate(sequences)),
        entropy_of="judge" if samples.tokens is None else "sample",
        distinct=len(set(samples.texts)),
        last=output.last,
        mean=output.mean,
    )


def _read_as_tokens(samples: Samples, judge: Judge) -> list[TokenizedText]:
    """Return the samples' tokens as the judge's, if every token means the same to both."""
    name, rows, tokenizer = samples.protocol.name, samples.tokens, samples.tokenizer
    if rows is None or tokenizer is None:
        raise UserError(
            f"the protocol {name} scores the samples' own tokens, but {samples.path} holds text: give the .npz, or choose a "
            "protocol that reads text (paper, mdlm)"
        )
    for token in np.unique(rows).tolist():
        theirs = judge.tokenizer.decode([token], clean_up_tokenization_spaces=False) if token < judge.vocab else None
        if theirs != tokenizer.decode([token]):
            raise UserError(
                f"the protocol {name} scores the samples' own tokens, but token {token} of {type(tokenizer).__name__} has a "
                f"different text in the vocabulary of the judge {judge.name}: choose a judge with the same tokens "
                f"({samples.protocol.judge}), or a protocol that tokenizes the text again (paper, mdlm)"
            )
    return [TokenizedText(row.tolist(), len(decode(tokenizer, row[1:]).replace(END, "").encode())) for row in rows]


def _counted_tokens(ids: Sequence[int], judge: Judge, protocol: Protocol) -> Bool[np.ndarray, "_"]:
    """Return which predicted tokens count, [len(ids) - 1]: all, or only the first end-of-text token of the sequence."""
    end = np.asarray(ids, dtype=np.int64) == (-1 if judge.end is None else judge.end)
    if protocol.bos and judge.bos is not None:
        end[0] = False
    counted = ~end | (end.cumsum() == 1) | (protocol.ends == "all")
    return counted[1:]


def entropy(tokens: Any) -> float:
    """Return -sum p log p of the frequencies of the tokens, in nats.

    Args:
        tokens: A sequence of integers.
    """
    _, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
    p = counts / max(counts.sum(), 1)
    return float(-(p * np.log(p)).sum()) + 0.0  # + 0.0 turns -0.0 into 0.0
