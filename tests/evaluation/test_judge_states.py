"""The embeddings of a judge, which come from the pass that gives the NLL."""

from pathlib import Path

import numpy as np
import pytest
import torch

from m2s.evaluation.judge import END, Judge
from small_judges import KINDS, TEXTS

transformers = pytest.importorskip("transformers", reason="no transformers here: pip install transformers gguf accelerate")


def states_directly(folder: Path, ids: list[int]) -> np.ndarray:
    """The hidden states of the last layer, by transformers: one sequence, no padding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()


@pytest.mark.parametrize("name", KINDS)
def test_states_are_those_of_transformers(name: str, folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    sequences = [reading.ids for reading in judges[name].tokenize_all(TEXTS)]
    skip = int(judges[name].bos is not None)
    output = judges[name].read(sequences, batch_size=4, skip=skip)
    for ids, nll, last, mean in zip(sequences, output.nll, output.last, output.mean, strict=True):
        assert len(nll) == max(0, len(ids) - 1)
        if not ids:
            assert not last.any() and not mean.any()
            continue
        expected = states_directly(folders[name], ids)
        assert np.abs(last - expected[-1]).max() < 1e-4
        assert np.abs(mean - (expected[skip:] if len(ids) > skip else expected).mean(0)).max() < 1e-4
    assert np.abs(output.last[0] - output.mean[0]).max() > 0.1, "the test is void if both are equal"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "opt"])
def test_batches_do_not_change_states(name: str, judges: dict[str, Judge]) -> None:
    sequences = [reading.ids for reading in judges[name].tokenize_all(TEXTS)]
    alone = judges[name].read(sequences, batch_size=1)
    together = judges[name].read(sequences, batch_size=64)
    assert np.allclose(alone.last, together.last, atol=1e-5) and np.allclose(alone.mean, together.mean, atol=1e-5)


def test_nothing_to_read(judges: dict[str, Judge]) -> None:
    empty = judges["gpt2"].read([])
    assert empty.nll == [] and empty.last.shape == (0, 0)
    blank = judges["gpt2"].read([[], []])
    assert [len(nll) for nll in blank.nll] == [0, 0] and blank.last.shape == (2, 0)
    one = judges["gpt2"].read([[5], []])
    assert [len(nll) for nll in one.nll] == [0, 0] and one.last.shape == (2, 16) and one.last[0].any() and not one.last[1].any()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_texts_are_tokenized_together_as_apart(name: str, judges: dict[str, Judge]) -> None:
    texts = [*TEXTS, END, "", f"{END}{END}a", "é"]
    for limit in (None, 3):
        for bos in (True, False):
            together = judges[name].tokenize_all(texts, limit, bos)
            assert together == [judges[name].tokenize(text, limit, bos) for text in texts]
    assert judges[name].tokenize_all([]) == []
