"""Denoisers of transformers: their logits become the posterior of this library, whatever their vocabulary looks like."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import m2s
from m2s.errors import UserError
from test_mdlm import word_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("without_shape_hook")
IDS, MASK, COLUMNS, LENGTH = 23, 4, 32, 6  # ids 0..22, of which 4 is the mask, in a vocabulary padded to 32
t = torch.tensor([0.2, 0.9])


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=COLUMNS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    config.intermediate_size, config.max_position_embeddings, config.mask_token_id = 16, 16, MASK
    model = transformers.BertForMaskedLM(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


class Denoiser(nn.Module):
    """A mixer of all positions that returns an object with logits, in the style of transformers."""

    def __init__(self, columns: int, mask: int | None, kind: str = "llada", causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.config = SimpleNamespace(model_type=kind, mask_token_id=mask)
        self.embedding, self.last = nn.Embedding(columns, 8), nn.Linear(8, columns)
        weights = torch.randn(LENGTH, LENGTH)
        self.register_buffer("mix", weights.tril() if causal else weights)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        count = input_ids.shape[1]
        return SimpleNamespace(logits=self.last(torch.tanh(self.mix[:count, :count] @ self.embedding(input_ids))))


def ours(ids: Tensor) -> Tensor:
    """The network's ids as states: tokens after the mask move down, and the mask is last."""
    return torch.where(ids == MASK, IDS - 1, ids - (ids > MASK).long())


CLEAN = torch.tensor([i for i in range(IDS) if i != MASK])


def noisy_ids() -> Tensor:
    ids = torch.randint(IDS, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)) < 0.5, MASK, ids)


def test_a_mask_in_a_padded_vocabulary() -> None:
    """BERT's logits of clean tokens, normalized, are the posterior at masked positions; others are copied."""
    model, process = bert(), m2s.Absorbing(IDS - 1, m2s.Linear())
    checkpoint = m2s.from_transformers(model, process, length=LENGTH)
    ids = noisy_ids()
    with torch.no_grad():
        mu = checkpoint.head.posterior(checkpoint.model(ours(ids), t), ours(ids), t)
        logits = model(input_ids=ids).logits
    expected = torch.zeros(2, LENGTH, IDS)
    for b in range(2):
        for i in range(LENGTH):
            if ids[b, i] == MASK:
                expected[b, i, : IDS - 1] = logits[b, i, CLEAN].softmax(-1)
            else:
                expected[b, i, ours(ids[b, i])] = 1
    torch.testing.assert_close(mu, expected, rtol=1e-5, atol=1e-6)
    x = checkpoint.sample(3, steps=4, seed=0)
    assert x.shape == (3, LENGTH) and x.max() < IDS - 1
    back = checkpoint.model.to_network(x)
    assert (back != MASK).all() and back.max() < IDS and torch.equal(ours(back), x)
    assert checkpoint.evaluate(x, seed=0).nats.isfinite().all()


def test_logits_of_the_next_position() -> None:
    """Dream: the logits at i - 1 predict the token at i, and those of the first position also the first token."""
    model = Denoiser(COLUMNS, MASK, "Dream")
    checkpoint = m2s.from_transformers(model, m2s.Absorbing(IDS - 1, m2s.Linear()), length=LENGTH)
    ids = noisy_ids()
    found, logits = checkpoint.model(ours(ids), t), model(ids).logits
    for i in range(LENGTH):
        torch.testing.assert_close(found[:, i, : IDS - 1], logits[:, max(i - 1, 0)][:, CLEAN])
    plain = m2s.from_transformers(model, m2s.Absorbing(IDS - 1, m2s.Linear()), shift=False)
    torch.testing.assert_close(plain.model(ours(ids), t)[..., : IDS - 1], logits[..., CLEAN])


