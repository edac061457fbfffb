"""The suffix array: against enumeration of all substrings of small texts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2s.evaluation.text.suffix_array import BLOCK, SuffixArray


def match_lengths(text: list[int], sequences: np.ndarray, depth: int) -> np.ndarray:
    """The longest matches, by comparing every position with every position."""

    def length(row: list[int], at: int) -> int:
        best = 0
        for start in range(len(text)):
            count = 0
            while at + count < len(row) and start + count < len(text) and row[at + count] == text[start + count]:
                count += 1
            best = max(best, count)
        return min(best, depth)

    return np.array([[length(row, at) for at in range(len(row))] for row in sequences.tolist()])


# Large tokens take many bits: then only two of them are sorted at once, and prefixes of 4, 8, ... from ranks.
texts = st.one_of(
    st.lists(st.sampled_from([0, 1, 2**30]), min_size=1, max_size=70),
    st.tuples(st.lists(st.sampled_from([3, 2**30]), min_size=1, max_size=9), st.integers(1, 8)).map(
        lambda two: two[0] * two[1]
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=70),
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=4), st.integers(1, 15)).map(lambda pair: pair[0] * pair[1]),
    st.lists(st.integers(0, 70_000), min_size=1, max_size=30),
)


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(1, 40), st.data())
def test_positions_are_sorted_and_matches_are_the_longest(text: list[int], depth: int, data: st.DataObject) -> None:
    array = SuffixArray(np.array(text, np.uint32), depth)
    positions = array.positions.tolist()
    assert sorted(positions) == list(range(len(text)))
    suffixes = [text[at : at + depth] for at in positions]
    assert suffixes == sorted(suffixes)
    width = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, len(text)))
    drawn = data.draw(st.lists(st.sampled_from([*text, max(text) + 1]), min_size=width, max_size=width))
    sequences = np.array([drawn, np.resize(text[start:] + text[:start], width)])
    assert array.match_lengths(sequences).tolist() == match_lengths(text, sequences, depth).tolist()


@pytest.mark.parametrize("copied", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("occurrences", [1, 2])
def test_long_copies_have_their_length(copied: int, occurrences: int) -> None:
    """A copy between tokens that the text does not have, at the end of the sequence, and at the end of the text."""
    generator = np.random.default_rng(copied)
    text = generator.integers(0, 50, 400)
    text = np.concatenate([text] * occurrences)
    array = SuffixArray(text.astype(np.uint16), 128)
    part = text[100 : 100 + copied]
    inside, at_end = np.full(64, 60), np.full(64, 60)
    inside[5 : 5 + copied], at_end[64 - copied :] = part, part
    found = array.match_lengths(np.stack([inside, at_end]))
    assert found[0, 5] == found[1, 64 - copied] == copied
    assert found[0, :5].tolist() == [0] * 5 and found[0, 5 + copied :].max(initial=0) == 0
    over_the_end = np.concatenate([text[-copied:], [61]])[None]
    assert SuffixArray(text.astype(np.uint16), 128).match_lengths(over_the_end)[0].tolist()[0] == copied


def test_matches_end_at_the_depth() -> None:
    array = SuffixArray(np.arange(50, dtype=np.uint16), 10)
    assert array.match_lengths(np.arange(30)[None]).tolist() == [[min(10, 30 - at) for at in range(30)]]


def test_invalid_texts_are_rejected() -> None:
    with pytest.raises(ValueError, match="the text has 0 tokens"):
        SuffixArray(np.zeros(0, np.uint16), 4)
    with pytest.raises(ValueError, match="the token -2"):
        SuffixArray(np.array([1, -2]), 4)
    with pytest.raises(ValueError, match="depth"):
        SuffixArray(np.array([1]), 0)
