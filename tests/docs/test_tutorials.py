"""Every notebook of the tutorials runs, in an empty folder."""

import json
import re
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
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # another process runs other tests
    run_notebooks.run(nbformat.read(path, as_version=4), tmp_path)


@pytest.mark.docs
@each_notebook
def test_the_picture_of_the_overview_is_that_of_the_tagged_cell(path: Path) -> None:
    from run_notebooks import cover

    found = path.parent / "covers" / f"{path.stem}.png"
    assert found.read_bytes() == cover(json.loads(path.read_text(encoding="utf-8"))), "make notebooks"


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


@pytest.mark.docs
def test_written_notebooks_have_printed_lines_in_one_piece_and_described_pictures() -> None:
    import nbformat.v4 as nb

    import run_notebooks
    from site_notebooks import to_markdown

    lines = [
        nb.new_output("stream", name=name, text=text) for name, text in [("stdout", "a\n"), ("stderr", "x"), ("stdout", "b\n")]
    ]
    picture = nb.new_output("display_data", data={"image/png": "AAAA", "text/plain": "<Figure>"})
    cell = nb.new_code_cell(
        "f()", outputs=[*lines, picture], metadata={"alt": "A <line>", "execution": {"iopub.status.busy": "now"}}
    )
    notebook = run_notebooks.cleaned(nb.new_notebook(cells=[nb.new_markdown_cell("# Title"), cell]))
    assert [output.get("text") for output in notebook.cells[1].outputs] == ["a\nb\n", None]
    assert notebook.cells[1].metadata == {"alt": "A <line>"}
    text, pictures = to_markdown(notebook, "tutorials/x.ipynb")
    assert 'alt="A &lt;line&gt;"' in text and list(pictures) == ["x-1-0.png"]


@pytest.mark.docs
def test_cells_with_the_tag_hide_input_are_folded() -> None:
    import nbformat.v4 as nb

    from site_notebooks import to_markdown

    cells = [nb.new_code_cell(source, metadata={"tags": ["hide-input"]}) for source in ("import m2s", "plt.show()")]
    notebook = nb.new_notebook(cells=[nb.new_markdown_cell("# Title"), *cells, nb.new_code_cell("m2s.fit(x)")])
    text, _ = to_markdown(notebook, "tutorials/x.ipynb")
    assert re.findall(r"<summary>(.*?)</summary>\n\n````python\n(.*?)\n````\n\n</details>", text) == [
        ("Imports and settings", "import m2s"),
        ("Code of the picture", "plt.show()"),
    ]
    assert text.endswith("\n\n````python\nm2s.fit(x)\n````\n")