def test_uniform_noise_has_no_mask() -> None:
    """All ids are tokens, and the logits are those of the leave-one-out distribution."""
    model, process = Denoiser(COLUMNS, None), m2s.Uniform(IDS, m2s.LogLinear())
    checkpoint = m2s.from_transformers(model, process, length=LENGTH)
    x = torch.randint(IDS, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    assert repr(checkpoint.head) == repr(m2s.Posterior(process, offset="exact"))
    nu = checkpoint.head.log_network_distribution(checkpoint.model(x, t), x, t)
    torch.testing.assert_close(nu, model(x).logits[..., :IDS].log_softmax(-1))
    assert checkpoint.sample(2, steps=2).max() < IDS


class Encoder(nn.Module):
    """A network with a clean prompt and a noisy canvas."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Denoiser(COLUMNS, None)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> tuple[Tensor]:
        logits = self.decoder(decoder_input_ids).logits
        return (logits + self.decoder.last(self.decoder.embedding(input_ids).sum(1, keepdim=True)),)


def test_prompts_of_an_encoder() -> None:
    """One for all samples, or one for each as the condition."""
    model, process = Encoder(), m2s.Uniform(IDS, m2s.Linear())
    x, prompt = torch.zeros(2, LENGTH, dtype=torch.long), torch.tensor([3, 1])
    checkpoint = m2s.from_transformers(model, process, prompt=prompt, length=LENGTH)
    torch.testing.assert_close(checkpoint.model(x, t), model(prompt.expand(2, -1), x)[0])
    each = torch.tensor([[1, 2, 3], [4, 5, 6]])
    torch.testing.assert_close(checkpoint.model(x, t, each), model(each, x)[0])
    without = m2s.from_transformers(model, process, length=LENGTH)
    assert without.sample(2, steps=2, condition=each).shape == (2, LENGTH)
    with pytest.raises(UserError, match="the network has an encoder: give prompt, or condition"):
        without.model(x, t)


def test_a_tokenizer_without_its_mask(tmp_path: Path) -> None:
    words = ["[UNK]", "a", "b", "c", "[MASK]", *(f"w{i}" for i in range(IDS - 5))]
    word_tokenizer(tmp_path / "tokenizer.json", words)
    process = m2s.Absorbing(IDS - 1, m2s.Linear())
    checkpoint = m2s.from_transformers(bert(), process, tokenizer=tmp_path / "tokenizer.json")
    assert checkpoint.tokenizer.encode("c w0") == [3, 4] and checkpoint.tokenizer.decode([3, 4]) == "c w0"
    with pytest.raises(UserError, match="it has 22 clean tokens, and the process"):
        m2s.from_transformers(bert(), m2s.Absorbing(9, m2s.Linear()), tokenizer=tmp_path / "tokenizer.json")


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"model": Denoiser(COLUMNS, None)}, r"neither it nor model\.config\.mask_token_id is given"),
    "a mask for uniform noise": ({"process": m2s.Uniform(IDS, m2s.Linear()), "mask": 3}, "has no mask: leave it out"),
    "a causal network": ({"model": Denoiser(COLUMNS, MASK, causal=True)}, "it is causal: build it with bidirectional"),
    "a prompt without an encoder": ({"prompt": torch.tensor([1])}, "the network has no encoder"),
    "a head of another process": ({"head": m2s.Posterior(m2s.Uniform(5, m2s.Linear()))}, "make the head of that process"),
    "no network": ({"model": 5}, "model"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    changes, message = ERRORS[name]
    arguments = {"model": Denoiser(COLUMNS, MASK), "process": m2s.Absorbing(IDS - 1, m2s.Linear()), **changes}
    with pytest.raises((UserError, TypeError), match=message):
        m2s.from_transformers(**arguments)


def test_too_few_columns() -> None:
    checkpoint = m2s.from_transformers(Denoiser(10, 4), m2s.Absorbing(IDS - 1, m2s.Linear()))
    with pytest.raises(ValueError, match=r"10 columns, but it needs 23|failed"):
        checkpoint.model(torch.zeros(1, LENGTH, dtype=torch.long), t[:1])


@pytest.mark.skipif(not hasattr(transformers, "DiffusionGemmaConfig"), reason="transformers has no DiffusionGemma")
def test_diffusion_gemma() -> None:
    """A tiny one of transformers itself: a prompt in the encoder, and a canvas at uniform noise."""
    text = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8, "sliding_window": 8, "num_experts": 2}
    text |= {"top_k_experts": 1, "moe_intermediate_size": 8, "max_position_embeddings": 32}
    torch.manual_seed(0)
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=None, canvas_length=LENGTH)
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    prompt = torch.tensor([2, 5, 7])
    checkpoint = m2s.from_transformers(model, m2s.Uniform(40, m2s.Linear()), prompt=prompt, length=LENGTH)
    x = checkpoint.sample(2, steps=2, seed=0)
    with torch.no_grad():
        expected = model(input_ids=prompt.expand(2, -1), decoder_input_ids=x).logits
        torch.testing.assert_close(checkpoint.model(x, t), expected)
