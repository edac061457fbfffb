"""Code blocks of README and docs, and registries that a block may change only for the time of a test."""

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m2s import registry
from m2s.data import DATASETS
from m2s.evaluation import METRICS, TEXT_METRICS
from m2s.evaluation.text import ADVERSARIES
from m2s.heads.registry import HEADS
from m2s.hub import CLASSES
from m2s.hub.formats import FORMATS
from m2s.losses.registry import LOSSES
from m2s.methods import METHODS
from m2s.models import NETWORKS
from m2s.process.registry import PROCESSES, SCHEDULES
from m2s.samplers import GRIDS, SAMPLERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REGISTRIES: tuple[registry.Registry[Any], ...] = (
    PROCESSES,
    SCHEDULES,
    HEADS,
    LOSSES,
    SAMPLERS,
    GRIDS,
    NETWORKS,
    METHODS,
    DATASETS,
    CLASSES,
    FORMATS,
    METRICS,
    TEXT_METRICS,
    ADVERSARIES,
)


def page_name(page: Path) -> str:
    """The path of a page from the root of the repository."""
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language in Markdown text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    """Markdown text without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def plugins(text: str) -> dict[str, str]:
    """The blocks of Python that are files of their own, by the name in their first line: `# my_network.py`."""
    named = ((re.match(r"# (\w+\.py)\n", block), block) for block in blocks(text, "python"))
    return {name[1]: block for name, block in named if name is not None}


def commands(text: str, language: str = "text") -> list[list[str]]:
    """The `m2s ...` lines of blocks, also those behind torchrun, as words without the name of the program."""
    found = []
    for line in "\n".join(blocks(text, language)).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[words.index("m2s.cli") :] if "m2s.cli" in words else words
        if words[:1] in (["m2s"], ["m2s.cli"]):
            found.append(words[1:])
    return found


@contextlib.contextmanager
def restored_registries() -> Iterator[None]:
    """Remove everything that was registered inside the context, and forget the plugins that were loaded there."""
    before, loaded, modules = [set(each) for each in REGISTRIES], dict(registry._loaded), set(sys.modules)
    try:
        yield
    finally:
        for each, names in zip(REGISTRIES, before, strict=True):
            for name in set(each) - names:
                each.remove(name)
        registry._loaded.clear()
        registry._loaded.update(loaded)
        for name in set(sys.modules) - modules:
            if name.startswith("m2s_plugin_"):
                del sys.modules[name]
