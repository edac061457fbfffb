"""What a method is: a system of the literature as a choice of our parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """Settings of a run under one name. What a user gives outright wins over them."""

    name: str  # what `m2s train --method` takes
    title: str  # whose it is, in a line
    settings: Mapping[str, Any]  # keys of the configuration that are "auto" unless given
    text: str  # what it computes, with its equations (Markdown): its part of docs/methods.md
    bibtex: str = field(repr=False)
    sampler: str = "bayes"  # that of its authors where it is known, as `m2s sample` names it

    @property
    def entries(self) -> list[str]:
        """Its BibTeX, entry by entry."""
        return self.bibtex.split("\n\n")

    def __post_init__(self) -> None:
        if self.bibtex.count("{") != self.bibtex.count("}"):
            raise ValueError(f"the BibTeX of {self.name} does not close its braces")
