"""The default judge: where it is searched, how to get it, and that its name stands beside every number."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2s.cli import main
from m2s.errors import UserError
from m2s.evaluation import judge, judge_files
from m2s.evaluation.genppl import PROTOCOLS, format_table
from m2s.evaluation.judge import load_judge
from m2s.evaluation.judge_files import DEFAULT_JUDGE


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No connection, no model in the cache of the hub, and an empty folder $M2S_DATA; return the folder of judges."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(judge_files, "why_unreachable", lambda url: f"{url} is away")
    return tmp_path / "data" / "judges"


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Eight samples of text."""
    np.savez(tmp_path / "a.npz", tokens=np.random.default_rng(0).integers(0, 27, (8, 20)).astype(np.int32), settings="{}")
    return tmp_path / "a.npz"


def error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_the_default_is_a_small_model_that_anyone_can_download() -> None:
    assert DEFAULT_JUDGE == "HuggingFaceTB/SmolLM2-135M"
    defaults = {name: protocol.default_judge for name, protocol in PROTOCOLS.items()}
    assert defaults == {"paper": DEFAULT_JUDGE, "sedd": "gpt2-large", "mdlm": "gpt2-large"}


def test_without_a_connection_the_error_has_three_ways(offline, samples, capsys, monkeypatch) -> None:
    """Nothing of transformers is called, which is slow to import and retries for a minute."""
    monkeypatch.setattr(judge, "_transformers", lambda: pytest.fail("transformers must not be imported"))
    said = error(capsys, "evaluate", "genppl", samples, "--tokenizer", "chars")
    assert f"the judge {DEFAULT_JUDGE} is not on this machine" in said and "huggingface.co is away" in said
    assert (
        f"(1) with a connection, here or elsewhere: `hf download {DEFAULT_JUDGE} --local-dir {offline / 'SmolLM2-135M'}`"
        in said
    )
    assert f"(2) put a .gguf file of the model into {offline}" in said and "(3) give any other causal language model" in said
    assert "gpt2-large is not on this machine" in error(
        capsys, "evaluate", "genppl", samples, "--tokenizer", "chars", "--protocol", "mdlm"
    )
    (offline / "other").mkdir(parents=True)
    (offline / "other" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"judges has other\)"):
        load_judge("nobody/nothing")


def test_the_hub_is_not_asked_where_the_user_forbids_it(offline, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(judge_files, "why_unreachable", lambda url: pytest.fail("no connection may be opened"))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        load_judge(DEFAULT_JUDGE)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M", "smollm2-135m-q8_0"])
def test_the_folder_of_judges_is_searched_first(offline, folders, samples, capsys, name, tmp_path) -> None:
    shutil.copytree(folders["llama"], offline / name)
    out = tmp_path / "a.json"
    arguments = ["evaluate", "genppl", str(samples), "--tokenizer", "chars", "--device", "cpu", "--resamples", "100"]
    main([*arguments, "--out", str(out)])
    loaded = name if name.startswith("smol") else "SmolLM2-135M"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[-1] == "judge" and printed[1].split()[-1] == loaded
    (result,) = json.loads(out.read_text())["results"]
    assert result["judge"]["name"] == loaded
    assert any("not google/gemma-2-9b" in line for line in printed)


def test_of_several_copies_the_shortest_name_is_taken(offline) -> None:
    offline.mkdir(parents=True)
    for name in ("smollm2-135m-instruct-q4_1.gguf", "SmolLM2-135M-Q8_0.gguf", "smollm2-1.7b.gguf", "smollm2-135m.txt"):
        (offline / name).touch()
    assert judge_files.find(DEFAULT_JUDGE) == offline / "SmolLM2-135M-Q8_0.gguf"
    (offline / "SmolLM2-135M").mkdir()
    assert judge_files.find(DEFAULT_JUDGE) == offline / "SmolLM2-135M"
    assert judge_files.find("gpt2-large") is None and judge_files.find("./smollm2") is None


@pytest.mark.parametrize(
    ("file", "variant"),
    [
        ("smollm2-135m-instruct-q4_1", "instruct, 4-bit weights"),
        ("SmolLM2-135M.Q8_0", "8-bit weights"),
        ("SmolLM2-135M-Instruct", "instruct"),
        ("SmolLM2-135M-f16", ""),
        ("SmolLM2-135M", ""),
    ],
)
def test_a_model_that_is_not_the_base_model_is_named(offline, folders, capsys, file, variant) -> None:
    """A file of weights with fewer bits, or of an instruct model, is taken for the base model, but not silently."""
    shutil.copytree(folders["llama"], offline / file)
    load_judge(DEFAULT_JUDGE, "cpu")
    said = f"the judge is {offline / file}, which is not the base model {DEFAULT_JUDGE} but a variant of it: {variant}\n"
    assert capsys.readouterr().err == (said if variant else "")
    load_judge(str(offline / file), "cpu")
    assert capsys.readouterr().err == ""  # the model that was asked for


def test_a_file_that_is_asked_for_by_its_name_is_no_variant(offline) -> None:
    offline.mkdir(parents=True)
    (offline / "SmolLM2-135M-instruct-q4_1.gguf").touch()
    assert judge_files.describe_variant("smollm2-135m-instruct-q4_1.gguf") == ""
    assert "instruct, 4-bit weights" in judge_files.describe_variant("SmolLM2-135M")


def test_missing_samples_are_reported_before_tokenizer_and_judge(offline, tmp_path, capsys) -> None:
    said = error(capsys, "evaluate", "genppl", tmp_path / "nothing.npz", "--tokenizer", "gpt2")
    assert "there is no file" in said and "nothing.npz" in said


def test_differences_name_the_judge(offline, folders, samples, capsys, tmp_path) -> None:
    other = tmp_path / "b.npz"
    shutil.copy(samples, other)
    arguments: list[Any] = ["evaluate", "genppl", samples, "--against", other, "--tokenizer", "chars", "--device", "cpu"]
    main([str(a) for a in [*arguments, "--judge", folders["gpt2"], "--resamples", "100", "--out", tmp_path / "d.json"]])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "less b.npz" in line]
    assert "of perplexity by gpt2;" in line
    written = json.loads((tmp_path / "d.json").read_text())
    assert {gap["judge"] for gap in written["differences"]} == {str(folders["gpt2"])}
    assert all(line.split()[-1] in ("judge", "gpt2") for line in format_table(written["results"]))


def test_without_transformers_the_package_is_named(offline, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'm2s-diffusion\[judge\]'$"):
        load_judge(DEFAULT_JUDGE)
