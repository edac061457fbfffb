"""MkDocs hook, for the time until all pages are merged: an empty page for every entry of the navigation that has no file."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are missing."""
    for src_uri in re.findall(r"[\w\-/]+\.(?:md|ipynb)", Path(config.config_file_path).read_text().partition("nav:")[2]):
        if files.get_file_from_path(src_uri) is None:
            title = Path(src_uri).stem.replace("-", " ").capitalize()
            if src_uri.endswith(".ipynb"):
                file = File(src_uri, None, config.site_dir, False, dest_uri=src_uri.replace(".ipynb", ".html"))
                file.is_documentation_page = lambda: True
                file.generated_by, file.content_string = "placeholder", f"# {title}\n\nNot written yet.\n"
                files.append(file)
            else:
                files.append(File.generated(config, src_uri, content=f"# {title}\n\nNot written yet.\n"))
    return files
