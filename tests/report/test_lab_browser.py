"""The lab in a browser, and the bundle that is built from its source. `make test-docs` installs the packages of web/."""

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from m2s.report import lab

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
BUILT = ("index.html", "lab.js", "lab.css")


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    """The packages of web/ are those of the lock file."""
    found = WEB / "node_modules" / ".package-lock.json"
    if not found.is_file():
        pytest.fail("web/ has no packages: run `make test-docs`, or `npm ci` in web/")
    wanted = json.loads((WEB / "package-lock.json").read_text())["packages"]
    for name, package in json.loads(found.read_text())["packages"].items():
        assert package["version"] == wanted[name]["version"], f"{name}: run `npm ci` in web/"


def run(*command: str, **environment: str) -> None:
    """Run a command in web/."""
    done = subprocess.run(command, cwd=WEB, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_bundle_is_built_from_the_source(tmp_path: Path) -> None:
    run("node", "build.mjs", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(BUILT)
    for name in BUILT:
        assert (tmp_path / name).read_bytes() == (ROOT / "m2s" / "report" / "lab" / name).read_bytes(), "run `npm run build`"


def test_types() -> None:
    run("npm", "run", "check")


def test_units() -> None:
    run("npm", "test")


def test_in_a_browser(tmp_path: Path) -> None:
    """From the disk and from the server of `m2s lab`: see web/tests/browser."""
    chrome = next(filter(None, map(shutil.which, (os.environ.get("CHROME", ""), "chromium", "google-chrome"))), "")
    lab.write_lab(tmp_path)
    with lab.LabServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run("npm", "run", "test:browser", LAB_FOLDER=str(tmp_path), LAB_ADDRESS=server.address, CHROME=chrome)
        server.shutdown()
