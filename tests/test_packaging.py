"""The wheel of m2s-diffusion is complete, and it runs in an environment that has nothing of m2s but the wheel."""

import email
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks

import m2s

NAME = "m2s_diffusion"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and with the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    # Without isolation: the build needs no network, since the test environment has hatchling.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    return out


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel. The packages that m2s needs are those of this environment."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    wheel = next(dist.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", "--quiet", str(wheel))
    # A path in a .pth file is searched for packages, but .pth files in it, such as that of an editable m2s, are not read.
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return python


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command that sees no other copy of m2s, and return its output."""
    builds = command[1:3] == ("-m", "build")
    environment = {key: value for key, value in os.environ.items() if builds or key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_files() -> set[str]:
    """The files of the package in this repository."""
    paths = (path for path in (ROOT / "m2s").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(dist: Path) -> None:
    wheel = next(dist.glob("*.whl"))
    assert wheel.name == f"{NAME}-{m2s.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert files == source_files()
        assert {"m2s/data/digits.npz", "m2s/py.typed", "m2s/report/templates/page.html.jinja"} <= files
        assert "m2s/hub/weights/digits-m2s/model.safetensors" in files and wheel.stat().st_size < 14e6
        for name in files:
            assert archive.read(name) == (ROOT / name).read_bytes(), name
        entry_points = archive.read(f"{NAME}-{m2s.__version__}.dist-info/entry_points.txt").decode()
    assert entry_points.split() == ["[console_scripts]", "m2s", "=", "m2s.cli:main"]


def test_the_source_distribution_has_the_tests_and_no_environment(dist: Path) -> None:
    archive = next(dist.glob("*.tar.gz"))
    assert archive.name == f"{NAME}-{m2s.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert source_files() <= names
    assert {"README.md", "LICENSE", "pyproject.toml", "Makefile", "tests/oracle.py", "docs/training.md"} <= names
    assert not [name for name in names if "site-packages" in name or "__pycache__" in name]
    assert archive.stat().st_size < 20e6


def test_the_metadata_has_the_dependencies_and_the_readme(dist: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        metadata = email.message_from_bytes(archive.read(f"{NAME}-{m2s.__version__}.dist-info/METADATA"))
    assert metadata["Name"] == "m2s-diffusion" and metadata["Version"] == m2s.__version__
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    required = [line for line in metadata.get_all("Requires-Dist") if ";" not in line]
    assert sorted(required) == sorted(project["dependencies"])
    assert metadata.get_payload(decode=True).decode() == (ROOT / "README.md").read_text()


def test_the_first_block_of_the_readme_runs_with_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    """It reads weights that ship, trains, samples and saves."""
    code = blocks((ROOT / "README.md").read_text(), "python")[0]
    (tmp_path / "first.py").write_text(f"{code}\nprint(m2s.hub.builtin.folder())\nprint(m2s.__file__)\n")
    *_, weights, where = run(str(python), "first.py", cwd=tmp_path).splitlines()
    assert Path(weights) == Path(where).parent / "hub" / "weights" and (tmp_path / "runs" / "first" / "config.json").is_file()
    assert Path(where).is_relative_to(python.parents[1]) and not Path(where).is_relative_to(ROOT)


def test_the_command_runs_with_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    command = python.with_name("m2s")
    assert run(str(command), "--version", cwd=tmp_path) == f"m2s {m2s.__version__}\n"
    assert "1,541 train and 256 test images" in run(str(command), "data", "check", "digits", cwd=tmp_path)
    asked = "from importlib import metadata as m; print(m.version('m2s-diffusion'), *m.packages_distributions()['m2s'])"
    version, first, *_ = run(str(python), "-c", asked, cwd=tmp_path).split()
    assert (version, first) == (m2s.__version__, "m2s-diffusion")
