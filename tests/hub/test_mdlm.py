"""Checkpoints of MDLM, UDLM and DUO, of the hub and of Lightning: the function that their authors define, and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import log_softmax

import m2s
from m2s import hub
from m2s.data.tokenizer import GPT2, HuggingFace
from plain_networks import BLOCKS, COND, HEADS, LENGTH, WIDTH, dit_shapes, plain_dit, random_tensors, save_lightning

pytestmark = pytest.mark.usefixtures("without_shape_hook")
SIZE = 50_258  # MDLM's vocabulary is recognized by its size: GPT-2's tokens and the mask
SMALL = 37  # of a uniform process
EPS = 1e-3


def hub_config(kind: str, size: int, **changes: Any) -> dict[str, Any]:
    """A config.json as the hub files of these projects hold it."""
    config = {
        "architectures": [kind.upper()],
        "auto_map": {"AutoModelForMaskedLM": f"modeling_{kind}.{kind.upper()}"},
        "model_type": kind,
        "vocab_size": size,
        "model_length": LENGTH,
        "hidden_dim": WIDTH,
        "cond_dim": COND,
        "n_blocks": BLOCKS,
        "n_heads": HEADS,
        "dropout": 0.1,
        "time_conditioning": kind != "mdlm",
        "return_dict": False,
        "torch_dtype": "float32",
    }
    return {**config, **changes}


def write_hub(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = {"backbone." + name: value for name, value in weights.items()}
    if pickled:
        torch.save(named, folder / "pytorch_model.bin")
    else:
        save_file(named, folder / "model.safetensors")
    return folder


def lightning_config(project: str, **changes: Any) -> dict[str, Any]:
    """The configuration in a Lightning checkpoint of a project."""
    model = {"name": "small", "type": "ddit", "hidden_size": WIDTH, "cond_dim": COND, "length": LENGTH, "n_blocks": BLOCKS}
    model |= {"n_heads": HEADS, "scale_by_sigma": True, "dropout": 0.1, "tie_word_embeddings": False}
    data = {"train": "openwebtext-train", "tokenizer_name_or_path": "gpt2", "streaming": False}
    config: dict[str, Any] = {"model": model, "data": data, "training": {"ema": 0.9999}, "loader": {"batch_size": "${eval:1}"}}
    if project in ("mdlm", "sedd", "udlm"):
        names = {"mdlm": "subs", "sedd": "sedd", "udlm": "d3pm"}
        config |= {"mode": "train", "backbone": "dit", "parameterization": names[project], "T": 0, "subs_masking": False}
        config |= {"time_conditioning": project != "mdlm", "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20}}
        config |= {"diffusion": "uniform" if project == "udlm" else "absorbing_state"}
    else:
        names = {"duo": ("duo", "mean", True), "duo_mdlm": ("mdlm", "subs", False), "bd3lm": ("bd3lm", "subs", False)}
        name, parameterization, conditioned = names[project]
        config["algo"] = {"name": name, "backbone": "dit", "parameterization": parameterization, "T": 0}
        config["algo"] |= {"time_conditioning": conditioned, "subs_masking": False, "causal_attention": False}
        config["noise"] = {"type": "log-linear", "eps": EPS} if project != "bd3lm" else {"type": "loglinear"}
        if project == "bd3lm":
            config["block_size"] = LENGTH
            config["algo"]["cross_attn"] = True
    return {**config, **changes}


class Case:
    """A checkpoint of one layout, with what the authors' code computes from its weights."""

    def __init__(self, kind: str, layout: str, size: int, mask: int | None, conditioned: bool, score: bool = False) -> None:
        self.kind, self.layout, self.size, self.mask, self.score = kind, layout, size, mask, score
        self.conditioned = conditioned
        self.classes: int | None = None
        self.schedule = "linear" if kind == "bd3lm" else "log-linear"

    def write(self, place: Path) -> Path:
        self.weights = random_tensors(dit_shapes(self.size, self.classes))
        if self.layout == "lightning":
            place.mkdir(parents=True, exist_ok=True)
            return save_lightning(place / "last.ckpt", lightning_config(self.kind), self.weights)
        changes: dict[str, Any] = {"time_conditioning": self.conditioned}
        if self.classes is not None:
            changes |= {"cfg": True, "cfg_num_classes": self.classes}
        return write_hub(place, hub_config(self.kind, self.size, **changes), self.weights, self.layout == "pickle")

    def sigma(self, t: Tensor) -> Tensor:
        return -torch.log1p(-(1 - (self.schedule == "log-linear") * EPS) * t.double())

    def order(self) -> Tensor:
        """Their ids of our states."""
        ids = list(range(self.size))
        return torch.tensor(ids if self.mask is None else [i for i in ids if i != self.mask] + [self.mask])

    def output(self, x: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """The last layer at our tokens x, with columns in our order."""
        noise = self.sigma(t) * self.conditioned
        order = self.order()
        return plain_dit(self.weights, order[x], noise, label)[..., order]


CASES = {
    "mdlm": Case("mdlm", "safetensors", SIZE, SIZE - 1, False),
    "mdlm with time": Case("mdlm", "pickle", SIZE, SIZE - 1, True),
    "udlm": Case("udlm", "safetensors", SMALL, None, True),
    "duo": Case("duo", "safetensors", SMALL, None, True),
    "lightning mdlm": Case("mdlm", "lightning", SIZE, SIZE - 1, False),
    "lightning sedd": Case("sedd", "lightning", SIZE, SIZE - 1, True, score=True),
    "lightning udlm": Case("udlm", "lightning", SMALL, None, True),
    "lightning duo": Case("duo", "lightning", SMALL, None, True),
    "lightning mdlm of duo": Case("duo_mdlm", "lightning", SIZE, SIZE - 1, False),
    "lightning bd3lm": Case("bd3lm", "lightning", SIZE, SIZE - 1, False),
}
t = torch.tensor([0.004, 0.3, 0.97])


def tokens(case: Case) -> Tensor:
    x = torch.randint(case.size, (len(t), LENGTH), generator=torch.Generator().manual_seed(1))
    return torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.5, case.size - 1, x)


