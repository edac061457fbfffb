"""MkDocs hook: pages from outside docs/, and links between Markdown files as they are written for GitHub.

RESULTS.md, CHANGELOG.md and others of the root become pages. A link to any other file of the repository leads to a copy of
it in the site, under source/: code as a page with highlighted lines, data and pictures as they are.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {name: name.lower() for name in ("RESULTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
SOURCE = "source/"
# The search lists explanations before the reference, and lists of changes last. The first start that fits decides.
BOOST = {
    "tutorials/": 4,
    "concepts/": 4,
    "faq": 4,
    "extending/": 2,
    "reference/cli": 0.5,
    "reference/": 1,
    "changelog": 0.2,
    "": 2,
}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yml": "yaml", "Makefile": "make"}
AS_THEY_ARE = (".json", ".png", ".svg", ".txt", ".npz", ".ipynb")
# A fenced block, inline code, or the end of a link: only the last is rewritten.
LINK = re.compile(
    r"(?ms)^( *)(```+|~~~+).*?^\1\2|(`+)(?!`).*?(?<!`)\3(?!`)|\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?(?=[\s)])"
)


def in_repository(src_uri: str) -> str:
    """Return where the Markdown of a page is in the repository.

    Args:
        src_uri: The path of the page below docs/, as MkDocs knows it.
    """
    names = {page: name for name, page in ROOT_PAGES.items()}
    return names.get(src_uri) or (src_uri.removeprefix(SOURCE) if src_uri.startswith(SOURCE) else f"docs/{src_uri}")


def in_site(path: str) -> str | None:
    """Return the path below docs/ at which a file or folder of the repository appears, None where there is no such file.

    Args:
        path: The path from the root of the repository.
    """
    if path == "docs" or path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    if (ROOT / path).is_dir():
        return f"{SOURCE}{path}/index.md"
    return f"{SOURCE}{path}" if path.endswith((".md", *AS_THEY_ARE)) else f"{SOURCE}{path}.md"


def targets(markdown: str, page: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to.

    Args:
        markdown: The text of the page.
        page: Where it is in the repository.
    """
    for match in LINK.finditer(markdown):
        if match["target"] and not re.match(r"\w+:", match["target"]):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), match["target"]))


def with_links(markdown: str, src_uri: str) -> str:
    """Return a page whose links lead to pages of the site.

    Args:
        markdown: The text, with the links that the file has in the repository.
        src_uri: The path of the page below docs/.
    """
    page = in_repository(src_uri)

    def rewritten(match: re.Match[str]) -> str:
        found = next(targets(match[0] + ")", page), None)
        target = in_site(found) if found else None
        if target is None:
            return match[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(src_uri) or '.')}{match['anchor'] or ''}"

    return LINK.sub(rewritten, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and every file outside docs/ that a page links to."""
    for name, src_uri in ROOT_PAGES.items():
        files.append(File.generated(config, src_uri, content=(ROOT / name).read_text()))
    pages = [file for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        for path in targets(page.content_string, in_repository(page.src_uri)):
            src_uri = in_site(path)
            if src_uri and src_uri.startswith(SOURCE) and files.get_file_from_path(src_uri) is None:
                added = _source_file(path, src_uri, config)
                files.append(added)
                pages += [added] if path.endswith(".md") else []
    return files


def _source_file(path: str, src_uri: str, config: MkDocsConfig) -> File:
    """The copy of a file or folder that is not in docs/."""
    file = ROOT / path
    if file.is_dir():
        listed = "\n".join(f"- `{each.name}`" for each in sorted(file.iterdir()) if not each.name.startswith(("_", ".")))
        return File.generated(config, src_uri, content=_source_page(path, listed))
    if path.endswith(AS_THEY_ARE):
        return File.generated(config, src_uri, abs_src_path=str(file))
    text = file.read_text()
    if path.endswith(".md"):
        return File.generated(config, src_uri, content=f"---\nsearch: {{exclude: true}}\n---\n\n{text}")
    language = LANGUAGES.get(file.suffix or file.name, "text")
    return File.generated(config, src_uri, content=_source_page(path, f'````{language} linenums="1"\n{text}\n````'))


def _source_page(path: str, body: str) -> str:
    """A page that shows a file and is not found by the search."""
    return f"---\ntitle: {path}\nsearch: {{exclude: true}}\nhide: [toc, navigation]\n---\n\n# `{path}`\n\n{body}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, and say how early the search lists it."""
    boost = next((value for start, value in BOOST.items() if page.file.src_uri.startswith(start)), 1)
    page.meta.setdefault("search", {}).setdefault("boost", boost)
    return with_links(markdown, page.file.src_uri)


def github_slug(title: str, separator: str) -> str:
    """Return the anchor of a heading, the same as GitHub's.

    Args:
        title: The text of the heading.
        separator: What replaces a space.
    """
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have on GitHub."""
    config.mdx_configs["toc"]["slugify"] = github_slug
    return config
