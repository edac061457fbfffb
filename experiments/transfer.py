"""Split files into parts of limited size with checksums, and join them on another machine.

    python experiments/transfer.py split packed/text parts/text --xz           # data, for a machine that takes 64 MiB at once
    python experiments/transfer.py join parts/text packed                      # there; writes packed/text
    python experiments/transfer.py split out/weights/sedd parts/sedd           # weights back, in parts of 16 MiB

`split` packs a file or a folder into one tar archive and cuts it into PART.000, PART.001, ... of at most `--mib`. manifest.json
holds the SHA-256 of each part and of the archive. The same content gives the same parts. `join` compares all checksums before
it unpacks. It ends with an error that lists missing parts, so that parts can arrive in several transfers. `copy` copies those
parts that fit into one transfer: `--group 0` the first ones, `--group 1` the next ones.
"""

import argparse
import contextlib
import hashlib
import io
import json
import lzma
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

from m2s.errors import UserError
from m2s.io import output_folder, write_json

MANIFEST = "manifest.json"
MIB = 1 << 20


class _Parts(io.RawIOBase):
    """A stream that is written as files of at most `size` bytes.

    Args:
        folder: Where the files are written.
        name: The start of their names.
        size: Bytes of a file.
    """

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.folder, self.name, self.size = folder, name, size
        self.digest, self.parts, self.bytes = hashlib.sha256(), list[dict[str, Any]](), 0
        self.buffer = bytearray()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.bytes

    def write(self, data: Any) -> int:
        """Append bytes; complete parts are written to the disk."""
        self.digest.update(data)
        self.bytes += len(data)
        self.buffer += data
        while len(self.buffer) >= self.size:
            self._end_part()
        return len(data)

    def _end_part(self) -> None:
        """Write the next part."""
        part = bytes(self.buffer[: self.size])
        del self.buffer[: self.size]
        name = f"{self.name}.{len(self.parts):03d}"
        (self.folder / name).write_bytes(part)
        self.parts.append({"file": name, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()})

    def finish(self) -> dict[str, Any]:
        """Write the last part, and return the manifest."""
        if self.buffer:
            self._end_part()
        return {"name": self.name, "bytes": self.bytes, "sha256": self.digest.hexdigest(), "parts": self.parts}


def split(source: Path, out: Path, size: int, xz: bool = False) -> dict[str, Any]:
    """Pack a file or folder and write it in parts, with a manifest.

    Args:
        source: The file or folder.
        out: The folder for the parts. Those of an earlier call are replaced.
        size: The largest number of bytes of a part.
        xz: Compress the archive.

    Returns:
        The manifest.

    Raises:
        UserError: There is no such file or folder, or `size` is not positive.
    """
    if not source.exists():
        raise UserError(f"{source} does not exist: give a file or a folder")
    if size < 1:
        raise UserError(f"a part has {size} bytes, but it must have at least 1")
    output_folder(out)
    _remove_parts(out)
    stream = _Parts(out, f"{source.resolve().name}.tar" + (".xz" if xz else ""), size)
    with contextlib.ExitStack() as stack:
        target: Any = stack.enter_context(lzma.LZMAFile(stream, "w", preset=6)) if xz else stream
        archive = stack.enter_context(tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT))
        for path in [source, *sorted(source.rglob("*"))] if source.is_dir() else [source]:
            name = Path(source.resolve().name, path.relative_to(source)) if source.is_dir() else Path(source.resolve().name)
            information = archive.gettarinfo(str(path), str(name))
            # The archive depends on names and contents alone.
            information.mtime, information.uid, information.gid, information.uname, information.gname = 0, 0, 0, "", ""
            information.mode = 0o755 if path.is_dir() else 0o644
            if path.is_file():
                with path.open("rb") as file:
                    archive.addfile(information, file)
            elif path.is_dir():
                archive.addfile(information)
    manifest = stream.finish()
    write_json(out / MANIFEST, manifest)
    return manifest