# --- the function ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_that_of_the_authors(name: str, tmp_path: Path) -> None:
    """Substitution rules (MDLM), the leave-one-out distribution (UDLM, DUO) and the scaled score (SEDD), to 1e-10."""
    case = CASES[name]
    checkpoint = m2s.load(case.write(tmp_path))
    model, head = checkpoint.model.double(), checkpoint.head
    x, time = tokens(case), t.double()
    expected, found = case.output(x, time), model(x, time)
    torch.testing.assert_close(found[..., : case.size], expected, rtol=0, atol=1e-10)
    process = head.process
    assert (process.states, process.mask) == (case.size, None if case.mask is None else case.size - 1)
    torch.testing.assert_close(process.schedule.sigma(time), case.sigma(time), rtol=1e-12, atol=0)
    if case.score:
        wanted = expected - torch.log(torch.expm1(case.sigma(time)))[:, None, None] - torch.log(torch.tensor(case.size - 1.0))
        wanted = wanted.scatter(-1, x[..., None], 0.0)
        torch.testing.assert_close(head.log_score(found, x, time), wanted, rtol=0, atol=1e-6)
    elif case.mask is None:  # log_softmax over all tokens is the prediction at noise; the posterior adds the likelihood of x_t
        nu = head.log_network_distribution(found, x, time)
        torch.testing.assert_close(nu, log_softmax(expected, -1), rtol=0, atol=1e-10)
        alpha = torch.exp(-case.sigma(time))[:, None, None]
        joint = nu.exp() * ((1 - alpha) / case.size + alpha * torch.nn.functional.one_hot(x, case.size))
        torch.testing.assert_close(head.posterior(found, x, time), joint / joint.sum(-1, keepdim=True), rtol=0, atol=1e-10)
    else:
        masked = x == case.size - 1
        rules = torch.nn.functional.one_hot(x, case.size).double()
        rules[masked] = torch.nn.functional.pad(expected[masked][:, :-1].softmax(-1), (0, 1))
        torch.testing.assert_close(head.posterior(found, x, time), rules, rtol=0, atol=1e-10)


