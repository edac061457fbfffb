"""`m2s lab`: the realizability lab in a browser, served by this machine or written as a folder."""

import contextlib
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m2s.cli.help_text import help_from_source
from m2s.errors import UserError, print_escaped


@dataclass(frozen=True)
@help_from_source
class Lab:
    """Open the realizability lab in a browser: scores, posteriors and samplers that you move yourself.

    The page has three parts. Simplex: drag a score of three tokens, and see its class, its nearest posterior, the weights of
    the sampler and the distribution that it generates. Digits: M2S and SEDD sample from the same noise; paint pixels, and
    repair SEDD. Text: a network writes 128 characters; click some to fix them.

    The networks are the built-in weights. They run in the browser, so that nothing is installed and nothing is sent anywhere.
    The command serves the page for this machine until Ctrl-C. With --out it writes the page as a folder instead. Open its
    index.html from the disk, or put it on any web server.

    Example: m2s lab

    Example: m2s lab --port 8000 --no-open

    Example: m2s lab --out lab
    """

    port: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Port of the server, 1 to 65535; by default a free one."""
    open: bool = True
    """Open a browser. With --no-open the command prints the address alone."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Write the page to this folder and end, without a server."""
    overwrite: bool = False
    """Replace files that are in the folder already."""

    def run(self) -> None:
        """Serve the page until Ctrl-C, or write it.

        Raises:
            UserError: The port cannot be used, options exclude each other, or the folder cannot be written.
        """
        from m2s.report.lab import LabServer, write_lab

        if self.out is not None:
            if self.port is not None or not self.open:
                raise UserError("--out writes a folder and starts no server: leave out --port and --no-open")
            write_lab(self.out, overwrite=self.overwrite)
            print_escaped(f"{self.out / 'index.html'} written: open it in a browser")
            return
        if self.overwrite:
            raise UserError("--overwrite replaces the files of a folder: give the folder with --out")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise UserError(option="port", value=self.port, expected="in 1..65535")
        with LabServer(self.port or 0) as server, contextlib.suppress(KeyboardInterrupt):
            print(f"The lab is at {server.address} until Ctrl-C.", flush=True)
            if self.open:
                # In a thread, because a browser in the terminal returns only when it is closed.
                threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
            server.serve_forever()
