"""The words of all pages are in a dictionary of English, or in words.txt, the terms and names of this project."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT

from built_site import Site

pytestmark = pytest.mark.docs

TERMS = Path(__file__).parent / "words.txt"
# A word of prose: no identifier, path, address or formula.
WORD = re.compile(r"(?<![\w./\-@\\^=])[A-Za-z][a-z]+(?:'[a-z]+)?(?![\w/@\\^=]|\.\w|\()")


def words(text: str) -> set[str]:
    """The words of a text in lower case, without the genitive."""
    return {re.sub(r"'s$", "", word).lower() for word in WORD.findall(text.replace("’", "'"))}


def test_words_of_the_site_are_in_a_dictionary(site: Site) -> None:
    from spellchecker import SpellChecker

    places: dict[str, str] = {}
    for page, reader in site.pages.items():
        if not page.startswith("source/"):
            places |= {word: page for word in words(" ".join(reader.words)) if word not in places}
    unknown = SpellChecker().unknown(places) - set(TERMS.read_text().split())
    assert not unknown, "correct these words, or add them to tests/docs/words.txt:\n" + "\n".join(
        f"{places[word]}: {word}" for word in sorted(unknown)
    )


def test_terms_are_sorted_and_not_in_the_dictionary() -> None:
    from spellchecker import SpellChecker

    terms = TERMS.read_text().split()
    assert terms == sorted(set(terms)) and set(terms) == SpellChecker().unknown(terms)


def test_no_common_misspelling() -> None:
    """In pages, docstrings and comments."""
    files = ["README.md", "RESULTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "m2s", "scripts", "examples"]
    command = [
        sys.executable,
        "-m",
        "codespell_lib",
        "--ignore-words-list",
        "vermillion",
        "--skip",
        "*.svg,*.json,*.txt,*.js,*.ipynb",
    ]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_words_are_found() -> None:
    assert words("The network's x_0 in m2s.sample() of `a/b`, teh score; Don't e.g. tokens.") == {
        *("the", "network", "in", "of", "teh", "score", "don't", "tokens")
    }