def test_class_labels_of_udlm(tmp_path: Path) -> None:
    """silu(time) + silu(label), and the last row of the table without a label."""
    case = Case("udlm", "safetensors", SMALL, None, True)
    case.classes = 3
    model = m2s.load(case.write(tmp_path)).model.double()
    x, time, label = tokens(case), t.double(), torch.tensor([0, 2, 3])
    torch.testing.assert_close(model(x, time, label)[..., :SMALL], case.output(x, time, label), rtol=0, atol=1e-10)
    none = torch.full((3,), 3)
    torch.testing.assert_close(model(x, time)[..., :SMALL], case.output(x, time, none), rtol=0, atol=1e-10)


def test_a_network_without_time_conditioning_ignores_the_time(tmp_path: Path) -> None:
    case = CASES["mdlm"]
    model = m2s.load(case.write(tmp_path)).model
    assert model.config.constant_time and model.config.time
    x = tokens(case)
    assert torch.equal(model(x, t), model(x, t.flip(0))) and torch.equal(model(x, t), model(x))


@pytest.mark.parametrize(("name", "mask"), [("bert-base-uncased", 103), ("text8", 4)])
def test_a_mask_inside_the_vocabulary_becomes_the_last_state(name: str, mask: int, tmp_path: Path) -> None:
    case = Case("mdlm", "lightning", 120, mask, False)
    case.weights = random_tensors(dit_shapes(120))
    config = lightning_config("mdlm")
    config["data"]["tokenizer_name_or_path"] = name
    model, head = m2s.load(save_lightning(tmp_path / "a.ckpt", config, case.weights))
    x = tokens(case)
    assert head.process.mask == 119
    torch.testing.assert_close(model.double()(x, t)[..., :120], case.output(x, t), rtol=0, atol=1e-10)


def test_raw_weights_are_used_where_there_is_no_average(tmp_path: Path) -> None:
    case = CASES["lightning duo"]
    weights = random_tensors(dit_shapes(SMALL))
    model = m2s.load(save_lightning(tmp_path / "a.ckpt", lightning_config("duo"), weights, ema=None)).model
    case.weights = {name: value + 1 for name, value in weights.items()}
    torch.testing.assert_close(model.double()(tokens(case), t)[..., :SMALL], case.output(tokens(case), t), rtol=0, atol=1e-8)


@pytest.mark.parametrize("place", ["_orig_mod.backbone.", "backbone._orig_mod."])
def test_names_of_a_compiled_network(place: str, tmp_path: Path) -> None:
    weights = random_tensors(dit_shapes(SMALL))
    plain = m2s.load(save_lightning(tmp_path / "a.ckpt", lightning_config("duo"), weights)).model
    state = {place + name: value + 1 for name, value in weights.items()}
    compiled = m2s.load(save_lightning(tmp_path / "b.ckpt", lightning_config("duo"), weights, state_dict=state)).model
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in compiled.state_dict().items())


def test_weights_in_bfloat16_become_float32(tmp_path: Path) -> None:
    case = CASES["duo"]
    write_hub(tmp_path, hub_config("duo", SMALL), {n: v.bfloat16() for n, v in random_tensors(dit_shapes(SMALL)).items()})
    model = m2s.load(tmp_path).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(
        model.norm.weight, random_tensors(dit_shapes(SMALL))["output_layer.norm_final.weight"].bfloat16().float()
    )
    assert case.size == SMALL


