"""`m2s cite [NAME]`: BibTeX of the paper and of the methods it builds on."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from m2s.cli.help_text import help_from_source
from m2s.errors import UserError, suggest
from m2s.methods import METHODS


@dataclass(frozen=True)
@help_from_source
class Cite:
    """Print the BibTeX entries of the paper and of the methods it builds on.

    Without NAME it prints all entries.

    Example: m2s cite sedd
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    """A method, as in `m2s train --method`: m2s, sedd, md4, ...; by default all."""

    def run(self) -> None:
        """Print the entries.

        Raises:
            UserError: There is no such method.
        """
        if self.name is not None and self.name.lower() not in METHODS:
            raise UserError(f"there is no reference {self.name!r}: {suggest(self.name, METHODS)}")
        chosen = METHODS.values() if self.name is None else [METHODS[self.name.lower()]]
        print("\n\n".join(dict.fromkeys(entry for method in chosen for entry in method.entries)))
