"""The code in README and docs runs, in order, as a reader would paste it."""

import re
import shlex
from pathlib import Path

import pytest

from m2s.methods.docs_page import page as methods_page

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run(page: Path) -> None:
    namespace: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
    assert namespace


def test_readme_leads_from_a_process_to_a_loss_in_ten_lines() -> None:
    first = [line for line in blocks(ROOT / "README.md", "python")[0].splitlines() if line.strip() and "import" not in line]
    assert len(first) <= 10
    namespace: dict = {}
    exec("\n".join(blocks(ROOT / "README.md", "python")[0].splitlines()), namespace)
    assert namespace["loss"].shape == namespace["x_0"].shape
    assert all(p.grad.abs().sum() > 0 for p in namespace["network"].parameters())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `m2s ...` line of a shell block."""
    from m2s.cli import main

    monkeypatch.chdir(tmp_path)
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["m2s"]:
            monkeypatch.setattr("sys.argv", words)
            assert main() in (None, 0)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_that_take_too_long_are_at_least_understood(page: Path) -> None:
    """Every `m2s ...` line of a text block, also behind torchrun."""
    from m2s.cli import parse

    text = "\n".join(blocks(page, "text")).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if "m2s.cli" in words:
            words = words[words.index("m2s.cli") :]
        if words[:1] in (["m2s"], ["m2s.cli"]) and not {"--help", "--version", "..."} & set(words):
            assert parse(words[1:]) is not None, line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_page_of_methods_is_what_they_say() -> None:
    assert (ROOT / "docs" / "methods.md").read_text() == methods_page(), "python -m m2s.methods.docs_page > docs/methods.md"