# --- use -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["udlm", "lightning duo", "mdlm"])
def test_samples_nelbo_audit_and_a_saved_copy(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint = m2s.load(case.write(tmp_path / "theirs"))
    assert checkpoint.data == {"kind": "text", "length": LENGTH} and not checkpoint.model.training
    x = checkpoint.sample(2, steps=3, seed=0)
    assert x.shape == (2, LENGTH) and x.min() >= 0 and x.max() < checkpoint.head.process.vocab
    nelbo = checkpoint.evaluate(x, passes=1, seed=0)
    assert nelbo.nats.isfinite().all() and (nelbo.nats > 0).all()
    checkpoint.save(tmp_path / "ours")
    again = m2s.load(tmp_path / "ours", verify=True)
    assert repr(again.head) == repr(checkpoint.head) and again.model.config == checkpoint.model.config
    assert torch.equal(again.sample(2, steps=3, seed=0), x)
    assert again.config["extra"] == checkpoint.config["extra"]


@pytest.mark.parametrize("has_merges", [False, True])
def test_gpt2_tokenizers(has_merges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DUO's vocabulary has [PAD] after GPT-2's tokens."""
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "nothing"))
    if has_merges:
        monkeypatch.setattr(GPT2, "encode", lambda self, text: [])
    duo = write_hub(tmp_path / "duo", hub_config("duo", SIZE), random_tensors(dit_shapes(SIZE)))
    assert m2s.load(duo).tokenizer == (GPT2(extra=1) if has_merges else None)
    assert m2s.load(CASES["mdlm"].write(tmp_path / "mdlm")).tokenizer == (GPT2() if has_merges else None)


def word_tokenizer(path: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


def test_a_tokenizer_file_beside_the_weights(tmp_path: Path) -> None:
    """The mask of the tokenizer is no clean token: ids after it move down by one, and decode to the same words."""
    words = ["[UNK]", "a", "[MASK]", *(f"w{i}" for i in range(34))]
    case = Case("mdlm", "safetensors", SMALL, 2, False)
    folder = case.write(tmp_path)
    with pytest.raises(ValueError, match=r"has 37 token ids and does not say which is the mask: copy the tokenizer\.json"):
        m2s.load(folder)
    word_tokenizer(folder / "tokenizer.json", words)
    checkpoint = m2s.load(folder)
    assert checkpoint.tokenizer == HuggingFace(str(folder / "tokenizer.json"), mask=2) and checkpoint.tokenizer.vocab == 36
    assert checkpoint.tokenizer.encode("a w0 w33") == [1, 2, 35]
    assert checkpoint.tokenizer.decode([1, 2, 35]) == "a w0 w33"
    torch.testing.assert_close(
        checkpoint.model.double()(tokens(case), t)[..., :SMALL], case.output(tokens(case), t), rtol=0, atol=1e-10
    )
    with pytest.raises(ValueError, match="the mask token 2"):
        checkpoint.tokenizer.encode("a [MASK]")
    checkpoint.save(tmp_path / "ours")
    assert m2s.load(tmp_path / "ours").tokenizer.encode("w33") == [35]
    word_tokenizer(folder / "tokenizer.json", words[:-2])
    with pytest.raises(ValueError, match="it is the tokenizer of another model"):
        m2s.load(folder)


# --- errors ----------------------------------------------------------------------------------------------------------------


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        contents = load_file(folder / "model.safetensors")
        change(contents)
        save_file(contents, folder / "model.safetensors")

    return damage


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(hub_config("duo", SMALL, **changes)))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (weights(lambda w: w.pop("backbone.blocks.1.mlp.2.bias")), r"blocks\.1\.mlp\.2\.bias is missing"),
    "unexpected": (weights(lambda w: w.update({"backbone.tail": torch.ones(1)})), "tail is unexpected"),
    "unexpected, without the prefix": (weights(lambda w: w.update(noise=torch.ones(1))), "noise is unexpected"),
    "shape": (
        weights(lambda w: w.update({"backbone.sigma_map.mlp.0.weight": torch.ones(COND, 128)})),
        r"sigma_map\.mlp\.0\.weight has shape \[12, 128\], expected \[12, 256\]",
    ),
    "integers": (
        weights(lambda w: w.update({"backbone.blocks.0.norm1.weight": torch.ones(WIDTH, dtype=torch.int64)})),
        r"norm1\.weight has dtype torch\.int64",
    ),
    "not finite": (
        weights(lambda w: w["backbone.blocks.0.norm1.weight"].fill_(float("nan"))),
        "NaN or infinity",
    ),
    "another vocabulary": (config(vocab_size=SMALL + 1), r"vocab_embed\.embedding has shape \[37, 16\], expected \[38, 16\]"),
    "causal": (config(causal=True), "causal is true: it is an autoregressive network"),
    "a text for a number": (config(n_heads="2"), "n_heads of DUO's configuration is '2', but it must be a whole number"),
    "another depth": (config(n_blocks=3), r"blocks\.2\.norm1\.weight is missing; .* and 2 more are missing"),
    "a network of another kind": (
        weights(lambda w: w.update({f"other.{name}": w.pop(name) for name in list(w)})),
        r"sigma_map\.mlp\.0\.weight is missing; .* more are missing; other\.\S+ is unexpected; .* more are unexpected",
    ),
    "no heads": (config(n_heads=0), "heads"),
    "absurd": (config(n_blocks=10**9), "far fewer or smaller"),
    "an absurd matrix": (config(vocab_size=10**13), "far fewer or smaller"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_errors_name_the_damage(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    write_hub(tmp_path, hub_config("duo", SMALL), random_tensors(dit_shapes(SMALL)))
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        m2s.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def changed(path: Path, **changes: Any) -> Path:
    base = lightning_config("duo")
    for key, value in changes.items():
        section, _, name = key.partition("__")
        base = {**base, section: {**base[section], name: value} if name else value}
    return save_lightning(path, base, random_tensors(dit_shapes(SMALL)))


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "autoregressive": ({"algo__parameterization": "ar"}, r"parameterization is 'ar', and only MDLM"),
    "another network": ({"algo__backbone": "dimamba"}, "backbone is 'dimamba'"),
    "another schedule": ({"noise__type": "cosine"}, r"noise\.type is 'cosine'"),
    "a token that is never predicted": ({"algo__subs_masking": True}, "subs_masking is set"),
    "a reference": ({"model__n_heads": "${other}"}, r"model\.n_heads of the checkpoint's configuration is '\$\{other\}'"),
    "blocks": ({"block_size": 2, "algo__cross_attn": True}, "block_size is 2, but it must be the length, 10"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_lightning_checkpoints(name: str, tmp_path: Path) -> None:
    changes, message = UNSUPPORTED[name]
    path = changed(tmp_path / "a.ckpt", **changes)
    with pytest.raises(ValueError, match=message) as error:
        m2s.load(path)
    assert str(path) in str(error.value)


def test_lightning_errors(tmp_path: Path) -> None:
    weights = random_tensors(dit_shapes(SMALL))
    average = [value for name, value in weights.items() if "inv_freq" not in name]
    shorter = {"decay": 0.9, "num_updates": 1, "shadow_params": average[:-1]}
    swapped = {"decay": 0.9, "num_updates": 1, "shadow_params": [average[1], average[0], *average[2:]]}
    path = tmp_path / "a.ckpt"
    for changes, message in (
        ({"ema": shorter}, r"the average \(ema\) .* is not a list of the"),
        ({"ema": swapped}, r"vocab_embed\.embedding has shape \[12, 256\], expected \[12, 16\]|has shape"),
        ({"ema": {"shadow_params": [1] * len(average)}}, "has no tensor"),
        ({"hyper_parameters": {}}, "has no hyper_parameters with a config"),
        ({"state_dict": 5}, "has no state_dict"),
        ({"state_dict": {"teacher.x": torch.ones(1)}}, "outside the network"),
    ):
        save_lightning(path, lightning_config("duo"), weights, **changes)
        with pytest.raises(ValueError, match=message):
            m2s.load(path)
    save_lightning(path, lightning_config("duo"), weights)
    save_lightning(tmp_path / "b.ckpt", lightning_config("duo"), weights)
    with pytest.raises(ValueError, match=r"2 checkpoints \(a\.ckpt, b\.ckpt, \.\.\.\): give the path of one"):
        m2s.load(tmp_path)


def test_other_configurations_are_not_recognized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hub_config("bert", SMALL)))
    with pytest.raises(ValueError, match="no layout of other projects that m2s loads"):
        m2s.load(tmp_path)
    assert hub.formats.recognize(tmp_path) is None
