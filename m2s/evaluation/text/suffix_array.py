"""The longest match of every position of some sequences in a long text, by a suffix array. All answers are exact.

The suffix array lists the positions of a text in the order of the tokens that follow them, so that all places where a sequence
of tokens occurs are one range of it. It is built by prefix doubling (Manber and Myers 1993): positions that are sorted by their
first w tokens become sorted by 2w, since the order of the second w tokens is known. Only positions that are still tied are
sorted again, as in Larsson and Sadakane (2007).
"""

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64, Integer
from torch import Tensor

from m2s import validation

MAX_TOKENS = 2**31 - 2
"""The greatest length of a text, whose positions are 32-bit numbers."""
BLOCK = 16  # tokens that are compared at a time where a match is unique


class SuffixArray:
    """The positions of a text, sorted by the tokens from there on.

    It takes 8 bytes per token, and up to 60 while it is built.

    Args:
        text: The tokens, at least one, [N].
        depth: The number of tokens to sort by. Matches are found up to this length.
        device: Where it is built and searched.

    Raises:
        ValueError: The text is empty or too long, or has a negative token.
    """

    def __init__(self, text: Integer[np.ndarray, "N"], depth: int, device: torch.device | str = "cpu") -> None:
        validation.positive_int("depth", depth)
        if not 0 < len(text) <= MAX_TOKENS:
            raise ValueError(f"the text has {len(text):,} tokens, expected 1 to {MAX_TOKENS:,}")
        self.depth = depth
        # One more token, smaller than all others, stands after the end.
        self.text = torch.from_numpy(np.append(text.astype(np.int32), np.int32(-1))).to(device)
        if int(self.text[:-1].min()) < 0:
            raise ValueError(f"the text has the token {int(self.text[:-1].min())}, expected tokens from 0 on")
        self.positions = _sorted_positions(self.text[:-1], depth)
        # The distinct tokens, and where the positions of each start. A table of all ids would be large for large ids.
        self.tokens, counts = self.text[self.positions].long().unique_consecutive(return_counts=True)
        self.starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def match_lengths(self, sequences: Integer[np.ndarray, "n L"]) -> Int32[np.ndarray, "n L"]:
        """Find how many tokens from each position of some sequences occur in the text, contiguously and in this order.

        The n-gram at position i occurs in the text exactly where the length at i is at least n.

        Args:
            sequences: The sequences, [n, L].

        Returns:
            The length of the longest match at each position, [n, L]. Matches end with the sequence, or at `depth`.
        """
        width = sequences.shape[1]
        queries = torch.from_numpy(sequences.astype(np.int64)).to(self.text.device).reshape(-1)
        first = torch.searchsorted(self.tokens, queries).clamp(max=len(self.tokens) - 1)
        low, high = self.starts[first], self.starts[first + 1]
        lengths = (self.tokens[first] == queries).int()
        active = lengths.nonzero()[:, 0]
        low, high = low[active], high[active]
        for depth in range(1, min(width, self.depth)):
            single = high - low == 1
            alone = active[single]
            lengths[alone] = self._extend(queries, alone, self.positions[low[single]].long(), depth, width).int()
            several = ~single & (active % width + depth < width)
            active, low, high = active[several], low[several], high[several]
            if not len(active):
                break
            token = queries[active + depth]
            low, high = (self._search(low, high, depth, token, after) for after in (False, True))
            found = high > low
            active, low, high = active[found], low[found], high[found]
            lengths[active] = depth + 1
        return lengths.reshape(sequences.shape).cpu().numpy()

    def _extend(
        self, queries: Int64[Tensor, "nL"], start: Int64[Tensor, "m"], position: Int64[Tensor, "m"], depth: int, width: int
    ) -> Int64[Tensor, "m"]:
        """Return the length of each match that occurs once in the text, compared some tokens at a time."""
        lengths = torch.full_like(start, depth)
        active = torch.arange(len(start), device=start.device)
        offsets = torch.arange(BLOCK, device=start.device)
        while len(active):
            ahead = lengths[active, None] + offsets
            query = queries[(start[active, None] + ahead).clamp(max=len(queries) - 1)]
            inside = (start[active] % width)[:, None] + ahead < width
            equal = inside & (self.text[(position[active, None] + ahead).clamp(max=len(self.text) - 1)] == query)
            matched = equal.cumprod(1).sum(1)
            lengths[active] += matched
            active = active[matched == BLOCK]
        return lengths.clamp(max=self.depth)

    def _search(
        self, low: Int64[Tensor, "m"], high: Int64[Tensor, "m"], depth: int, token: Int64[Tensor, "m"], after: bool
    ) -> Int64[Tensor, "m"]:
        """Find by bisection where the given token begins in each range, or, with `after`, where it ends."""
        for _ in range(int((high - low).max()).bit_length()):
            middle = (low + high) // 2
            here = self._token(middle.clamp(max=len(self.positions) - 1), depth)
            below = (here <= token if after else here < token) & (low < high)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle.minimum(high))
        return low

    def _token(self, slot: Int64[Tensor, "m"], depth: int) -> Int32[Tensor, "m"]:
        """Return the token that is `depth` tokens after the positions in some slots; -1 after the end."""
        return self.text[(self.positions[slot] + depth).clamp(max=len(self.text) - 1)]


