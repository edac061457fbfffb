"""Examples to evaluate on."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Int, Integer
from torch import Tensor


@runtime_checkable
class EvaluationSet(Protocol):
    """Examples by index: a tensor [N, L], an `m2s.data.Tokens`, or any object with these two methods."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return the examples [n, L] of the indices [n]."""


@dataclass(frozen=True)
class Shard:
    """Some examples, spread evenly over an evaluation set, so that a part of a sorted set represents all of it.

    Args:
        rows: The evaluation set.
        count: The number of examples to take.
    """

    rows: EvaluationSet
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Int[Tensor, "n"]) -> Integer[Tensor, "n *L"]:
        return self.rows[index * len(self.rows) // self.count]
