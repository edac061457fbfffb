"""`m2s report` on hostile, damaged, missing and incomplete files, and with invalid arguments."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from m2s.cli import main
from m2s.evaluation.earlier_names import EARLIER_NAMES
from m2s.report.page import write
from m2s.report.read_run import read_runs
from page_reader import picture_file, read


def test_names_and_texts_are_escaped(runs: Path, tmp_path: Path) -> None:
    name = r"""<script>alert(1)<!-- & "q" 'a' $\frac{ </title> _x""".replace("/", "∕")
    run = tmp_path / name
    shutil.copytree(runs / "text", run)
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 13, "note": "</script><script>alert(2)</script>"}) + "\n")
    bpd = json.loads((run / "bpd.json").read_text())
    bpd["data"]["name"] = "<img src=x onerror=alert(3)>"
    (run / "bpd.json").write_text(json.dumps(bpd))
    picture_file(run / '"><b>.png')
    (run / "audit").mkdir()
    audit = json.loads((runs / "sedd" / "audit" / "audit.json").read_text()) | {"checkpoint": r"<b>$\frac{$</b>"}
    (run / "audit" / "audit.json").write_text(json.dumps(audit))
    shutil.copytree(run, tmp_path / "_hidden")
    problems = write([run, tmp_path / "_hidden"], tmp_path / "a.html", title="a </title> & <b>", notes="1 < 2\n\n<i>two</i>")
    page = read(tmp_path / "a.html")
    assert problems == [] and page.content["title"] == ["a </title> & <b>"]
    assert page.content["p"][:2] == ["1 < 2", "<i>two</i>"]
    assert len(page.named("script")) == 1 and not page.named("b") and not page.named("i")
    assert page.data["runs"][0]["name"] == name and page.data["runs"][0]["log"][-1]["note"].startswith("</script>")
    assert page.after("run|method", name)[1].startswith("m2s") and page.row(name, "<img src=x onerror=alert(3)>test")
    assert all(image["src"].startswith("data:") for image in page.named("img"))
    assert f'{name}: "><b>.png' in page.content["figcaption"]


def test_unreadable_files_are_listed_and_the_rest_is_shown(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "sedd", run)
    (run / "bpd.json").write_text('{"nelbo": ')
    audit = json.loads((run / "audit" / "audit.json").read_text())
    del audit["overall"]["before"]["signed"]
    (run / "audit" / "audit.json").write_text(json.dumps(audit))
    (run / "samples.npz").write_bytes((run / "samples.npz").read_bytes()[:200])
    (run / "odd.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    (run / "other.json").write_text('{"a": [1, 2]}')
    (run / "config.json").write_text("[]")
    (run / "model.safetensors").write_bytes(b"none")
    (run / "fid.json").write_text('{"fid": NaN, "samples": 1, "reference": 2, "network": 3, "kid": null}')
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "bits": NaN}\n{"step": 5, "bi')
    main(["report", str(run), "--out", str(tmp_path / "a.html")])
    page = read(tmp_path / "a.html")
    named = " ".join(page.content["li"])
    for file in (
        "bpd.json",
        "audit.json",
        "samples.npz",
        "odd.png",
        "other.json",
        "config.json",
        "model.safetensors",
        "fid.json",
    ):
        assert file in named, file
    assert "no record in line 6" in named and "it has no 'signed'" in named and len(page.content["li"]) == 9
    assert page.after("run|method", "run")[4] == "4" and "repair" in {e.get("id") for e in page.named("section")}
    assert page.data["runs"][0]["log"][-1] == {"step": 4, "bits": None}


def started(runs: Path, folder: Path) -> Path:
    """Return a run that has its train.json and nothing else."""
    (folder / "run").mkdir()
    shutil.copy(runs / "m2s" / "train.json", folder / "run")
    return folder / "run"


def test_run_that_has_only_started(runs: Path, tmp_path: Path) -> None:
    run = started(runs, tmp_path)
    (run / "a.npz.parts").mkdir()
    (run / "a.npz.parts" / "settings.json").write_text("{")
    assert write([run], tmp_path / "a.html") == []
    page = read(tmp_path / "a.html")
    assert [section["id"] for section in page.named("section")] == ["runs", "provenance"]
    assert page.after("run|method", "run")[4:7] == ["0of 3", "–", "0 s"]


def test_run_that_diverged(runs: Path, tmp_path: Path) -> None:
    run = started(runs, tmp_path)
    value = {"step": 2, "loss": "nan", "grad_norm": "inf", "bad": [1], "batch": [1, 2]}
    (run / "nan.json").write_text(json.dumps(value))
    assert write([run], tmp_path / "a.html") == []
    assert "run: at step 2 the loss was nan and the gradient's norm inf." in read(tmp_path / "a.html").content["p"]


def test_samples_of_text_with_their_tokens(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "text", tmp_path / "run")
    settings = json.dumps({"steps": 7, "sampler": "bayes", "data": {"kind": "text"}})
    for name in ("samples", "alone"):
        np.savez(tmp_path / "run" / f"{name}.npz", tokens=np.zeros((9, 4), np.int32), settings=settings)
    (problem,) = write([tmp_path / "run"], tmp_path / "a.html")
    assert "alone.npz holds tokens but no text" in problem
    assert "run: 2 of 9 samples, 7 steps, bayes (samples.npz)" in read(tmp_path / "a.html").content["h3"]


def error_of(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Return the one-line error of `m2s report`, after checking that nothing below `folder` has changed."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as exit_:
        main(["report", *arguments])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and err.startswith("m2s: ") and err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    return err


def test_invalid_arguments_write_nothing(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, out = str(runs / "m2s"), str(tmp_path / "new" / "a.html")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.json").write_text('{"config": {}')
    (tmp_path / "page.html").mkdir()
    capsys.readouterr()
    assert "RUN is missing" in error_of(capsys, tmp_path, "--out", out)
    assert "empty is not a run, because it has no train.json" in error_of(
        capsys, tmp_path, good, str(tmp_path / "empty"), "--out", out
    )
    assert "there is no such folder" in error_of(capsys, tmp_path, str(tmp_path / "none"), "--out", out)
    assert "train.json is damaged" in error_of(capsys, tmp_path, good, str(tmp_path / "bad"), "--out", out)
    for text in ("[]", '{"config": 1, "data": {}, "starts": []}', '{"config": {}, "data": {}, "starts": [1]}'):
        (tmp_path / "bad" / "train.json").write_text(text)
        assert "train.json is damaged" in error_of(capsys, tmp_path, str(tmp_path / "bad"), "--out", out)
    assert "must end in .html" in error_of(capsys, tmp_path, good, "--out", str(tmp_path / "a.pdf"))
    assert "is a folder" in error_of(capsys, tmp_path, good, "--out", str(tmp_path / "page.html"))
    (tmp_path / "mine.html").write_text("mine")
    assert "mine.html is there already" in error_of(capsys, tmp_path, good, "--out", str(tmp_path / "mine.html"))
    assert (tmp_path / "mine.html").read_text() == "mine"
    main(
        [
            "report",
            str(started(runs, tmp_path)),
            "--out",
            str(tmp_path / "mine.html"),
            "--notes",
            "Seen & noted.",
            "--overwrite",
        ]
    )
    page = read(tmp_path / "mine.html")
    assert page.data["runs"][0]["name"] == "run" and page.content["p"][0] == "Seen & noted."


def test_the_same_files_give_the_same_bytes(runs: Path, page: Path, tmp_path: Path) -> None:
    for name in ("text", "m2s", "sedd"):
        shutil.copytree(runs / name, tmp_path / name)
    order = [tmp_path / name for name in ("m2s", "sedd", "text")]
    write(order, tmp_path / "a.html", title="Three runs")
    assert (tmp_path / "a.html").read_bytes() == page.read_bytes()


def test_runs_have_distinct_names_and_are_read_once(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "m2s", tmp_path / "m2s")
    given = [runs / "m2s", tmp_path / "m2s", runs / "sedd", runs / "sedd" / ".." / "m2s"]
    assert [run.name for run in read_runs(given)] == [str(runs / "m2s"), str(tmp_path / "m2s"), "sedd"]


def test_a_damaged_line_of_the_log_hides_no_other_record(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "sedd", run)
    path = run / "log.jsonl"
    good = path.read_bytes().splitlines()
    bad = [b"\xff\xfe", b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}", b'{"step": 1, "step": 2}']
    path.write_bytes(b"\n".join([good[0], *bad, *good[1:], b'{"step": 99, "bits": ' + b"9" * 400 + b"}"]))
    found = read_runs([run])[0]
    assert [line["step"] for line in found.log] == [json.loads(line)["step"] for line in good] + [99]
    assert found.problems == [f"{path}: no record in line 2, 3, 4, 5"]
    assert len(found.training) == len(read_runs([runs / "sedd"])[0].training)


def test_half_of_a_surrogate_pair_and_other_types_in_a_configuration(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "text", run)
    config = json.loads((run / "config.json").read_text())
    for name, value in (("note", "\ud800"), ("data", "x"), ("model", [1])):
        (run / "config.json").write_text(json.dumps(config | {name: value}))
        problems = write([run], tmp_path / "a.html")
        assert (problems == []) == (name == "note")
    record = json.loads((run / "train.json").read_text())
    record["config"]["method"] = "\ud800"
    (run / "train.json").write_text(json.dumps(record))
    write([run], tmp_path / "a.html")
    assert "\\ud800" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_a_failing_disk_is_an_error_and_not_a_shorter_page(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_text = Path.read_text

    def failing(path: Path, *arguments: object, **options: object) -> str:
        if path.name == "config.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", failing)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs / "text"), "--out", str(tmp_path / "a.html")])
    assert ended.value.code == 1 and not (tmp_path / "a.html").exists()
    assert "config.json: the disk failed to read or write" in capsys.readouterr().err


def test_results_of_an_earlier_version_are_shown(runs: Path, tmp_path: Path) -> None:
    """bpd.json and repair.json with earlier keys give the same results."""
    current = read_runs([runs / "sedd"])[0]
    shutil.copytree(runs / "sedd", tmp_path / "sedd")
    for file in (tmp_path / "sedd" / "bpd.json", tmp_path / "sedd" / "repair" / "repair.json"):
        text = file.read_text()
        for before, now in EARLIER_NAMES.items():
            text = text.replace(f'"{now}":', f'"{before}":')
        assert text != file.read_text()
        file.write_text(text)
    earlier = read_runs([tmp_path / "sedd"])[0]
    assert earlier.results == current.results and {result.kind for result in earlier.results} >= {"bpd", "repair"}
