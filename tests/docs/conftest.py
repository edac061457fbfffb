"""The built site, and a browser."""

import os
import shutil

import pytest
from filelock import FileLock

from built_site import Site, build


@pytest.fixture(scope="session")
def log_and_site(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Site]:
    """The site, built once for all processes that run tests."""
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else tmp_path_factory.mktemp("shared")
    log = shared / "site.log"
    with FileLock(shared / "site.lock"):
        if not log.exists():
            log.write_text(build(shared / "site"))
    return log.read_text(), Site(shared / "site")


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