def _sorted_positions(text: Int32[Tensor, "N"], depth: int) -> Int32[Tensor, "N"]:
    """Sort the positions of a text by the `depth` tokens from there on. A text that ends comes first."""
    bits = (int(text.max()) + 1).bit_length()
    width = min(depth, 63 // bits)
    keys = torch.zeros(len(text), dtype=torch.int64, device=text.device)
    for offset in range(width):
        keys <<= bits
        keys[: max(0, len(text) - offset)] += text[offset:] + 1
    order, changed = _sorted(keys)
    del keys
    slots = torch.arange(len(text), device=text.device, dtype=torch.int32)
    positions, rank = order.int(), torch.empty_like(slots)
    rank[order] = _first_slots(slots, changed)
    del order
    slots = slots[_tied(changed)]
    while len(slots) and width < depth:
        order, changed = _sorted(_pair_keys(rank, positions[slots], width))
        at = positions[slots][order]
        del order
        positions[slots] = at
        rank[at] = _first_slots(slots, changed)
        slots = slots[_tied(changed)]
        width *= 2
    return positions


def _pair_keys(rank: Int32[Tensor, "N"], at: Int32[Tensor, "m"], width: int) -> Int64[Tensor, "m"]:
    """Return the rank at some positions and the rank `width` tokens later as one number. A position after the end is first."""
    keys = rank[at].long()
    keys <<= 32
    after = at + width
    keys |= (rank[after.clamp(max=len(rank) - 1)] + 1).masked_fill_(after >= len(rank), 0)
    return keys


def _sorted(keys: Int64[Tensor, "m"]) -> tuple[Int64[Tensor, "m"], Bool[Tensor, "m"]]:
    """Return the order of the keys, and which of the sorted keys differ from the one before."""
    keys, order = keys.sort()
    return order, _changed(keys)


def _changed(keys: Int64[Tensor, "m"]) -> Bool[Tensor, "m"]:
    """Return where a key differs from the one before it. The first one does."""
    return torch.cat([torch.ones_like(keys[:1], dtype=torch.bool), keys[1:] != keys[:-1]])


def _tied(changed: Bool[Tensor, "m"]) -> Bool[Tensor, "m"]:
    """Return which keys are equal to a neighbor."""
    return ~(changed & torch.cat([changed[1:], torch.ones_like(changed[:1])]))


def _first_slots(slots: Int32[Tensor, "m"], changed: Bool[Tensor, "m"]) -> Int32[Tensor, "m"]:
    """Return for each slot the first slot of its group of equal keys. The slots are in order."""
    return slots.where(changed, 0).cummax(0).values
