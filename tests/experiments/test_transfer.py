"""experiments/transfer.py: parts, checksums and transfers of limited size."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "transfer.py"


@pytest.fixture
def transfer(tmp_path, monkeypatch):
    """The script as a module, in a folder with a folder of files to transfer."""
    spec = importlib.util.spec_from_file_location("transfer_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    source = Path("source/inner")
    source.mkdir(parents=True)
    (source / "noise.bin").write_bytes(np.random.default_rng(0).bytes(5000))
    Path("source/words.txt").write_text("größe " * 300)
    Path("source/empty").touch()
    return module


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("xz", [False, True])
@pytest.mark.parametrize("size", [1000, 4096, 1 << 20])
def test_joined_parts_are_what_was_split(transfer, size, xz):
    manifest = transfer.split(Path("source"), Path("parts"), size, xz)
    sizes = [Path("parts", part["file"]).stat().st_size for part in manifest["parts"]]
    assert sum(sizes) == manifest["bytes"] and max(sizes) <= size and all(one == size for one in sizes[:-1])
    assert transfer.join(Path("parts"), Path("joined")) == Path("joined/source")
    assert content(Path("joined/source")) == content(Path("source"))


def test_a_single_file_and_the_command_line(transfer, capsys):
    assert transfer.main(["split", "source/inner/noise.bin", "parts", "--mib", "0.002"]) == 0
    assert transfer.main(["join", "parts", "joined"]) == 0
    assert "joined/noise.bin is complete" in capsys.readouterr().out
    assert content(Path("joined")) == content(Path("source/inner"))


def test_the_same_content_gives_the_same_parts(transfer):
    first = transfer.split(Path("source"), Path("parts"), 3000)
    shutil.copytree("source", "copied/source")
    assert transfer.split(Path("copied/source"), Path("again"), 3000) == first
    fewer = transfer.split(Path("source"), Path("parts"), 1 << 20)  # replaces the parts of the first call
    assert {path.name for path in Path("parts").iterdir()} == {"manifest.json", *(part["file"] for part in fewer["parts"])}


def test_missing_and_damaged_parts_are_errors(transfer, capsys):
    parts = transfer.split(Path("source"), Path("parts"), 3000)["parts"]
    shutil.copytree("parts", "some")
    for part in parts[1:3]:
        Path("some", part["file"]).unlink()
    assert transfer.main(["join", "some", "joined"]) == 2
    assert f"lacks 2 of {len(parts)} parts: source.tar.001, source.tar.002" in capsys.readouterr().err
    for change in (lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1]):
        path = Path("parts", parts[1]["file"])
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert transfer.main(["join", "parts", "joined"]) == 2
        assert "source.tar.001 is damaged" in capsys.readouterr().err
        path.write_bytes(before)
    manifest = json.loads(Path("parts/manifest.json").read_text())
    Path("parts/manifest.json").write_text(json.dumps({**manifest, "sha256": "0" * 64}))
    assert transfer.main(["join", "parts", "joined"]) == 2
    assert not Path("joined").exists()
    assert transfer.main(["split", "nothing", "parts"]) == 2 and transfer.main(["join", "nothing", "joined"]) == 2


def test_transfers_have_limits_and_make_all_parts(transfer, capsys):
    parts = transfer.split(Path("source"), Path("parts"), 1000)["parts"]
    limit = Path("parts/manifest.json").stat().st_size + 3000
    for files in (3, 100):
        shutil.rmtree("arrived", ignore_errors=True)
        transfers = transfer.copy_group(Path("parts"), Path("arrived"), 0, files, limit)[1]
        for group in range(transfers):
            shutil.rmtree("one", ignore_errors=True)
            transfer.copy_group(Path("parts"), Path("one"), group, files, limit)
            there = list(Path("one").iterdir())
            assert len(there) <= files and sum(path.stat().st_size for path in there) <= limit
            shutil.copytree("one", "arrived", dirs_exist_ok=True)
        assert transfers == -(-len(parts) // (2 if files == 3 else 3))
        transfer.join(Path("arrived"), Path(f"joined-{files}"))
        assert content(Path(f"joined-{files}/source")) == content(Path("source"))
    assert transfer.main(["copy", "parts", "one", "--group", "99"]) == 2
    assert transfer.main(["copy", "parts", "one", "--total-mib", "0.0005"]) == 2
    assert "more than one transfer" in capsys.readouterr().err
