"""The revision that results record is that of the source of m2s, and not that of a repository around it."""

import subprocess
from pathlib import Path

import pytest

from m2s import provenance


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in .venv inside a repository with one commit, from which `m2s.provenance` seems to be imported."""
    folder = tmp_path / ".venv" / "lib" / "m2s"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (tmp_path / "mine.txt").write_text("mine")
    _git(tmp_path, "init")
    _git(tmp_path, "add", "mine.txt")
    _git(tmp_path, "commit", "-m", "mine")
    monkeypatch.setattr(provenance, "__file__", str(folder / "provenance.py"))
    return folder


def _git(folder: Path, *words: str) -> str:
    """Run git without the configuration of this machine, and return what it prints."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_package_that_the_repository_does_not_track_has_no_revision(package: Path) -> None:
    assert provenance.revision() is None
    (package.parents[2] / ".gitignore").write_text(".venv\n")
    assert provenance.revision() is None


def test_a_tracked_package_has_the_revision_of_the_repository(package: Path) -> None:
    _git(package, "add", "__init__.py")
    _git(package, "commit", "-m", "package")
    assert provenance.revision() == _git(package, "rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed = True\n")
    assert provenance.revision() == _git(package, "rev-parse", "HEAD") + "+"


def test_without_a_repository_there_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.revision() is None
