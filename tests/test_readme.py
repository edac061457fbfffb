"""The code in README and docs runs, in order, as a reader would paste it. `make test-docs` runs that of the docs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import PAGES, REGISTRIES, ROOT, blocks, commands, page_name, plugins, restored_registries, without_code

from m2s.cli import main, parse
from m2s.methods.docs_page import page as methods_page

README = ROOT / "README.md"
each_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


@pytest.fixture(autouse=True)
def _restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs in an empty folder, and leaves no registered network, sampler or metric behind."""
    monkeypatch.chdir(tmp_path)
    with restored_registries():
        yield


WITH_PYTHON = [page for page in PAGES if blocks(page.read_text(), "python")]
WITH_COMMANDS = [page for page in PAGES if commands(page.read_text(), "bash")]
# The README with every test; the pages of the site with the tests of the site.
WITH_LONG_COMMANDS = [
    pytest.param(page, marks=[] if page == README else pytest.mark.docs) for page in PAGES if commands(page.read_text())
]


def run_block(page: Path, block: str, namespace: dict[str, Any]) -> None:
    """Run a block of a page."""
    exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_name)
def test_python_blocks_run(page: Path) -> None:
    namespace: dict[str, Any] = {}
    for block in blocks(page.read_text(), "python"):
        run_block(page, block, namespace)
    assert namespace


def test_first_block_of_the_readme_samples_and_trains_in_five_lines() -> None:
    namespace: dict[str, Any] = {}
    first, *_ = blocks(README.read_text(), "python")
    lines = [line for line in first.splitlines() if line.strip() and "import" not in line]
    assert len(lines) == 5 and "m2s.load(" in lines[0] and "m2s.fit(" in lines[2]
    run_block(README, f"import m2s\n{lines[0]}", namespace)
    assert namespace.pop("images").shape == (16, 64) and not list(Path().iterdir())  # built-in weights, and no file
    run_block(README, first, namespace)
    assert namespace["images"].shape == (16, 64) and Path("runs/first/model.safetensors").is_file()
    sample = ["sample", "runs/first", "--n", "4", "--steps", "2", "--device", "cpu", "--out", "digits.png"]
    assert main(sample) is None and Path("digits.png").is_file()  # the command in the last line


def test_first_screen_of_the_readme() -> None:
    """What it is, for whom, the plot, three reasons, installation and the first code; then the table of alternatives."""
    text = README.read_text()
    screen = text[: text.index("\n## ")]
    assert text[len(screen) :].startswith("\n## m2s or SEDD, MDLM, UNI-D2, flow_matching?\n\n|")
    order = [
        "is a PyTorch library",
        "for researchers",
        "Discrete Diffusion: Posterior-Mean",
        "<img",
        "\n- **",
        "pip install",
        "```python",
    ]
    assert [screen.index(part) for part in order] == sorted(screen.index(part) for part in order)
    assert screen.count("\n- **") == 3 and len(screen.splitlines()) < 35
    assert max(len(line) for block in re.findall(r"```.*?```", screen, re.DOTALL) for line in block.splitlines()) <= 104


def test_readme_leads_from_a_process_to_a_loss_in_ten_lines() -> None:
    first = next(block for block in blocks(README.read_text(), "python") if "score_entropy" in block)
    assert len([line for line in first.splitlines() if line.strip() and "import" not in line]) <= 10
    namespace: dict = {}
    exec(first, namespace)
    assert namespace["loss"].shape == namespace["x_0"].shape
    assert all(p.grad.abs().sum() > 0 for p in namespace["network"].parameters())


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=page_name)
def test_commands_run(page: Path) -> None:
    """Every `m2s ...` line of a shell block."""
    for words in commands(page.read_text(), "bash"):
        assert main(words) in (None, 0)


@pytest.mark.parametrize("page", WITH_LONG_COMMANDS, ids=page_name)
def test_commands_that_take_too_long_are_at_least_understood(page: Path) -> None:
    """Every `m2s ...` line of a text block, also behind torchrun. The page's plugins are files in the current folder."""
    text = page.read_text()
    for name, code in plugins(text).items():
        Path(name).write_text(code)
    for words in commands(text):
        if not {"--help", "--version", "..."} & set(words):
            with restored_registries():  # a command knows only the plugins that it names
                assert parse(words) is not None, words


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files, and to headings of pages."""
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", without_code(page.read_text())):
        file = page.parent / target if target else page
        if target.startswith("lab/") and page.parent == ROOT / "docs":
            file = ROOT / "m2s" / "report" / target  # copied into the site
        assert file.exists(), target
        if heading and file.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", without_code(file.read_text()), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, f"{target}#{heading}"


def test_registries_are_restored() -> None:
    """A page that registers parts does not change the tests that run after it."""
    before = [dict(registry) for registry in REGISTRIES]
    with restored_registries():
        for page in sorted((ROOT / "docs" / "extending").glob("*.md")):
            for block in plugins(page.read_text()).values():
                exec(block, {})
        assert [dict(registry) for registry in REGISTRIES] != before
    assert [dict(registry) for registry in REGISTRIES] == before


def test_the_page_of_methods_is_generated() -> None:
    assert (ROOT / "docs" / "methods.md").read_text() == methods_page(), "python -m m2s.methods.docs_page > docs/methods.md"
