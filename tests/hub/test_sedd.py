"""SEDD's checkpoints: loaded as its authors define them, saved in our format, sampled, and used to initialize training."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, silu, softmax

import m2s
from m2s import hub
from m2s.data.tokenizer import GPT2
from m2s.errors import UserError
from m2s.models import DiT, DiTConfig
from m2s.training import train
from m2s.training.build import make_objects
from m2s.training.config import resolve
from small_runs import random_rows, small

K, WIDTH, BLOCKS, HEADS, COND, LENGTH = 70, 16, 2, 2, 128, 12


def settings(graph: str = "absorb", noise: str = "loglinear", scaled: bool | None = None, tokens: int = K) -> dict[str, Any]:
    """A configuration as SEDD's hub files hold it."""
    return {
        "ngpus": 8,
        "tokens": tokens,
        "training": {"batch_size": 512, "ema": 0.9999},
        "graph": {"type": graph, "file": "data", "report_all": False},
        "noise": {"type": noise, "sigma_min": 1e-4, "sigma_max": 20},
        "model": {
            "name": "small",
            "type": "ddit",
            "hidden_size": WIDTH,
            "cond_dim": COND,
            "length": LENGTH,
            "n_blocks": BLOCKS,
            "n_heads": HEADS,
            "scale_by_sigma": graph == "absorb" if scaled is None else scaled,
            "dropout": 0.1,
        },
    }


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights by SEDD's names, in the order in which its module registers them; none is zero."""
    states, d = config["tokens"] + (config["graph"]["type"] == "absorb"), WIDTH
    shapes: dict[str, tuple[int, ...]] = {"vocab_embed.embedding": (states, d)}
    shapes |= {"sigma_map.mlp.0.weight": (COND, 256), "sigma_map.mlp.0.bias": (COND,)}
    shapes |= {"sigma_map.mlp.2.weight": (COND, COND), "sigma_map.mlp.2.bias": (COND,)}
    shapes |= {"rotary_emb.inv_freq": (d // HEADS // 2,)}
    for i in range(BLOCKS):
        block = {"norm1.weight": (d,), "attn_qkv.weight": (3 * d, d), "attn_out.weight": (d, d), "norm2.weight": (d,)}
        block |= {"mlp.0.weight": (4 * d, d), "mlp.0.bias": (4 * d,), "mlp.2.weight": (d, 4 * d), "mlp.2.bias": (d,)}
        block |= {"adaLN_modulation.weight": (6 * d, COND), "adaLN_modulation.bias": (6 * d,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    shapes |= {"output_layer.norm_final.weight": (d,), "output_layer.linear.weight": (states, d)}
    shapes |= {"output_layer.linear.bias": (states,), "output_layer.adaLN_modulation.weight": (2 * d, COND)}
    shapes |= {"output_layer.adaLN_modulation.bias": (2 * d,)}
    generator = torch.Generator().manual_seed(seed)
    weights = {name: ("norm" in name) + 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["rotary_emb.inv_freq"] = 10_000.0 ** (-torch.arange(0, d // HEADS, 2) / (d // HEADS))
    return weights


def published(weights: dict[str, Tensor], config: dict[str, Any], x: Tensor, sigma: Tensor) -> Tensor:
    """log s by the equations of SEDD's network (Lou et al. 2023, appendix; Peebles & Xie 2023; Su et al. 2021), in float64."""
    w = {name: value.double() for name, value in weights.items()}

    def linear(value: Tensor, name: str) -> Tensor:
        return value @ w[name + ".weight"].T + w.get(name + ".bias", torch.zeros(()))

    def norm(value: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        centered = value - value.mean(-1, keepdim=True)
        normal = centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + 1e-5) * w[name + ".weight"]
        return normal * (1 + scale) + shift

    def turned(value: Tensor) -> Tensor:
        """[B, H, L, E]: the pair (i, i + E/2) at position p turned by p 10000^{-2i/E}."""
        half = value.shape[-1] // 2
        angle = torch.arange(value.shape[-2]).double()[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
        a, b = value[..., :half], value[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    angle = sigma.double()[:, None] * 10_000.0 ** (-torch.arange(128).double() / 128)
    c = torch.cat([angle.cos(), angle.sin()], -1)
    c = silu(linear(silu(linear(c, "sigma_map.mlp.0")), "sigma_map.mlp.2"))
    h = w["vocab_embed.embedding"][x]
    for i in range(config["model"]["n_blocks"]):
        block = f"blocks.{i}."
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(c, block + "adaLN_modulation")[:, None].chunk(6, -1)
        qkv = linear(norm(h, block + "norm1", shift1, scale1), block + "attn_qkv")
        q, k, v = (part.unflatten(-1, (config["model"]["n_heads"], -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        seen = softmax(turned(q) @ turned(k).transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v
        h = h + gate1 * linear(seen.transpose(1, 2).flatten(-2), block + "attn_out")
        inner = gelu(linear(norm(h, block + "norm2", shift2, scale2), block + "mlp.0"), approximate="tanh")
        h = h + gate2 * linear(inner, block + "mlp.2")
    shift, scale = linear(c, "output_layer.adaLN_modulation")[:, None].chunk(2, -1)
    out = linear(norm(h, "output_layer.norm_final", shift, scale), "output_layer.linear")
    if config["model"]["scale_by_sigma"]:
        out = out - torch.log(torch.exp(sigma.double()) - 1)[:, None, None] - math.log(out.shape[-1] - 1)
    return out.scatter(-1, x[..., None], 0.0)


def total_noise(config: dict[str, Any], t: Tensor) -> Tensor:
    """sigma(t) as SEDD defines it, in float64."""
    if config["noise"]["type"] == "loglinear":
        return -torch.log(1 - (1 - 1e-3) * t.double())
    low, high = config["noise"]["sigma_min"], config["noise"]["sigma_max"]
    return low ** (1 - t.double()) * high ** t.double()


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], layout: str = "safetensors") -> Path:
    """A folder of the hub's form, in either format, or of a training run whose raw weights are not the averaged ones."""
    folder.mkdir(parents=True, exist_ok=True)
    if layout != "run":
        (folder / "config.json").write_text(json.dumps(config))
    if layout == "safetensors":
        save_file(weights, folder / "model.safetensors")
    elif layout == "pickle":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        (folder / ".hydra").mkdir()
        (folder / "checkpoints-meta").mkdir()
        (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        average = [value for name, value in weights.items() if name != "rotary_emb.inv_freq"]
        state = {
            "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
            "model": {name: value + 1 for name, value in weights.items()},
            "ema": {"decay": 0.9999, "num_updates": 7, "shadow_params": average},
            "step": 7,
        }
        torch.save(state, folder / "checkpoints-meta" / "checkpoint.pth")
    return folder


CASES = {
    "absorb, log-linear, scaled": settings(),
    "absorb, log-linear, not scaled": settings(scaled=False),
    "absorb, geometric, scaled": settings("absorb", "geometric"),
    "uniform, geometric": settings("uniform", "geometric"),
    "uniform, log-linear": settings("uniform", "loglinear"),
}
t = torch.linspace(0.001, 0.999, 9)


def noisy(config: dict[str, Any]) -> Tensor:
    states = config["tokens"] + (config["graph"]["type"] == "absorb")
    x = torch.randint(states, (len(t), LENGTH), generator=torch.Generator().manual_seed(1))
    return torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.5, states - 1, x)


# --- reading ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["safetensors", "pickle", "run"])
@pytest.mark.parametrize("name", CASES)
def test_the_log_score_is_the_published_one(name: str, layout: str, tmp_path: Path) -> None:
    config = CASES[name]
    weights, x = random_weights(config), noisy(config)
    model, head = m2s.load(write(tmp_path / "sedd", config, weights, layout))
    expected = published(weights, config, x, total_noise(config, t))
    log_score = head.log_score(model(x, t), x, t)
    assert log_score.shape == expected.shape
    torch.testing.assert_close(log_score.double(), expected, rtol=1e-5, atol=1e-5)
    log_score = head.log_score(model.double()(x, t.double()), x, t.double())
    torch.testing.assert_close(log_score, expected, rtol=0, atol=1e-5)  # the angles are float32


@pytest.mark.parametrize("name", CASES)
def test_process_schedule_and_data_follow_the_configuration(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    checkpoint = m2s.load(write(tmp_path, config, random_weights(config)))
    process = checkpoint.head.process
    assert isinstance(checkpoint.head, m2s.LogScore)
    assert isinstance(process, m2s.Absorbing if config["graph"]["type"] == "absorb" else m2s.Uniform)
    assert (process.vocab, process.mask) == (K, K if config["graph"]["type"] == "absorb" else None)
    assert process.schedule == checkpoint.model.config.clock
    torch.testing.assert_close(process.schedule.sigma(t.double()), total_noise(config, t))
    assert checkpoint.data == {"kind": "text", "length": LENGTH}
    assert checkpoint.tokenizer is None
    assert checkpoint.config["extra"]["sedd"] == config
    assert not checkpoint.model.training


def test_vocabulary_is_padded_with_zeros(tmp_path: Path) -> None:
    weights = random_weights(settings())
    model = m2s.load(write(tmp_path, settings(), weights)).model
    assert model.config.rows == 128
    for ours, theirs in (("embedding.weight", "vocab_embed.embedding"), ("head.weight", "output_layer.linear.weight")):
        tensor = model.state_dict()[ours]
        assert torch.equal(tensor[: K + 1], weights[theirs])
        assert not tensor[K + 1 :].any()
    given = sum(value.numel() for name, value in weights.items() if "inv_freq" not in name)
    padding = (model.config.rows - K - 1) * (2 * WIDTH + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == given + padding


@pytest.mark.parametrize("found", [False, True], ids=["without its merges", "with its merges"])
def test_gpt2_tokenizer_is_loaded_where_its_merges_exist(found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "nothing"))
    if found:
        monkeypatch.setattr(GPT2, "encode", lambda self, text: [])
    config = settings(tokens=50_257)
    checkpoint = m2s.load(write(tmp_path / "sedd", config, random_weights(config)))
    assert checkpoint.tokenizer == (GPT2() if found else None)
    assert checkpoint.head.process.states == 50_258


# --- using -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_saving_in_our_format_preserves_it(name: str, tmp_path: Path) -> None:
    first = m2s.load(write(tmp_path / "sedd", CASES[name], random_weights(CASES[name])))
    hub.save(tmp_path / "ours", first.model, first.head, first.data, first.tokenizer, first.config["extra"])
    again = m2s.load(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert again.config == written and {name: value for name, value in written.items() if name != "sha256"} == first.config
    assert again.model.config == first.model.config
    assert repr(again.head) == repr(first.head)
    x = noisy(CASES[name])
    assert torch.equal(again.model(x, t), first.model(x, t))


@pytest.mark.parametrize("name", CASES)
def test_sampling_elbo_and_classification(name: str, tmp_path: Path) -> None:
    model, head = m2s.load(write(tmp_path, CASES[name], random_weights(CASES[name])))
    tokens, log = m2s.sample(model, head, (2, LENGTH), steps=4, sampler="analytic", grid="linear", diagnostics=True, seed=0)
    assert tokens.shape == (2, LENGTH) and tokens.min() >= 0 and tokens.max() < K
    assert log is not None
    bound = m2s.elbo(model, head, tokens, passes=2)
    assert bound.nats.isfinite().all() and (bound.nats > 0).all()
    projected = m2s.sample(model, m2s.Projected(head), (2, LENGTH), steps=3, seed=0)
    assert projected.max() < K
    x = noisy(CASES[name])
    assert m2s.classify(head.log_score(model(x, t), x, t).exp(), x, t, head.process).shape == x.shape


def test_scale_sigma_removes_the_noise_level_from_a_masked_score() -> None:
    """Under a mask the true score is mu_y / expm1(sigma), so an output of log(K mu_y) is right at every time."""
    schedule = m2s.LogLinear()
    model = DiT(DiTConfig(K + 1, width=WIDTH, depth=1, heads=HEADS, clock=schedule)).double()
    mu = torch.softmax(torch.randn(K, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 0)
    with torch.no_grad():
        model.head.bias[:K] = torch.log(K * mu)
    x, times = torch.full((len(t), 3), K), t.double()
    head = m2s.LogScore(m2s.Absorbing(K, schedule), scale="sigma")
    score = head.log_score(model(x, times), x, times).exp()[..., :K]
    torch.testing.assert_close(score, (mu / torch.expm1(schedule.sigma(times))[:, None, None]).expand_as(score))
    posterior = head.posterior(model(x, times), x, times)[..., :K]
    torch.testing.assert_close(posterior, mu.expand_as(posterior))


def test_loss_of_a_scaled_score_is_that_of_the_score() -> None:
    """The loss and its gradient, in float64 and in float32."""
    process = m2s.Absorbing(K, m2s.Linear())
    plain, scaled = m2s.LogScore(process), m2s.LogScore(process, scale="sigma")
    x_t, x_0 = noisy(settings()), noisy(settings()).clamp(max=K - 1)
    output = torch.randn(*x_t.shape, K + 1, generator=torch.Generator().manual_seed(1))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        given = output.to(dtype).requires_grad_()
        loss = m2s.score_entropy(scaled, given, x_0, x_t, t)
        truth = m2s.score_entropy(plain, scaled.log_score(output.double(), x_t, t), x_0, x_t, t.double())
        torch.testing.assert_close(loss.double(), truth, rtol=tolerance, atol=tolerance)
        wanted = output.double().requires_grad_()
        (slope,) = torch.autograd.grad(
            m2s.score_entropy(plain, scaled.log_score(wanted, x_t, t), x_0, x_t, t.double()).sum(), wanted
        )
        (found,) = torch.autograd.grad(loss.sum(), given)
        torch.testing.assert_close(found.double(), slope, rtol=tolerance, atol=tolerance)


# --- training --------------------------------------------------------------------------------------------------------------

source = random_rows(length=LENGTH, vocab=K)
SAME = {"network__width": WIDTH, "network__depth": BLOCKS, "network__heads": HEADS}


def started(out: Path, init: Path, **changes: object) -> tuple[DiT, m2s.Head]:
    """The network of a run and its head, after one training step with a negligible learning rate."""
    train(small(out, init=str(init), steps=1, optimizer__lr=1e-12, **{**SAME, **changes}), source)
    model, head = m2s.load(out)
    return model, head


def test_a_posterior_is_initialized_with_weights_and_clock(tmp_path: Path) -> None:
    given = m2s.load(write(tmp_path / "sedd", settings(), random_weights(settings()))).model
    model, head = started(tmp_path / "run", tmp_path / "sedd", method="md4")
    assert isinstance(head, m2s.Posterior)
    for name, value in given.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    assert model.config.clock == head.process.schedule == m2s.Linear()
    x = noisy(settings())
    sigma = -torch.log1p(-t.double())  # the noise of the run, not of the schedule of SEDD's training
    ours = torch.log_softmax(model(x, t)[..., :K].double(), -1)
    theirs = torch.log_softmax(published(random_weights(settings()), settings(), x, sigma)[..., :K], -1)
    masked = x == K
    torch.testing.assert_close(ours[masked], theirs[masked], rtol=1e-4, atol=1e-4)


def test_a_score_is_initialized_with_clock_and_scale(tmp_path: Path) -> None:
    weights, x = random_weights(settings()), noisy(settings())
    write(tmp_path / "sedd", settings(), weights)
    model, head = started(tmp_path / "run", tmp_path / "sedd", method="sedd-absorb")
    expected = published(weights, settings(), x, total_noise(settings(), t))
    torch.testing.assert_close(head.log_score(model(x, t), x, t).double(), expected, rtol=1e-4, atol=1e-4)
    again, same = started(tmp_path / "again", tmp_path / "run", method="sedd-absorb")
    assert again.config.clock == m2s.LogLinear() and head.scale == same.scale == "sigma"
    plain, _ = started(tmp_path / "time", tmp_path / "sedd", method="md4", network__clock="time")
    assert plain.config.clock is None


def test_training_from_scratch_with_clock_and_scale(tmp_path: Path) -> None:
    train(small(tmp_path, steps=2, method="sedd-absorb", network__clock="sigma", **SAME), source)
    model, head = m2s.load(tmp_path)
    assert model.config.clock == head.process.schedule == m2s.LogLinear()
    assert head.scale == "sigma"


INVALID_INITIALISATIONS: dict[str, tuple[dict[str, object], str]] = {
    "no mask": ({}, r"is for 71 states, but data and process here have 70: the vocabulary and the mask"),
    "another width": ({"method": "md4", "network__width": 32}, r"holds another network: \S+ is \(.*\) there and \(.*\) here"),
    "another depth": ({"method": "md4", "network__depth": 1}, r"holds another network: blocks\.1\.\S+ is .* missing here"),
    "other heads": ({"method": "md4", "network__heads": 4}, "holds another network: heads is 2 there and 4 here"),
    "no time": ({"method": "md4", "network__time": "no"}, r"holds another network: \S+ is .* missing here"),
    "a process without sigma": (
        {"method": "gidd"},
        r"clock is 'sigma', but Hybrid.* has no schedule: give --network.clock time",
    ),
    "another scale": ({"method": "sedd-absorb", "head__scale": "none"}, r"have sigma: give --head\.scale sigma"),
}


@pytest.mark.parametrize("name", INVALID_INITIALISATIONS)
def test_invalid_initializations_raise_before_anything_is_written(name: str, tmp_path: Path) -> None:
    changes, message = INVALID_INITIALISATIONS[name]
    write(tmp_path / "sedd", settings(), random_weights(settings()))
    with pytest.raises(UserError, match=message):
        started(tmp_path / "run", tmp_path / "sedd", **changes)
    assert not (tmp_path / "run").exists()


INVALID_OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "scale without a mask": (
        {"method": "sedd", "head__scale": "sigma"},
        r"is for m2s\.Absorbing \(--process\.kind absorbing\), not .*Uniform",
    ),
    "scale of a posterior": ({"method": "md4", "head__scale": "sigma"}, r"for head\.kind log-score, not posterior"),
    "clock of a U-Net": ({"network__clock": "sigma", "network__kind": "unet"}, r"it is for network\.kind dit, not unet"),
    "clock without time": ({"network__clock": "sigma", "network__time": "no"}, "clock is Linear.* but time is False"),
}


@pytest.mark.parametrize("name", INVALID_OPTIONS)
def test_contradictory_options_raise(name: str, tmp_path: Path) -> None:
    changes, message = INVALID_OPTIONS[name]
    options = {"network__width": None, "network__depth": None, "network__heads": None} if "U-Net" in name else {}
    config = small(tmp_path / "run", **{**options, **changes})
    with pytest.raises(UserError, match=message):
        make_objects(resolve(config), source)


# --- errors ----------------------------------------------------------------------------------------------------------------


class Malicious:
    """Writes a file when it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.path, "w")


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        contents = settings()
        change(contents)
        (folder / "config.json").write_text(json.dumps(contents))

    return damage


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        contents = load_file(folder / "model.safetensors")
        change(contents)
        save_file(contents, folder / "model.safetensors")

    return damage


def pickled(contents: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(contents, folder / "pytorch_model.bin")

    return damage


def trained(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            (folder / name).unlink()
        write(folder, settings(), random_weights(settings()), "run")
        path = folder / "checkpoints-meta" / "checkpoint.pth"
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "another graph": (config(lambda c: c["graph"].update(type="star")), ValueError, r"graph\.type is 'star', .*uniform or abs"),
    "another noise": (config(lambda c: c["noise"].update(type="cosine")), ValueError, r"noise\.type is 'cosine', .*loglinear"),
    "nothing about the width": (config(lambda c: c["model"].pop("hidden_size")), ValueError, r"has no model\.hidden_size"),
    "a section that is none": (config(lambda c: c.update(model="small")), ValueError, r"has no model\.scale_by_sigma"),
    "a scale without a mask": (config(lambda c: c["graph"].update(type="uniform")), ValueError, "uniform: SEDD defines it for"),
    "another depth": (
        config(lambda c: c["model"].update(n_blocks=3)),
        ValueError,
        r"blocks\.2\.norm1\.weight is missing; .* more",
    ),
    "another vocabulary": (
        config(lambda c: c.update(tokens=K + 1)),
        ValueError,
        r"vocab_embed\.embedding has shape \[71, 16\], expected \[72, 16\]",
    ),
    "missing tensor": (weights(lambda w: w.pop("sigma_map.mlp.2.bias")), ValueError, r"sigma_map\.mlp\.2\.bias is missing"),
    "unexpected tensor": (weights(lambda w: w.update(tail=torch.ones(1))), ValueError, "tail is unexpected"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "none of model.safetensors, pytorch_model"),
    "weights cut short": (lambda f: (f / "model.safetensors").write_bytes(b"1234"), ValueError, "damaged or cut short"),
    "a pickle that is none": (
        lambda f: [(f / "model.safetensors").unlink(), (f / "pytorch_model.bin").write_bytes(b"1234")],
        ValueError,
        r"pytorch_model\.bin is damaged, or holds",
    ),
    "no average": (trained(lambda s: s.pop("ema")), ValueError, r"checkpoint\.pth is not a state of SEDD's training.*'ema'"),
    "half an average": (trained(lambda s: s["ema"]["shadow_params"].pop()), ValueError, "is not a state of SEDD's training"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_errors_name_the_damage(name: str, tmp_path: Path) -> None:
    damage, kind, message = DAMAGE[name]
    write(tmp_path, settings(), random_weights(settings()))
    damage(tmp_path)
    with pytest.raises(kind, match=message) as error:
        m2s.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_loading_a_pickle_runs_no_code(tmp_path: Path) -> None:
    write(tmp_path, settings(), random_weights(settings()))
    pickled({"vocab_embed.embedding": Malicious(tmp_path / "written")})(tmp_path)
    with pytest.raises(ValueError, match="holds objects other than tensors, which are not read"):
        m2s.load(tmp_path)
    assert not (tmp_path / "written").exists()


def test_pushing_a_sedd_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='does not say its "format": it was not written by m2s'):
        hub.push(write(tmp_path, settings(), random_weights(settings())), "someone/model")


def test_a_clock_must_be_a_schedule() -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # users run without the shape checks of the tests
    try:
        with pytest.raises(TypeError, match=r"clock must be None or a schedule such as m2s\.LogLinear\(\), not 'sigma'"):
            DiTConfig(K, clock="sigma")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
