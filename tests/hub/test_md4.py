"""Checkpoints of MD4's transformer: a plain float64 implementation with its names, arrays of orbax, and errors."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

import m2s
from m2s.hub.formats import md4
from m2s.models.md4 import MD4Transformer, MD4TransformerConfig

pytestmark = pytest.mark.usefixtures("without_shape_hook")
VOCAB, FEATURES, HEADS, BLOCKS, HIDDEN, LENGTH = 11, 8, 2, 2, 12, 6
WIDTH = FEATURES * HEADS
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "swiglu": silu,
    "geglu": lambda x: gelu(x, approximate="tanh"),
}
t = torch.tensor([0.01, 0.4, 0.95])


def arrays() -> dict[str, Tensor]:
    """Random arrays by MD4's names, kernels [in, out]."""
    top, block = "Transformer_0.", "Transformer_0.TransformerBlock_{}."
    shapes: dict[str, tuple[int, ...]] = {"CondEmbedding_0.dense0.kernel": (FEATURES, 4 * FEATURES)}
    shapes |= {"CondEmbedding_0.dense0.bias": (4 * FEATURES,), "CondEmbedding_0.Dense_0.kernel": (4 * FEATURES, FEATURES)}
    shapes |= {"CondEmbedding_0.Dense_0.bias": (FEATURES,), top + "Embed_0.embedding": (VOCAB + 1, WIDTH)}
    shapes |= {top + "Dense_0.kernel": (FEATURES, 2 * WIDTH), top + "Dense_0.bias": (2 * WIDTH,)}
    shapes |= {top + "Dense_1.kernel": (WIDTH, VOCAB)}
    for i in range(BLOCKS):
        shapes |= {block.format(i) + f"attention.{name}.kernel": (WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")}
        shapes |= {block.format(i) + f"feed_forward.{name}.kernel": (WIDTH, HIDDEN) for name in ("w1", "w3")}
        shapes |= {block.format(i) + "feed_forward.w2.kernel": (HIDDEN, WIDTH)}
        shapes |= {block.format(i) + "Dense_0.kernel": (FEATURES, 6 * WIDTH), block.format(i) + "Dense_0.bias": (6 * WIDTH,)}
    generator = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def plain(given: dict[str, Tensor], x: Tensor, t: Tensor, gate: str) -> Tensor:
    """MD4's logits of the clean tokens, [B, L, K]: LLaMA's blocks with adaLN, in float64."""
    w, act = {name: value.double() for name, value in given.items()}, GATES[gate]

    def dense(value: Tensor, name: str) -> Tensor:
        return value @ w[name + ".kernel"] + w.get(name + ".bias", torch.zeros(()))

    def norm(value: Tensor) -> Tensor:
        centered = value - value.mean(-1, keepdim=True)
        return centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + 1e-5)

    half = FEATURES // 2
    angle = 1000 * t.double()[:, None] * torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half).double())
    c = torch.cat([angle.sin(), angle.cos()], -1)
    c = act(dense(silu(dense(c, "CondEmbedding_0.dense0")), "CondEmbedding_0.Dense_0"))
    size = WIDTH // HEADS
    phase = torch.arange(x.shape[1]).double()[:, None] * 10_000.0 ** (-torch.arange(0, size, 2).double() / size)
    turn = torch.polar(torch.ones_like(phase), phase)  # pairs of neighbors are complex numbers

    def heads(value: Tensor, turned: bool) -> Tensor:
        value = value.unflatten(-1, (HEADS, size)).transpose(1, 2)
        if not turned:
            return value
        return torch.view_as_real(torch.view_as_complex(value.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

    h = w["Transformer_0.Embed_0.embedding"][x]
    for i in range(BLOCKS):
        block = f"Transformer_0.TransformerBlock_{i}."
        a, b, g, d, e, f = dense(c, block + "Dense_0")[:, None].chunk(6, -1)
        y = norm(h) * (b + 1) + a
        q, k, v = (heads(dense(y, f"{block}attention.w{n}"), n != "v") for n in "qkv")
        seen = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(size), -1) @ v
        h = h + g * dense(seen.transpose(1, 2).flatten(-2), block + "attention.wo")
        y = norm(h) * (e + 1) + d
        inner = act(dense(y, block + "feed_forward.w1")) * dense(y, block + "feed_forward.w3")
        h = h + f * dense(inner, block + "feed_forward.w2")
    shift, scale = dense(c, "Transformer_0.Dense_0")[:, None].chunk(2, -1)
    return dense(norm(h) * (scale + 1) + shift, "Transformer_0.Dense_1")


def config(**changes: Any) -> dict[str, Any]:
    settings = {"task_type": "text", "model_type": "md4", "noise_schedule": "linear", "feature_dim": FEATURES, "classes": -1}
    settings |= {"num_heads": HEADS, "n_layers": BLOCKS, "mlp_type": "glu", "cond_type": "adaln_zero", "time_features": "t"}
    return {**settings, "vocab_size": VOCAB, "data_shape": [LENGTH], "outside_embed": False, **changes}


def write(folder: Path, **changes: Any) -> Path:
    """The work folder of a training, whose last step is 20."""
    for step in ("5", "20"):
        (folder / "checkpoints" / step / "train_state").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    return folder


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The arrays of a checkpoint, in the place of what orbax stores."""
    found = arrays()

    def read(item: Path, prefix: str) -> dict[str, Tensor]:
        assert item.parts[-3:] == ("checkpoints", "20", "train_state")
        return found if prefix == "ema_params.classifier." else {}

    monkeypatch.setattr(md4, "read_orbax", read)
    return found


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("noise", ["linear", "cosine"])
def test_the_prediction_is_that_of_md4(gate: str, noise: str, given: dict[str, Tensor], tmp_path: Path) -> None:
    model, head = m2s.load(write(tmp_path, mlp_type=gate, noise_schedule=noise))
    x = torch.randint(VOCAB + 1, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    found, expected = model.double()(x, t.double()), plain(given, x, t, gate)
    torch.testing.assert_close(found[..., :VOCAB], expected, rtol=0, atol=1e-10)
    alpha = 1 - t.double() if noise == "linear" else 1 - torch.cos(math.pi / 2 * (1 - t.double()))
    torch.testing.assert_close(head.process.schedule.alpha(t.double()), (1 - 2e-4) * alpha + 1e-4)
    masked = x == VOCAB
    mu = head.posterior(found, x, t.double())[masked]
    torch.testing.assert_close(mu[:, :VOCAB], expected[masked].softmax(-1), rtol=0, atol=1e-10)


def test_samples_and_a_saved_copy(given: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint = m2s.load(write(tmp_path / "theirs"))
    x = checkpoint.sample(2, steps=3, seed=0)
    assert x.shape == (2, LENGTH) and x.max() < VOCAB and checkpoint.evaluate(x, seed=0).nats.isfinite().all()
    checkpoint.save(tmp_path / "ours")
    again = m2s.load(tmp_path / "ours")
    assert torch.equal(again.sample(2, steps=3, seed=0), x) and again.model.config == checkpoint.model.config
    assert sum(p.numel() for p in again.model.parameters()) == sum(value.numel() for value in given.values())


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda w: w.pop("Transformer_0.Dense_0.bias"), r"Transformer_0\.Dense_0\.bias is missing"),
    "unexpected": (lambda w: w.update(tail=torch.ones(1)), "tail is unexpected"),
    "shape": (
        lambda w: w.update({"Transformer_0.TransformerBlock_1.attention.wk.kernel": torch.ones(WIDTH, 3)}),
        r"wk\.kernel has shape \[16, 3\], expected \[16, 16\]",
    ),
    "no matrix": (lambda w: w.pop("Transformer_0.TransformerBlock_0.feed_forward.w1.kernel"), "has no matrix"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_arrays(name: str, given: dict[str, Tensor], tmp_path: Path) -> None:
    change, message = CHANGES[name]
    change(given)
    with pytest.raises(ValueError, match=message):
        m2s.load(write(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_shape": [32, 32, 3]}, "the U-Net for images is not loaded"),
        ({"time_features": "none"}, "time_features is 'none', but it must be t"),
        ({"noise_schedule": "poly2"}, "noise_schedule is 'poly2'"),
        ({"mlp_type": "mlp"}, "mlp_type is 'mlp'"),
    ],
)
def test_other_configurations(changes: dict[str, Any], message: str, given: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        m2s.load(write(tmp_path, **changes))


def test_the_published_size() -> None:
    """On the meta device, as MD4's own module has it (`scripts/compare_release.py`)."""
    releases = json.loads((Path(__file__).parents[2] / "experiments" / "results" / "releases.json").read_text())
    with torch.device("meta"):
        model = MD4Transformer(MD4TransformerConfig(50_258, length=1024))
    assert sum(parameter.numel() for parameter in model.parameters()) == releases["md4"]["parameters"]


def test_a_folder_without_steps(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with pytest.raises(FileNotFoundError, match="holds no step with train_state"):
        m2s.load(tmp_path)


def test_arrays_of_orbax_are_read_without_jax(tmp_path: Path) -> None:
    """Arrays of zarr in a key-value store, as orbax writes them: averaged ones are read, and damage is an error."""
    tensorstore = pytest.importorskip("tensorstore")
    item = write(tmp_path) / "checkpoints" / "20" / "train_state"

    def put(name: str, values: Any) -> None:
        files = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}, "path": f"{name}/"}
        metadata = {"shape": list(values.shape), "chunks": list(values.shape), "dtype": values.dtype.str}
        array = tensorstore.open({"driver": "zarr", "kvstore": files, "metadata": metadata}, create=True).result()
        array.write(values).result()

    for name, value in arrays().items():
        put(f"ema_params.classifier.{name}", value.numpy())
        put(f"params.classifier.{name}", value.numpy() + 1)
    x = torch.randint(VOCAB + 1, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    model = m2s.load(tmp_path).model.double()
    torch.testing.assert_close(model(x, t.double())[..., :VOCAB], plain(arrays(), x, t, "glu"), rtol=0, atol=1e-10)
    put("ema_params.classifier.tail", np.arange(3))
    with pytest.raises(ValueError, match=r"tail has dtype int64, expected floating-point"):
        m2s.load(tmp_path)
    (item / "manifest.ocdbt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is damaged, or no orbax checkpoint"):
        m2s.load(tmp_path)


def test_tensorstore_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=r"needs tensorstore \(JAX is not needed\): pip install tensorstore"):
        m2s.load(write(tmp_path))
