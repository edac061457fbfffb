"""Every notebook of the tutorials runs, in an empty folder."""

import json
from pathlib import Path

import pytest
from doc_pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.docs
@each_notebook
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat

    import run_notebooks

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run_notebooks.run(nbformat.read(path, as_version=4), tmp_path)


@each_notebook
def test_notebook_has_outputs_and_nothing_that_differs_from_run_to_run(path: Path) -> None:
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in code), "make notebooks"
    assert all(cell["execution_count"] is None for cell in code), "make notebooks"
    assert {output["output_type"] for cell in code for output in cell["outputs"]} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["cells"][0]["source"][0].startswith("# ")
