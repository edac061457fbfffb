"""MkDocs hook: the notebooks of docs/tutorials/ as pages, with the outputs that are committed in them."""

import base64
import html
import json
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

PICTURES = {"image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpg"}
COLOR_CODE = re.compile(r"\x1b\[[0-9;]*m")


class NotebookPage(File):
    """A notebook that MkDocs takes for a page of Markdown."""

    def is_documentation_page(self) -> bool:
        """Return True: MkDocs asks by the ending of the name otherwise."""
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace every notebook by a page and its pictures; the notebook itself can be downloaded."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = file.src_uri.removesuffix(".ipynb")
        folder, _, stem = name.rpartition("/")
        text, pictures = to_markdown(json.loads(file.content_string), file.src_uri)
        files.remove(file)
        page = NotebookPage(file.src_uri, None, config.site_dir, config.use_directory_urls)
        page.generated_by, page.content_string = "site_notebooks", text
        files.append(page)
        files.append(File.generated(config, f"{folder}/files/{stem}.ipynb", abs_src_path=file.abs_src_path))
        for picture, content in pictures.items():
            files.append(File.generated(config, f"{folder}/files/{picture}", content=content))
    return files


def to_markdown(notebook: dict[str, Any], src_uri: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and the pictures of its outputs by the name of the file.

    Args:
        notebook: The notebook, as JSON of version 4.
        src_uri: The path of the notebook below docs/.

    Raises:
        PluginError: An output is an error, or has a form that cannot be shown.
    """
    stem = src_uri.rpartition("/")[2].removesuffix(".ipynb")
    parts, pictures = [], dict[str, bytes]()
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        if source.strip():
            parts.append(_code(source, cell))
        alt = html.escape(cell["metadata"].get("alt", "Figure drawn by the code above"))
        for kind, content in _outputs(cell.get("outputs", []), src_uri):
            if kind in PICTURES:
                picture = f"{stem}-{number}-{len(pictures)}.{PICTURES[kind]}"
                pictures[picture] = content.encode() if kind == "image/svg+xml" else base64.b64decode(content)
                shown = f'<img src="files/{picture}" alt="{alt}">'
            else:
                shown = content if kind == "text/html" else f"<pre>{html.escape(content)}</pre>"
            parts.append(f'<div class="m2s-output">{shown}</div>')
    title, *rest = parts
    heading, _, below = title.partition("\n")
    note = f'<p class="m2s-notebook">This page is a notebook. <a href="files/{stem}.ipynb" download>Download it</a>.</p>'
    return "\n\n".join([heading, note, below, *rest]) + "\n", pictures


def _code(source: str, cell: dict[str, Any]) -> str:
    """The code of a cell in Markdown. A cell with the tag `hide-input`, as Jupyter Book has it, is folded."""
    code = f"````python\n{source}\n````"
    if "hide-input" not in cell["metadata"].get("tags", ()):
        return code
    title = "Imports and settings" if source.startswith(("import ", "from ")) else "Code of the picture"
    return f'<details class="m2s-code" markdown>\n<summary>{title}</summary>\n\n{code}\n\n</details>'


def _outputs(outputs: list[dict[str, Any]], src_uri: str) -> Iterator[tuple[str, str]]:
    """The outputs of a cell as pairs of a media type and a text; printed lines in one piece."""
    printed = ""
    for output in outputs:
        if output["output_type"] == "stream":
            printed += "".join(output["text"])
            continue
        if printed:
            yield "text/plain", _plain(printed)
            printed = ""
        if output["output_type"] == "error":
            raise PluginError(f"{src_uri} has an output with {output['ename']}: repair the notebook and run `make notebooks`")
        data = output["data"]
        kind = next((kind for kind in (*PICTURES, "text/html", "text/plain") if kind in data), None)
        if kind is None:
            raise PluginError(f"{src_uri} has an output of {', '.join(data)}, and the site shows pictures, HTML and text")
        content = "".join(data[kind])
        yield kind, _plain(content) if kind == "text/plain" else content
    if printed:
        yield "text/plain", _plain(printed)


def _plain(text: str) -> str:
    """Printed text as a terminal shows it: without codes of colors, and with the last state of a progress bar."""
    lines = COLOR_CODE.sub("", text).rstrip("\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
