"""Run notebooks and write their outputs into them, the same bytes for the same outputs.

The picture of the cell with the tag `cover` is also written to covers/NAME.png, for the overview of the tutorials.

python scripts/docs_site/run_notebooks.py docs/tutorials/*.ipynb
"""

import base64
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

SECONDS = 900  # for one cell
KEPT = ("tags", "alt")  # of the metadata of a cell; "alt" describes its picture


def run(notebook: Any, folder: Path) -> Any:
    """Run all cells in a new process.

    Args:
        notebook: The notebook. Its outputs are replaced.
        folder: The current folder of the process, for files that cells write.

    Returns:
        The same notebook.

    Raises:
        CellExecutionError: A cell raised an exception.
    """
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources, record_timing=False).execute()
    return notebook


def cleaned(notebook: Any) -> Any:
    """Return a notebook without what differs from run to run: versions, times, the numbers of messages, progress bars.

    Args:
        notebook: The notebook after it was run.
    """
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({name: cell.metadata[name] for name in KEPT if cell.metadata.get(name)})
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.outputs = _joined([output for output in cell.outputs if output.get("name") != "stderr"])  # progress
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = None
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """The outputs with printed lines in one piece: how a kernel splits them depends on time."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def cover(notebook: Any) -> bytes | None:
    """Return the picture of the cell with the tag `cover`, None where no cell has it.

    Args:
        notebook: The notebook, with outputs.
    """
    for cell in notebook["cells"]:
        if "cover" in cell["metadata"].get("tags", ()):
            return next(
                base64.b64decode(one["data"]["image/png"]) for one in cell["outputs"] if "image/png" in one.get("data", {})
            )
    return None


def main(paths: list[Path]) -> int:
    """Run the notebooks and write them. A notebook with an error is not written.

    Args:
        paths: The files.

    Returns:
        The number of notebooks with an error.
    """
    failed = 0
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            try:
                notebook = cleaned(run(nbformat.read(path, as_version=4), Path(folder)))
            except CellExecutionError as error:
                print(f"{path}: {error}", file=sys.stderr)
                failed += 1
                continue
        nbformat.validate(notebook)
        nbformat.write(notebook, path)
        if (picture := cover(notebook)) is not None:
            (path.parent / "covers").mkdir(exist_ok=True)
            (path.parent / "covers" / f"{path.stem}.png").write_bytes(picture)
        print(f"{path}: {len(notebook.cells)} cells")
    return failed


if __name__ == "__main__":
    raise SystemExit(main([Path(each) for each in sys.argv[1:]]))
