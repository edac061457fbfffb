"""Checkpoints of GIDD, RADD and BD3-LM with one block, and SEDD's states alone: what the authors define, and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import log_softmax

import m2s
from m2s.data.tokenizer import GPT2, HuggingFace
from plain_networks import BLOCKS, COND, HEADS, LENGTH, WIDTH, dit_shapes, plain_dit, random_tensors
from test_mdlm import hub_config, word_tokenizer, write_hub

pytestmark = pytest.mark.usefixtures("without_shape_hook")
TOKENS, ROWS = 40, 128  # GIDD's rows are a multiple of 128
t = torch.tensor([0.004, 0.3, 0.97])


def caches() -> dict[str, Tensor]:
    """The buffers that GIDD stores."""
    angle = torch.arange(LENGTH)[:, None] * 10_000.0 ** (-torch.arange(WIDTH // HEADS // 2) / (WIDTH // HEADS // 2))
    both = torch.cat([angle, angle], -1)[None, :, None, None].repeat(1, 1, 3, 1, 1)
    return {"rotary_emb.cos_cached": both.cos(), "rotary_emb.sin_cached": both.sin()}


def gidd_weights(rows: int) -> dict[str, Tensor]:
    weights = random_tensors(dit_shapes(rows))
    del weights["rotary_emb.inv_freq"]
    return {**weights, **caches()}


def write_gidd(folder: Path, hub: bool, rows: int, tokenizer: int = TOKENS, mask: int = 0, **changes: Any) -> dict[str, Tensor]:
    """A folder of GIDD. The tokenizer has [MASK] at the id `mask`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = gidd_weights(rows)
    if hub:
        config = {
            "architectures": ["DIT"],
            "model_type": "dit",
            "vocab_size": rows,
            "max_seq_len": LENGTH,
            "hidden_size": WIDTH,
        }
        config |= {"timestep_cond_dim": COND, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS}
        config |= {"attention_dropout": 0.0, "p_uniform": 0.1, "t_eps": 1e-4, **changes}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    else:
        model = {"type": "diffusion", "diffusion_process": "gidd", "p_uniform": 0.1, "t_eps": 1e-4, "hidden_size": WIDTH}
        model |= {"cond_dim": COND, "n_blocks": BLOCKS, "n_heads": HEADS, "dropout": 0.0, "max_seq_len": LENGTH, **changes}
        (folder / "config.yaml").write_text(json.dumps({"model": model, "data": {"tokenizer_name": "gpt2"}}))  # JSON is YAML
        torch.save(
            {"_orig_mod." + n: v for n, v in {**weights, "logit_bias": torch.zeros(1, 1, 1)}.items()}, folder / "model.pt"
        )
    if tokenizer:
        words = ["[UNK]", *(f"w{i}" for i in range(tokenizer - 2))]
        word_tokenizer(folder / "tokenizer.json", [*words[:mask], "[MASK]", *words[mask:]])
    return weights


def tokens(size: int) -> Tensor:
    x = torch.randint(size, (len(t), LENGTH), generator=torch.Generator().manual_seed(1))
    return torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.5, size - 1, x)


# --- GIDD ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [3, TOKENS - 1])
@pytest.mark.parametrize(("hub", "rows"), [(True, TOKENS), (False, ROWS)], ids=["hub", "folder"])
def test_gidd_predicts_nu_at_t(hub: bool, rows: int, mask: int, tmp_path: Path) -> None:
    """The network is given t, not sigma. q_t(y) = alpha_t nu_y + m_t(y) with nu the softmax over tokens without the mask."""
    weights = write_gidd(tmp_path, hub, rows, mask=mask)
    checkpoint = m2s.load(tmp_path)
    model, head, time, x = checkpoint.model.double(), checkpoint.head, t.double(), tokens(TOKENS)
    order = torch.tensor([i for i in range(TOKENS) if i != mask] + [mask])
    expected = plain_dit(weights, order[x], time)[..., order]
    found = model(x, time)
    torch.testing.assert_close(found[..., :TOKENS], expected, rtol=0, atol=1e-10)
    process = head.process
    assert (process.vocab, process.mask, process.p_uniform) == (TOKENS - 1, TOKENS - 1, 0.1)
    nu = torch.nn.functional.pad(expected[..., :-1].softmax(-1), (0, 1))
    c = (0.2 / 0.9 * torch.sqrt(time * (1 - time)))[:, None, None]
    alpha = (1 - time)[:, None, None] / (1 + c)
    mixing = torch.full((TOKENS,), 1 / (TOKENS - 1), dtype=torch.float64) * c / (1 + c)
    mixing[..., -1] = (time[:, None, None] / (1 + c)).squeeze(-1)
    q = alpha * nu + mixing  # the distribution of the token at time t, without seeing it
    score = q / q.gather(-1, x[..., None])
    torch.testing.assert_close(head.log_score(found, x, time).exp(), score, rtol=1e-9, atol=1e-12)
    assert checkpoint.data == {"kind": "text", "length": LENGTH}
    assert checkpoint.tokenizer == HuggingFace(str(tmp_path / "tokenizer.json"), mask=mask)
    assert checkpoint.sample(2, steps=2, seed=0).max() < TOKENS - 1


