"""`m2s evaluate genppl`."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro

import m2s
import m2s.hub
from m2s.cli import main
from m2s.cli.evaluate.genppl import GenPPL
from m2s.data import Characters
from m2s.data.tokenizer import HuggingFace
from m2s.errors import UserError
from m2s.evaluation import genppl
from m2s.evaluation.genppl import PROTOCOLS, read_samples
from m2s.models import DiT, DiTConfig
from plain_networks import dit_shapes, random_tensors
from small_judges import LETTERS, directly
from test_mdlm import hub_config, word_tokenizer, write_hub

transformers = pytest.importorskip("transformers", reason="no transformers here: pip install transformers gguf accelerate")


def run(*arguments: object) -> None:
    """Run the command."""
    tyro.cli(GenPPL, args=[str(argument) for argument in arguments]).run()


def write_samples(folder: Path, name: str, count: int = 6, temperature: float = 1.0, seed: int = 0) -> Path:
    """Write random samples, more varied at a higher temperature."""
    generator = np.random.default_rng(int(100 * temperature))
    tokens = generator.integers(0, 2 + int(20 * temperature), (count, 12))
    described = json.dumps({"temperature": temperature, "seed": seed, "start": 0})
    np.savez(folder / name, tokens=tokens.astype(np.int32), settings=described)
    return folder / name


def test_command(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_samples(tmp_path, "a.npz")
    out = tmp_path / "new" / "a.json"
    run(file, "--judge", folders["llama"], "--tokenizer", "chars", "--out", out, "--resamples", 200, "--device", "cpu")
    (result,) = json.loads(out.read_text())["results"]
    texts = read_samples(file, PROTOCOLS["paper"], Characters()).texts
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["llama"])
    direct = [directly(folders["llama"], tokenizer(text)["input_ids"]) for text in texts]
    assert result["perplexity"]["value"] == pytest.approx(math.exp(np.concatenate(direct).mean()), rel=1e-4)
    assert result["perplexity"]["low"] < result["perplexity"]["value"] < result["perplexity"]["high"]
    assert (result["samples"], result["distinct"], result["bytes"]) == (6, 6, 72)
    assert result["sequences"]["nll"] == pytest.approx([nll.sum() for nll in direct], abs=1e-3)
    assert result["protocol"]["name"] == "paper" and result["judge"]["bos"] == tokenizer.bos_token_id
    printed = capsys.readouterr().out
    assert (
        "not google/gemma-2-9b" in printed and "6 samples, not 1024" in printed and "samples of 12 tokens, not 512" in printed
    )
    assert f"{result['perplexity']['value']:.2f}" in printed and f"{result['entropy_bits']['value']:.3f}" in printed


def test_frontier_and_pairs(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write_samples(tmp_path, f"{name}.npz", temperature=t) for name, t in (("c", 1.2), ("a", 0.4), ("b", 0.8))]
    out = tmp_path / "frontier.png"
    more = ("--judge", folders["gpt2"], "--tokenizer", "chars", "--resamples", 200, "--out", out)
    other = write_samples(tmp_path, "d.npz", temperature=1.0)
    run(*files, other, "--against", other, "--protocol", "mdlm", *more)
    written = json.loads(out.with_suffix(".json").read_text())
    assert [result["settings"]["temperature"] for result in written["results"]] == [0.4, 0.8, 1.0, 1.2]
    bits = [result["entropy_bits"]["value"] for result in written["results"]]
    assert bits == sorted(bits)
    assert out.read_bytes().startswith(b"\x89PNG")
    values = {Path(result["file"]).name: result["nats_per_token"]["value"] for result in written["results"]}
    for gap in written["differences"]:
        expected = values[Path(gap["file"]).name] - values["d.npz"]
        assert gap["nats_per_token"]["value"] == pytest.approx(expected) and gap["same_noise"] is True
    printed = capsys.readouterr().out
    assert len(written["differences"]) == 3 and "a.npz less d.npz: " in printed and printed.count("not gpt2-large") == 1
    figure = genppl.plot_frontier(written["results"])
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert labels == ["T = 0.4", "T = 0.8", "T = 1", "T = 1.2"]


def test_the_checkpoint_decodes(folders: dict[str, Path], tmp_path: Path) -> None:
    model = DiT(DiTConfig(states=len(LETTERS.alphabet), width=16, depth=1, heads=2, condition_width=8, length=12))
    head = m2s.Posterior(m2s.Uniform(len(LETTERS.alphabet), m2s.Linear()))
    m2s.hub.save(tmp_path / "run", model, head, {"kind": "text", "length": 12}, tokenizer=LETTERS)
    m2s.hub.save(tmp_path / "image", model, head, {"kind": "image", "shape": [3, 4], "levels": 28})
    file = write_samples(tmp_path, "a.npz")
    more = (file, "--judge", folders["letters"], "--protocol", "sedd", "--resamples", 100)
    run(*more, "--checkpoint", tmp_path / "run", "--out", tmp_path / "a.json")
    (result,) = json.loads((tmp_path / "a.json").read_text())["results"]
    assert result["tokens"] == 6 * 11
    with pytest.raises(UserError, match="image has no tokenizer"):
        run(*more, "--checkpoint", tmp_path / "image")
    with pytest.raises(UserError, match="no folder"):
        run(*more, "--checkpoint", tmp_path / "nowhere")


def test_tokenizers_of_other_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of built-in weights and of another project. Without one, the message says how to get it."""
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the merges of GPT-2's tokenizer are not downloaded

    def found(checkpoint: object) -> Any:
        return GenPPL((tmp_path / "a.npz",), checkpoint=str(checkpoint))._tokenizer()

    assert found("builtin:chars") == m2s.load("builtin:chars").tokenizer
    words = ["[UNK]", "a", "[MASK]", *(f"w{i}" for i in range(34))]
    other = write_hub(tmp_path / "mdlm", hub_config("mdlm", 37), random_tensors(dit_shapes(37)))
    word_tokenizer(other / "tokenizer.json", words)
    assert found(other) == HuggingFace(str(other / "tokenizer.json"), mask=2)
    duo = write_hub(tmp_path / "duo", hub_config("duo", 50_258), random_tensors(dit_shapes(50_258)))
    with pytest.raises(UserError, match=r"GPT-2's merges are not at .*: run `m2s data download gpt2`"):
        found(duo)


