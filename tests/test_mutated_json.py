"""Malformed JSON of runs, states, logs, prepared texts and unfinished audits: one line for the user, never a traceback.

What is read from a damaged file without an error must be right: a state has the numbers that were saved, a log all records of
undamaged lines.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import m2s
from json_mutations import cases, mutate
from m2s.cli.evaluate.held_out import trained_on
from m2s.data import Bytes, check_text, pack, prepare_text, text
from m2s.data.source import TextSource, fingerprint
from m2s.errors import UserError
from m2s.evaluation.audit import audit_parts
from m2s.report.page import write as write_page
from m2s.report.read_run import read_runs
from m2s.samplers.options import SamplingOptions
from m2s.samplers.shards import CorruptShardError, SampleShards
from m2s.training import state, train
from m2s.training.config import resolve
from m2s.training.log import truncate
from m2s.training.run_folder import RunFolder
from m2s.training.save import FIELDS
from small_runs import random_rows, small

CASES = cases(4)
pytestmark = pytest.mark.usefixtures("without_shape_hook")  # its messages have several lines, and hide those of the library


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Nothing is raised but an error for the user, with a message of one line."""
    message = ""
    try:
        yield
    except (UserError, CorruptShardError) as error:
        message = str(error)
    assert "\n" not in message and len(message) < 3000, message[:500]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("mutated") / "run"
    train(small(out, steps=8, log_every=1), random_rows())
    return out


@pytest.fixture
def out(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def damage(path: Path, kind: str, seed: int) -> None:
    path.write_bytes(mutate(kind, seed, path.read_bytes()))


@pytest.mark.parametrize(("kind", "seed"), cases(8))
def test_the_record_of_a_run(out, kind, seed):
    damage(out / "train.json", kind, seed)
    with one_line(), RunFolder(resolve(small(out, steps=8, log_every=1)), random_rows()):
        pass
    with one_line():
        read_runs([out])
    with one_line():
        trained_on(str(out))


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_state(out, name, kind, seed, monkeypatch):
    monkeypatch.setattr(state, "PAUSE", 0.0)
    before = {step: state.read(out / "state", step).info for step in (4, 8)}
    damage(out / "state" / "step-00000008" / name, kind, seed)
    said: list[str] = []
    found = state.newest(out / "state", said.append, FIELDS)
    assert found is not None and found.info == before[found.step]
    assert (found.step == 4) == (len(said) == 1) and "\n" not in "".join(said)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_state_of_version_0_1(out, kind, seed, monkeypatch):
    """Without a manifest a changed number may go unnoticed; the step and the files may not."""
    monkeypatch.setattr(state, "PAUSE", 0.0)
    for step in (4, 8):
        path = state.place(out / "state", step)
        (path / "manifest.json").unlink()
        info = json.loads((path / "state.json").read_text())
        del info["manifest"]
        (path / "state.json").write_text(json.dumps(info))
    damage(state.place(out / "state", 8) / "state.json", kind, seed)
    found = state.newest(out / "state", lambda text: None, FIELDS)
    assert found is not None and found.step == int(found.path.name[-8:])


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_the_log(out, kind, seed):
    path = out / "log.jsonl"
    lines = path.read_bytes().splitlines()
    lines[3] = mutate(kind, seed, lines[3]).replace(b"\n", b"")
    path.write_bytes(b"\n".join(lines) + b"\n")
    read = read_runs([out])[0]
    assert len(read.log) + any("no record in line" in problem for problem in read.problems) >= len(lines) - 1
    truncate(path, 8)
    kept = path.read_bytes().splitlines()
    assert [line for line in lines if line != lines[3]] == [line for line in kept if line != lines[3]]


@pytest.mark.parametrize("name", ["train.json", "log.jsonl"])
@pytest.mark.parametrize(("kind", "seed"), cases(1))
def test_the_page_of_a_damaged_run(out, tmp_path, name, kind, seed):
    path = out / name
    if name == "log.jsonl":
        lines = path.read_bytes().splitlines()
        path.write_bytes(b"\n".join([*lines, mutate(kind, seed, lines[-2])]))
    else:
        damage(path, kind, seed)
    with one_line():
        write_page([out], tmp_path / "page.html")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(f"{name} " * 200)
    return folder


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "packed"
    prepare_text(source, out, Bytes(), validation_fraction=0.5)
    return out


@pytest.fixture(scope="module")
def unfinished(source, tmp_path_factory) -> Path:
    """A preparation that ended after its progress was written and before meta.json was."""
    out = tmp_path_factory.mktemp("unfinished") / "packed"

    def ending(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_finish", ending)
        patch.setattr(pack, "COMMIT_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            prepare_text(source, out, Bytes(), validation_fraction=0.5)
    return out


@pytest.mark.parametrize(("kind", "seed"), cases(8))
def test_meta_json_of_a_prepared_text(source, prepared, tmp_path, kind, seed):
    out = Path(shutil.copytree(prepared, tmp_path / "packed"))
    damage(out / "meta.json", kind, seed)

    def use() -> None:
        opened = TextSource(str(out), 16)
        opened.train(torch.arange(min(2, opened.size)))
        fingerprint(opened)

    readers: list[Callable[[], object]] = [use, lambda: check_text(out), lambda: prepare_text(source, out, Bytes(), 0.5)]
    for reader in readers:
        with one_line():
            reader()


@pytest.mark.parametrize("name", ["plan.json", "progress.json"])
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_an_unfinished_preparation(source, unfinished, tmp_path, name, kind, seed):
    out = Path(shutil.copytree(unfinished, tmp_path / "packed"))
    damage(out / name, kind, seed)
    with one_line():
        prepare_text(source, out, Bytes(), validation_fraction=0.5)


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> tuple[Callable[..., torch.Tensor], SamplingOptions, Path]:
    head = m2s.LogScore(m2s.Uniform(4, m2s.Linear()))
    options = SamplingOptions(head, (2, 3), 2, "analytic", "linear", 0)
    out = tmp_path_factory.mktemp("audit") / "audit.json"

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x_t.shape, 4)

    parts = SampleShards(out, 2, 3, 1, {"seed": 0})
    parts.open()
    audit_parts(model, options, parts)
    return model, options, parts.folder


@pytest.mark.parametrize("name", ["settings.json", "000000001.json"])
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_an_unfinished_audit(audited, tmp_path, name, kind, seed):
    model, options, folder = audited
    shutil.copytree(folder, tmp_path / folder.name)
    damage(tmp_path / folder.name / name, kind, seed)
    with one_line():
        parts = SampleShards(tmp_path / "audit.json", 2, 3, 1, {"seed": 0})
        parts.open()
        audit_parts(model, options, parts).summary()
