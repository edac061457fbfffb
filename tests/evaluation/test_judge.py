"""The judge: against transformers one sequence at a time, bytes of the text, and errors."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2s.errors import UserError
from m2s.evaluation import judge
from m2s.evaluation.judge import END, Judge, load_judge
from small_judges import KINDS, TEXTS, directly

transformers = pytest.importorskip("transformers", reason="no transformers here: pip install transformers gguf accelerate")


@pytest.mark.parametrize("name", KINDS)
def test_equal_to_transformers_one_sequence_at_a_time(name: str, folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    readings = [judges[name].tokenize(text) for text in TEXTS]
    ours = judges[name].nll([reading.ids for reading in readings], batch_size=4)
    for reading, nll in zip(readings, ours, strict=True):
        assert len(nll) == max(len(reading.ids) - 1, 0)
        if len(nll):
            assert np.abs(nll - directly(folders[name], reading.ids)).max() < 1e-4
    assert max(nll.max(initial=0) for nll in ours) > 4, "the test is void if all tokens are equally likely"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "opt"])
def test_batches_padding_and_chunks_change_nothing(
    name: str, judges: dict[str, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [judges[name].tokenize(text).ids for text in TEXTS]
    alone = [judges[name].nll([one])[0] for one in ids]
    for batch_size in (1, 2, 3, 64):
        for nll, expected in zip(judges[name].nll(ids, batch_size), alone, strict=True):
            assert np.allclose(nll, expected, atol=1e-5)
    longer = judges[name].tokenize("x" * 200).ids
    for nll, expected in zip(judges[name].nll([longer, *ids], 64)[1:], alone, strict=True):
        assert np.allclose(nll, expected, atol=1e-5)
    monkeypatch.setattr(judge, "LOGITS", {"cpu": 5 * 272})
    for nll, expected in zip(judges[name].nll(ids), alone, strict=True):
        assert np.allclose(nll, expected, atol=1e-5)


def test_the_last_layer_is_called_apart_if_that_gives_the_same(judges: dict[str, Judge]) -> None:
    """OPT's head does not call its base model; the others do, with or without soft capping."""
    assert {name for name, one in judges.items() if one.inseparable} == {"opt"}
    assert all("forward" not in one.model.base_model.__dict__ for one in judges.values())


def test_a_bos_token_goes_first_if_the_model_was_trained_with_one(judges: dict[str, Judge]) -> None:
    """Llama's tokenizer adds one. Gemma's does not, but the model needs it. GPT-2 has one and does not use it."""
    wanted = {name: one.tokenizer.bos_token_id if name in ("llama", "gemma") else None for name, one in judges.items()}
    assert {name: one.bos for name, one in judges.items()} == wanted
    for name in ("llama", "gemma", "gpt2"):
        plain = judges[name].tokenizer("the cat", add_special_tokens=False)["input_ids"]
        first = [] if name == "gpt2" else [judges[name].bos]
        assert judges[name].tokenize("the cat").ids == first + plain
        assert judges[name].tokenize("the cat", bos=False).ids == plain
    assert judges["llama"].tokenize("the cat").ids == judges["llama"].tokenizer("the cat")["input_ids"]


def test_the_end_of_a_document_is_the_end_token_of_the_judge(judges: dict[str, Judge]) -> None:
    for name, end in (("gpt2", END), ("llama", "</s>"), ("gemma", "<eos>")):
        known = judges[name].tokenizer
        ids = judges[name].tokenize(f"a{END}b", bos=False).ids
        assert ids == [*known.encode("a", add_special_tokens=False), known.convert_tokens_to_ids(end), known.vocab["b"]]
    assert judges["gpt2"].tokenize(f"a{END}b").ids == judges["gpt2"].tokenizer(f"a{END}b")["input_ids"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from("the \n\t"), st.characters(exclude_categories=["Cs"]))), st.integers(0, 6))
def test_bytes_are_those_of_the_text(judges: dict[str, Judge], text: str, limit: int) -> None:
    """With a BOS all bytes count; without, all but those of the first token; a truncated text has no more bytes."""
    size = len(text.replace(END, "").encode())
    reading = judges["llama"].tokenize(text)
    assert reading.bytes == size
    assert judges["llama"].tokenize(text, limit).bytes <= size and len(judges["llama"].tokenize(text, limit).ids) <= limit + 1
    plain = judges["gpt2"].tokenize(text)
    assert plain.bytes <= size and (size - plain.bytes <= 4 or text.startswith("the") or text[:1].isspace())


def test_bytes_of_known_texts(judges: dict[str, Judge]) -> None:
    assert judges["gpt2"].tokenize("the cat").bytes == 4  # "the" is one token, and the first
    assert (
        judges["gpt2"].tokenize("é€ ").bytes == 4
    )  # the bytes of é are two tokens: the character counts with the first of them
    assert judges["llama"].tokenize(f"{END}é{END}").bytes == 2
    assert judges["llama"].tokenize("the cat", 2).bytes == 4
    assert judge._sizes("a é\n ", [1, 3]) == [1, 5]  # a tokenizer that drops white space before, between and after


def test_invalid_sequences_are_rejected(judges: dict[str, Judge]) -> None:
    with pytest.raises(UserError, match=r"sequence 1 holds the id 272, but .* knows 0\.\.271"):
        judges["gpt2"].nll([[1, 2], [3, 272]])
    with pytest.raises(UserError, match=r"sequence 0 has 257 tokens of the judge .* at most 256"):
        judges["gpt2"].nll([[1] * 257])


def test_missing_weights(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a connection, a folder without weights or with damaged ones: the error says how to get them."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"hf download nobody/nothing --local-dir .*hf auth login.* \(2\) put a \.gguf file"):
        load_judge("nobody/nothing")
    damaged = tmp_path / "judges" / "damaged"
    damaged.mkdir(parents=True)
    for file in folders["gpt2"].iterdir():
        if file.suffix == ".json":
            (damaged / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"the judge damaged could not be loaded .*hf download"):
        load_judge("damaged")
    (damaged / "model.safetensors").write_bytes((folders["gpt2"] / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(UserError, match="the judge damaged could not be loaded"):
        load_judge("damaged")
    (damaged / "model.safetensors").write_bytes((folders["gpt2"] / "model.safetensors").read_bytes())
    assert load_judge("damaged", "cpu").bos is None


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs the package transformers .*: pip install 'm2s-diffusion\[judge\]'$"):
        load_judge("gpt2-large")