def test_samples_name_their_tokenizer(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of `m2s sample` name their tokenizer, so several need no option; an option has priority."""
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))

    def samples(name: str, tokenizer: Any) -> Path:
        file = write_samples(tmp_path, name)
        with np.load(file) as held:
            tokens, settings = held["tokens"], json.loads(str(held["settings"]))
        data = {"kind": "text", "length": 12, "tokenizer": tokenizer}
        np.savez(file, tokens=tokens, settings=json.dumps({**settings, "data": data}))
        return file

    files = [samples("a.npz", Characters().to_dict()), samples("b.npz", Characters("zyxwvutsrqponmlkjihgfedcba ").to_dict())]
    more = ("--judge", folders["gpt2"], "--resamples", 100, "--out", tmp_path / "all.json")
    run(*files, *more)
    apart = {}
    for file in files:
        run(file, *more, "--out", tmp_path / "one.json", "--overwrite")
        (apart[str(file)],) = json.loads((tmp_path / "one.json").read_text())["results"]
    together = {result["file"]: result for result in json.loads((tmp_path / "all.json").read_text())["results"]}
    assert {name: result["nats_per_token"] for name, result in together.items()} == {
        name: result["nats_per_token"] for name, result in apart.items()
    }
    first, second = (apart[str(file)]["nats_per_token"]["value"] for file in files)
    assert first != second
    run(files[1], *more, "--tokenizer", "chars", "--overwrite")
    (given,) = json.loads((tmp_path / "all.json").read_text())["results"]
    assert given["nats_per_token"]["value"] == pytest.approx(first)
    for tokenizer, printed in (
        ({"kind": "GPT2"}, "GPT-2's merges are not at .* into .*/data/gpt2.*; or give --checkpoint RUN"),
        ({"kind": "Words"}, "the tokenizer's kind is 'Words'.*; or give --checkpoint RUN"),
        (None, "nothing says how to decode them"),
    ):
        with pytest.raises(UserError, match=printed):
            run(samples("c.npz", tokenizer), "--judge", folders["gpt2"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--protocol", "mauve"), "no protocol 'mauve': choose from paper, sedd, mdlm"),
        (("--tokenizer", "words"), "no tokenizer 'words': choose from gpt2, bytes, chars"),
        (("--tokenizer", "chars", "--checkpoint", "x"), "give one of them"),
        (("--tokenizer", "chars", "--limit", "1"), "--limit is 1"),
        (("--tokenizer", "chars", "--batch-size", "0"), "--batch-size is 0"),
        (("--tokenizer", "chars", "--resamples", "9"), "--resamples is 9"),
        (("--tokenizer", "chars", "--seed", "-1"), "--seed is -1"),
        (("--tokenizer", "chars", "--out", "{here}/a.gif"), "must end in .json"),
        (("--tokenizer", "chars", "--out", "{here}/a.png"), "a figure of one point"),
        (("--tokenizer", "chars", "--dtype", "int8"), "the dtype is 'int8'"),
        (("--tokenizer", "chars", "--device", "gpu"), "device is 'gpu', but it must be cpu, cuda"),
        (
            ("--tokenizer", "chars", "--judge", "{here}/no.gguf"),
            "there is no judge at .* three ways .* with a connection.* put a .gguf file",
        ),
        (("--tokenizer", "chars", "--judge", "{here}"), "holds no config.json"),
        (("--tokenizer", "chars", "--judge", "{here}/a.npz"), "is not a judge"),
        (("--tokenizer", "chars", "--against", "{here}/few.npz"), "the files give 6, 3 samples, but pairs need"),
        (("--tokenizer", "chars", "--against", "{here}/a.npz"), "itself: give other samples"),
        ((), "give --checkpoint RUN or --tokenizer NAME"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_options_are_rejected(folders: dict[str, Path], tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    write_samples(tmp_path, "few.npz", 3)
    file = write_samples(tmp_path, "a.npz")
    before = sorted(tmp_path.rglob("*"))
    judge_ = () if "--judge" in more else ("--judge", folders["gpt2"])
    with pytest.raises(UserError, match=message):
        run(file, *judge_, *(one.format(here=tmp_path) for one in more))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_samples(tmp_path, "a.npz"))
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", "genppl", file, "--tokenizer", "chars", "--judge", str(tmp_path / "no.gguf")])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and err.count("\n") == 1 and err.startswith("m2s: there is no judge at ")
