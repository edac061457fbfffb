"""`m2s convert SOURCE FOLDER`: a checkpoint of another project as a checkpoint of m2s."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m2s.cli.help_text import help_from_source
from m2s.cli.sampling_args import load_checkpoint
from m2s.errors import UserError, print_escaped
from m2s.io import output_folder


@dataclass(frozen=True)
@help_from_source
class Convert:
    """Write a checkpoint of another project as a folder of m2s: config.json, model.safetensors and the tokenizer's file.

    The layouts that are recognized are in docs/checkpoints.md: SEDD, MDLM, UDLM, DUO, GIDD, RADD and others, from the Hugging
    Face hub, from a folder, or from a file. Every command of m2s also reads them directly. A converted folder loads faster,
    has checksums, and needs nothing else.

    No code of the source is run. The folder is written when the checkpoint is complete. An interrupted conversion leaves
    nothing that has the name of a checkpoint: repeat the command.

    Example: m2s convert kuleshov-group/mdlm-owt runs/mdlm

    Example: m2s convert duo.ckpt runs/duo
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """The checkpoint: a folder, a file such as mdlm.ckpt or checkpoint.pth, or a repository OWNER/NAME of the Hugging Face
    hub."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Where to write. It is created if it does not exist."""
    overwrite: bool = False
    """Replace a checkpoint that is in the folder."""

    def run(self) -> None:
        """Convert the checkpoint, and print what it is.

        Raises:
            UserError: The source cannot be read, or the folder holds a checkpoint already.
        """
        from m2s.hub.folder import CONFIG, WEIGHTS
        from m2s.hub.formats import FORMATS

        if Path(self.source).is_dir() and Path(self.source).resolve() == self.folder.resolve():
            raise UserError(option="folder", value=str(self.folder), reason="it is the source", hint="give another folder")
        if (self.folder / "state").exists():
            reason = "it is the folder of a training run, whose states belong to its checkpoint"
            raise UserError(option="folder", value=str(self.folder), reason=reason, hint="give another folder")
        present = next((name for name in (CONFIG, WEIGHTS) if (self.folder / name).exists()), None)
        if present is not None and not self.overwrite:
            raise UserError(f"{self.folder / present} is there already: give another folder, or --overwrite to replace it")
        checkpoint = load_checkpoint(self.source, "cpu")
        found = [FORMATS[name].title for name in checkpoint.config.get("extra", {}) if name in FORMATS]
        print_escaped(f"{self.source}: {found[0] if found else 'a checkpoint of m2s'}")
        print_escaped(f"  {checkpoint!r}".replace("\n", "\n  "))
        tokenizer = checkpoint.tokenizer
        note = f"none. {checkpoint.tokenizer_hint}" if tokenizer is None else f"{type(tokenizer).__name__}, {tokenizer.vocab:,}"
        print_escaped(f"  tokenizer: {note}")
        output_folder(self.folder)
        checkpoint.save(self.folder)
        out = "samples.npz" if tokenizer is None else "samples.txt"
        print_escaped(f"{self.folder} written: m2s sample {self.folder} --out {out}")
