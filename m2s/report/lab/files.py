"""The files of the lab, and the folder that holds them all."""

import functools
from importlib.resources import files
from pathlib import Path

from m2s.io import atomic_write, output_folder, require_absent
from m2s.report.lab.weights import weights_script

PAGE = "index.html"
WEIGHTS = {f"weights-{name}.js": name for name in ("digits-m2s-offset", "digits-sedd", "chars")}
FILES = (PAGE, "lab.js", "lab.css", *WEIGHTS)
"""Names of the files of the lab."""
DOCUMENTATION = "../index.html"
"""Where the documentation is, seen from the folder lab/ of the built site."""
LINK = f'<a id="docs" href="{DOCUMENTATION}">Documentation</a>'


@functools.cache
def lab_file(name: str, documentation: bool) -> bytes:
    """Return the content of one file.

    Args:
        name: One of `FILES`.
        documentation: Whether the page links to the documentation, at `DOCUMENTATION`.

    Raises:
        KeyError: The lab has no file of that name.
    """
    if name not in FILES:
        raise KeyError(name)
    if name in WEIGHTS:
        return weights_script(WEIGHTS[name]).encode("ascii")
    content = (Path(str(files("m2s.report.lab"))) / name).read_bytes()
    return content if documentation or name != PAGE else content.replace(LINK.encode(), b"")


def write_lab(out: Path, documentation: bool = False, overwrite: bool = False) -> list[Path]:
    """Write all files of the lab to a folder. Its page opens from the disk, without a server and without a network.

    Args:
        out: The folder; created if it does not exist. Other files in it are not changed.
        documentation: Whether the page links to the documentation in the folder above `out`, as in the built site.
        overwrite: Replace files that exist.

    Returns:
        The paths of the files.

    Raises:
        UserError: A file exists and `overwrite` is false, or the folder is not writable. Nothing has been written then.
    """
    paths = [out / name for name in FILES]
    require_absent(paths, overwrite)
    output_folder(out)
    for path in paths:
        with atomic_write(path) as temporary:
            temporary.write_bytes(lab_file(path.name, documentation))
    return paths