def test_the_baseline_of_gidd_is_mdlm(tmp_path: Path) -> None:
    weights = write_gidd(tmp_path, False, ROWS, mask=TOKENS - 1, diffusion_process="mdlm")
    model, head = m2s.load(tmp_path)
    assert repr(head) == repr(m2s.Posterior(m2s.Absorbing(TOKENS - 1, m2s.LogLinear(1e-4))))
    x = tokens(TOKENS)
    torch.testing.assert_close(model.double()(x, t)[..., :TOKENS], plain_dit(weights, x, t)[..., :TOKENS], rtol=0, atol=1e-10)


def test_gpt2_tokenizer_of_gidd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tokenizer.json the rows of the hub's checkpoints are GPT-2's tokens, perhaps [PAD], and [MASK]."""
    monkeypatch.setattr(GPT2, "encode", lambda self, text: [])
    for rows, extra in ((50_258, 0), (50_259, 1)):
        write_gidd(tmp_path / str(rows), True, rows, tokenizer=0)
        checkpoint = m2s.load(tmp_path / str(rows))
        assert checkpoint.tokenizer == GPT2(extra=extra) and checkpoint.head.process.mask == rows - 1


GIDD_ERRORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        r"128 rows with padding, and how many are tokens is in tokenizer",
    ),
    "a larger tokenizer": (
        lambda f: word_tokenizer(f / "tokenizer.json", [f"w{i}" for i in range(200)]),
        "200 tokens, but the checkpoint has 128 rows",
    ),
    "a bias": (lambda f: add(f, logit_bias=torch.ones(1, 1, 1)), "logit_bias is not zero"),
    "an unexpected tensor": (lambda f: add(f, tail=torch.ones(1)), "tail is unexpected"),
    "a pickle": (lambda f: torch.save({"x": tmp}, f / "model.pt"), "holds objects other than tensors"),
}


def tmp() -> None:
    """A function, which a pickle names."""


def add(folder: Path, **tensors: Tensor) -> None:
    torch.save({**torch.load(folder / "model.pt", weights_only=True), **tensors}, folder / "model.pt")


@pytest.mark.parametrize("name", GIDD_ERRORS)
def test_errors_of_gidd_name_the_damage(name: str, tmp_path: Path) -> None:
    damage, message = GIDD_ERRORS[name]
    write_gidd(tmp_path, False, ROWS)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        m2s.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_other_models_of_gidd(tmp_path: Path) -> None:
    write_gidd(tmp_path, False, ROWS, type="autoregressive")
    with pytest.raises(ValueError, match=r"model\.type is 'autoregressive', but it must be diffusion"):
        m2s.load(tmp_path)


# --- RADD ------------------------------------------------------------------------------------------------------------------


def radd_config() -> dict[str, Any]:
    model = {"name": "small_radd", "type": "ddit_wot", "hidden_size": WIDTH, "cond_dim": COND, "length": LENGTH}
    model |= {"n_blocks": BLOCKS, "n_heads": HEADS, "dropout": 0.02, "use_checkpoint": False, "dtype": "float16"}
    return {"ngpus": 4, "tokens": TOKENS, "model": model, "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20}}


def write_state(run: Path, config: dict[str, Any] | None, weights: dict[str, Tensor]) -> Path:
    """A run of the code of SEDD and RADD. Its raw weights are not the averaged ones."""
    for folder in (".hydra", "checkpoints-meta"):
        (run / folder).mkdir(parents=True)
    if config is not None:
        (run / ".hydra" / "config.yaml").write_text(json.dumps(config))
    average = [value for name, value in weights.items() if "inv_freq" not in name]
    state = {"model": {n: v + 1 for n, v in weights.items()}, "ema": {"decay": 0.9999, "shadow_params": average}, "step": 7}
    torch.save(state, run / "checkpoints-meta" / "checkpoint.pth")
    return run


@pytest.mark.parametrize("layout", ["hub", "run", "state", "folder of a state"])
def test_radd_predicts_mu_without_time(layout: str, tmp_path: Path) -> None:
    """log mu of the clean tokens, and norms with a bias."""
    weights = random_tensors(dit_shapes(TOKENS + 1, norm_bias=True, time=False))
    if layout == "hub":
        (tmp_path / "config.json").write_text(json.dumps(radd_config()))
        save_file(weights, tmp_path / "model.safetensors")
        place = tmp_path
    else:
        run = write_state(tmp_path / "run", radd_config(), weights)
        place = {"run": run, "state": run / "checkpoints-meta" / "checkpoint.pth"}.get(layout, run / "checkpoints-meta")
    checkpoint = m2s.load(place)
    model, head, x, time = checkpoint.model.double(), checkpoint.head, tokens(TOKENS + 1), t.double()
    expected = plain_dit(weights, x, None)
    found = model(x, time)
    torch.testing.assert_close(found[..., : TOKENS + 1], expected, rtol=0, atol=1e-10)
    masked = x == TOKENS
    log_mu = head.log_posterior(found, x, time)[masked][:, :TOKENS]
    torch.testing.assert_close(log_mu, log_softmax(expected[masked][:, :TOKENS], -1), rtol=0, atol=1e-10)
    assert repr(head) == repr(m2s.Posterior(m2s.Absorbing(TOKENS, m2s.LogLinear())))
    assert not model.config.time and checkpoint.config["extra"]["radd"]["model"]["type"] == "ddit_wot"
    assert checkpoint.sample(2, steps=2, seed=0).shape == (2, LENGTH)


def test_a_state_without_its_configuration(tmp_path: Path) -> None:
    """Neither the heads nor the noise can be found in the tensors."""
    run = write_state(tmp_path / "run", None, random_tensors(dit_shapes(TOKENS + 1)))
    with pytest.raises(FileNotFoundError, match=r"holds weights alone: SEDD writes its configuration to \.hydra/config\.yaml"):
        m2s.load(run / "checkpoints-meta" / "checkpoint.pth")


def test_a_state_of_sedd(tmp_path: Path) -> None:
    weights = random_tensors(dit_shapes(TOKENS + 1))
    config = {**radd_config(), "graph": {"type": "absorb"}}
    config["model"] |= {"type": "ddit", "scale_by_sigma": True}
    run = write_state(tmp_path / "run", config, weights)
    model, head = m2s.load(run / "checkpoints-meta" / "checkpoint.pth")
    x = tokens(TOKENS + 1)
    sigma = -torch.log1p(-(1 - 1e-3) * t.double())
    torch.testing.assert_close(
        model.double()(x, t.double())[..., : TOKENS + 1], plain_dit(weights, x, sigma), rtol=0, atol=1e-10
    )
    assert isinstance(head, m2s.LogScore) and head.scale == "sigma"


# --- BD3-LM ----------------------------------------------------------------------------------------------------------------


def bd3lm_config(**changes: Any) -> dict[str, Any]:
    """MDLM's keys, and those of blocks. The vocabulary is GPT-2's and the mask."""
    blocks = {"block_size": LENGTH, "cross_attn": True, "adaln": True, "attn_backend": "flex", "causal": False, "var_min": True}
    return {**hub_config("bd3lm", 50_258, time_conditioning=False), **blocks, **changes}


@pytest.mark.parametrize("adaptive", [True, False])
def test_one_block_of_bd3lm_is_mdlm(adaptive: bool, tmp_path: Path) -> None:
    weights = random_tensors(dit_shapes(50_258, time=adaptive))
    folder = write_hub(tmp_path, bd3lm_config(adaln=adaptive), weights)
    ends = {"sampling_eps_min": torch.tensor(1e-3), "sampling_eps_max": torch.tensor(1.0)}
    save_file({**{"backbone." + name: value for name, value in weights.items()}, **ends}, folder / "model.safetensors")
    model, head = m2s.load(folder)
    x = tokens(50_258)
    expected = plain_dit(weights, x, torch.zeros(3) if adaptive else None)
    torch.testing.assert_close(model.double()(x, t)[..., :50_258], expected, rtol=0, atol=1e-10)
    assert repr(head) == repr(m2s.Posterior(m2s.Absorbing(50_257, m2s.Linear())))


def test_blocks_of_bd3lm_are_not_loaded(tmp_path: Path) -> None:
    write_hub(tmp_path, bd3lm_config(block_size=2), random_tensors(dit_shapes(50_258)))
    with pytest.raises(
        ValueError, match="block_size is 2, but it must be the length, 10: a network that generates block after"
    ):
        m2s.load(tmp_path)
    write_hub(tmp_path, bd3lm_config(block_size=2, cross_attn=False), random_tensors(dit_shapes(50_258)))
    assert m2s.load(tmp_path).model.config.length == LENGTH
