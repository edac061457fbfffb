"""The built site, and a browser."""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from built_site import Site, build


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that run tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return tmp_path_factory.getbasetemp().parent
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def log_and_site(shared_folder: Path) -> tuple[str, Site]:
    """The site, built once for all processes that run tests."""
    log = shared_folder / "site.log"
    with FileLock(shared_folder / "site.lock"):
        if not log.exists():
            log.write_text(build(shared_folder / "site"))
    return log.read_text(), Site(shared_folder / "site")


@pytest.fixture(scope="session")
def site(log_and_site: tuple[str, Site]) -> Site:
    return log_and_site[1]


@pytest.fixture(scope="session")
def chrome() -> str:
    names = (os.environ.get("CHROME", ""), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.fail("no browser: apt-get install chromium, or set CHROME to the path of one")
    return found
