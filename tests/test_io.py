"""Atomic writes, their order on the disk, symbolic links in the way, and JSON that is damaged."""

import json
import os
from pathlib import Path

import pytest

from m2s.errors import UserError
from m2s.io import _temporary, atomic_write, create_file, open_file, output_folder, parse_json, read_json, write_json


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The calls of fsync and replace, with the names of their files."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(handle: int) -> None:
        seen.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def recorded_replace(source: Path, target: Path) -> None:
        seen.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return seen


def test_an_atomic_write_syncs_the_file_and_after_the_rename_its_folder(tmp_path, calls):
    (tmp_path / "folder").mkdir()
    write_json(tmp_path / "folder" / "value.json", {"a": 1})
    temporary = _temporary(tmp_path / "folder" / "value.json").name
    assert calls == [("fsync", temporary), ("replace", "value.json"), ("fsync", "folder")]


def test_a_new_folder_is_synced_in_its_parent(tmp_path, calls):
    output_folder(tmp_path / "a" / "b")
    assert calls == [("fsync", tmp_path.name), ("fsync", "a")]


def test_a_file_system_that_cannot_sync_folders_is_supported(tmp_path, monkeypatch):
    fsync = os.fsync

    def without_folders(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).is_dir():
            raise OSError(22, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", without_folders)
    write_json(tmp_path / "value.json", {"a": 1})
    assert json.loads((tmp_path / "value.json").read_text()) == {"a": 1}


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    folder.mkdir()
    victim.write_text("important")
    for name in (_temporary(folder / "value.json").name, _temporary(folder / "m2s.tmp").name):
        (folder / name).symlink_to(victim)
    output_folder(folder)
    with atomic_write(folder / "value.json") as temporary:
        temporary.write_text("new")
    assert victim.read_text() == "important" and (folder / "value.json").read_text() == "new"
    assert [path.name for path in folder.iterdir()] == ["value.json"]


def test_a_dangling_link_in_place_of_a_temporary_file_creates_nothing_elsewhere(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / f".m2s-{os.getpid()}.tmp").symlink_to(tmp_path / "elsewhere")
    output_folder(tmp_path / "folder")
    assert not (tmp_path / "elsewhere").exists()


def test_files_of_ours_are_never_opened_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("important")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(UserError, match=f"{name} is a link or not an ordinary file"):
            open_file(tmp_path / name, os.O_RDWR)
    os.close(open_file(tmp_path / "new", os.O_RDWR))
    assert (tmp_path / "new").read_bytes() == b"" and (tmp_path / "victim").read_text() == "important"


def test_create_file_starts_with_an_empty_file(tmp_path):
    (tmp_path / "old").write_text("old")
    create_file(tmp_path / "old")
    assert (tmp_path / "old").read_text() == ""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"a": ', "Expecting value"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"[]", "it is a list, expected an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
        (b'{"a": NaN}', "the number NaN"),
        (b'{"a": -Infinity}', "the number -Infinity"),
        (b'{"a": 1e999}', "the number 1e999"),
        (b'{"a": ' + b"9" * 5000 + b"}", "integer string conversion"),
    ],
)
def test_damaged_json_is_a_user_error_in_one_line(tmp_path, data, reason):
    path = tmp_path / "value.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"value\.json is damaged .*: delete it") as error:
        read_json(path, "delete it")
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_json_that_is_missing_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"none\.json cannot be read \(No such file or directory\): make it"):
        read_json(tmp_path / "none.json", "make it")


def test_non_finite_numbers_are_read_where_they_are_allowed():
    assert parse_json('{"a": Infinity, "b": 1e999}', allow_nan=True) == {"a": float("inf"), "b": float("inf")}