def join(parts: Path, out: Path) -> Path:
    """Compare all parts with their checksums and unpack the archive.

    Args:
        parts: The folder of the parts and of manifest.json.
        out: The folder in which the file or folder is written.

    Returns:
        What was written.

    Raises:
        UserError: A part is missing or damaged, or a name in the archive leads out of the folder.
    """
    manifest = read_manifest(parts)
    missing = [part["file"] for part in manifest["parts"] if not (parts / part["file"]).is_file()]
    if missing:
        raise UserError(f"{parts} lacks {len(missing)} of {len(manifest['parts'])} parts: {', '.join(missing)}")
    archive = io.BytesIO()
    for part in manifest["parts"]:
        content = (parts / part["file"]).read_bytes()
        if len(content) != part["bytes"] or hashlib.sha256(content).hexdigest() != part["sha256"]:
            raise UserError(f"{parts / part['file']} is damaged: its SHA-256 is not that in {MANIFEST}; copy it again")
        archive.write(content)
    if hashlib.sha256(archive.getbuffer()).hexdigest() != manifest["sha256"]:
        raise UserError(f"the parts in {parts} do not make the archive of {MANIFEST}: split and copy all of it again")
    output_folder(out)
    archive.seek(0)
    with tarfile.open(fileobj=archive, mode="r:*") as opened:
        opened.extractall(out, filter="data")
    return out / manifest["name"].removesuffix(".xz").removesuffix(".tar")


def read_manifest(parts: Path) -> dict[str, Any]:
    """Return the manifest of a folder of parts.

    Args:
        parts: The folder.

    Raises:
        UserError: There is no manifest, or it cannot be read.
    """
    try:
        return dict(json.loads((parts / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{parts} has no readable {MANIFEST} ({error}): give a folder that split wrote") from error


def copy_group(parts: Path, out: Path, group: int, most: int, limit: int) -> tuple[int, int]:
    """Copy the parts of one transfer, and the manifest.

    Args:
        parts: The folder of the parts.
        out: Where to copy them.
        group: The number of the transfer, from 0.
        most: Files of one transfer, the manifest among them.
        limit: Bytes of one transfer, the manifest among them.

    Returns:
        The number of parts that were copied, and the number of transfers.

    Raises:
        UserError: There is no transfer of that number, or a part alone is larger than the limit.
    """
    manifest = read_manifest(parts)
    size = (parts / MANIFEST).stat().st_size
    groups: list[list[str]] = [[]]
    used = size
    for part in manifest["parts"]:
        if part["bytes"] + size > limit:
            raise UserError(f"{part['file']} has {part['bytes']:,} bytes, more than one transfer: split with a smaller --mib")
        if len(groups[-1]) + 2 > most or used + part["bytes"] > limit:
            groups.append([])
            used = size
        groups[-1].append(part["file"])
        used += part["bytes"]
    if not 0 <= group < len(groups):
        raise UserError(f"--group is {group}, but the parts of {parts} fit into transfers 0..{len(groups) - 1}")
    output_folder(out)
    for name in (MANIFEST, *groups[group]):
        shutil.copyfile(parts / name, out / name)
    return len(groups[group]), len(groups)


def _remove_parts(out: Path) -> None:
    """Remove the parts of an earlier call."""
    if (out / MANIFEST).exists():
        for part in read_manifest(out)["parts"]:
            (out / part["file"]).unlink(missing_ok=True)
        (out / MANIFEST).unlink()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("split", "join", "copy"))
    parser.add_argument("source", type=Path, help="what to split; for join and copy the folder of the parts")
    parser.add_argument("out", type=Path, help="the folder to write to")
    parser.add_argument("--mib", type=float, default=15.5, help="split: largest part (%(default)s MiB)")
    parser.add_argument("--xz", action="store_true", help="split: compress")
    parser.add_argument("--group", type=int, default=0, help="copy: number of the transfer (%(default)s)")
    parser.add_argument("--files", type=int, default=8, help="copy: files of a transfer (%(default)s)")
    parser.add_argument("--total-mib", type=float, default=63.5, help="copy: size of a transfer (%(default)s MiB)")
    options = parser.parse_args(arguments)
    try:
        if options.action == "split":
            found = split(options.source, options.out, int(options.mib * MIB), options.xz)
            print(f"{found['bytes']:,} bytes in {len(found['parts'])} parts in {options.out}, SHA-256 {found['sha256']}")
        elif options.action == "join":
            print(f"{join(options.source, options.out)} is complete; all checksums agree")
        else:
            limit = int(options.total_mib * MIB)
            copied, transfers = copy_group(options.source, options.out, options.group, options.files, limit)
            print(f"{copied} parts in {options.out}, transfer {options.group} of 0..{transfers - 1}")
        return 0
    except UserError as error:
        print(f"transfer.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
