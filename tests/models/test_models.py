"""Networks: parameter counts, inputs, outputs and errors. The common tests run for every network."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import jaxtyping
import pytest
import torch
from fork_server import run_script
from torch import Tensor, nn

import m2s
from exact_steps import unchecked
from m2s.models import DiT, DiTConfig, UNet, UNetConfig, build, describe
from m2s.models.condition import sinusoids
from m2s.models.rotary import angles
from m2s.models.unet import GroupNormFloat32
from m2s.ops import use_backend
from m2s.ops.rotary.naive import rotate

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # emitted when oneDNN is disabled

K, L, B = 13, 16, 4
DIT = DiTConfig(K, width=32, depth=2, heads=2, condition_width=16)
UNET = UNetConfig(K, (4, 4), width=8, multipliers=(1, 2), layers=1)
CONFIGS: dict[str, DiTConfig | UNetConfig] = {
    "dit": DIT,
    "dit, time-free": replace(DIT, time=False),
    "dit, causal": replace(DIT, time=False, causal=True),
    "dit, clock of sigma": replace(DIT, clock=m2s.LogLinear()),
    "dit, classes": replace(DIT, classes=3),
    "dit, time-free, classes": replace(DIT, time=False, classes=3),
    "dit, classes after SiLU": replace(DIT, classes=3, label_after_silu=True),
    "dit, time-free, classes after SiLU": replace(DIT, time=False, classes=3, label_after_silu=True),
    "dit, norm biases": replace(DIT, norm_bias=True),
    "dit, time-free, norm biases": replace(DIT, time=False, norm_bias=True),
    "dit, normalized queries and keys": replace(DIT, qk_norm=True),
    "dit, causal, normalized queries and keys": replace(DIT, time=False, causal=True, qk_norm=True),
    "dit, gates of one": replace(DIT, gates="one", embedding_std=1.0),
    "unet": UNET,
    "unet, mask": replace(UNET, mask=True),
    "unet, levels": replace(UNET, input="level"),
    "unet, levels, mask": replace(UNET, input="level", mask=True),
    "unet, colors": replace(UNET, shape=(2, 4, 2)),
    "unet, classes": replace(UNET, classes=3),
    "unet, time-free": replace(UNET, time=False),
    "unet, one resolution": replace(UNET, multipliers=(1,), rows=K + 5, columns=K + 2),
    "unet, MD4's groups and sinusoids": replace(UNET, groups=8, sinusoids="sin-first", classes=3),
}


def make(config: DiTConfig | UNetConfig) -> DiT | UNet:
    """A network without zero weights, so that the output depends on every input it can depend on."""
    model = DiT(config) if isinstance(config, DiTConfig) else UNet(config)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> DiT | UNet:
    return make(CONFIGS[request.param])


x = torch.randint(K, (B, L), generator=torch.Generator().manual_seed(1))
t, label = torch.linspace(0.1, 0.9, B), torch.arange(B) % 3


@contextlib.contextmanager
def bfloat16() -> Iterator[None]:
    # Without oneDNN: its bfloat16 matrix products crash on machines that report AMX but do not permit it.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        yield


def count(config: DiTConfig | UNetConfig) -> int:
    with torch.device("meta"):
        model = DiT(config) if isinstance(config, DiTConfig) else UNet(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (DiTConfig.preset("small", 50_257), 169_697_920),
        (DiTConfig.preset("small", 50_258), 169_697_920),
        (DiTConfig.preset("medium", 50_258), 424_571_264),
        (UNetConfig.preset("md4", 256, (32, 32, 3)), 28_427_520),
        (UNetConfig.preset("md4", 257, (32, 32, 3), mask=True), 28_427_520),
    ],
    ids=["DiT small", "DiT small with a mask", "DiT medium", "MD4's U-Net", "MD4's U-Net with a mask"],
)
def test_parameter_counts(config: DiTConfig | UNetConfig, parameters: int) -> None:
    assert count(config) == parameters


# --- every network ---------------------------------------------------------------------------------------------------------


def test_output_covers_every_state_in_float32(model: DiT | UNet) -> None:
    output = model(x, t)
    assert output.shape[:2] == (B, L)
    assert output.shape[2] >= K
    assert output.dtype == torch.float32


def test_logits_are_float32_under_autocast(model: DiT | UNet) -> None:
    with bfloat16():
        output = model(x, t)
    assert output.dtype == torch.float32
    assert (output != output.bfloat16().float()).any(), "the last layer ran in bfloat16"
    assert (output - model(x, t))[..., :K].abs().max() < 0.1 * model(x, t).abs().max()


def test_examples_do_not_depend_on_each_other(model: DiT | UNet) -> None:
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(x[order], t[order]), model(x, t)[order])


def test_tokens_may_have_small_integer_dtypes(model: DiT | UNet) -> None:
    for dtype in (torch.int16, torch.int32):
        assert torch.equal(model(x.to(dtype), t), model(x, t))


def test_description_builds_the_same_network(model: DiT | UNet) -> None:
    again = build(describe(model))
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x, t), model(x, t))


def test_every_parameter_has_a_gradient(model: DiT | UNet) -> None:
    model(x, t)[..., : K - 1].square().sum().backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not idle


def test_output_is_zero_at_initialization(model: DiT | UNet) -> None:
    assert not build(describe(model))(x, t).any()


def test_output_depends_on_time_only_if_configured(model: DiT | UNet) -> None:
    assert torch.equal(model(x, t), model(x, 1 - t)) != model.config.time
    if not model.config.time:
        assert torch.equal(model(x, t), model(x))
        assert not any("time" in name for name, _ in model.named_parameters())


COMPILED = """
import torch
from m2s import LogLinear
from m2s.models import build

x, t, label = torch.randint(13, (4, 16)), torch.rand(4), torch.arange(4) % 3
small = {"states": 13, "width": 32, "classes": 3}
dit = {"kind": "dit", "depth": 2, "heads": 2, **small}
scaled = {**dit, "clock": LogLinear()}
for config in (dit, scaled, {"kind": "unet", "shape": (4, 4), "layers": 1, **small}):
    model = build(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, t, label), model(x, t, label))
"""


def test_networks_compile_to_one_graph() -> None:
    """In a separate process, because the shape checker of the tests does not compile."""
    done = run_script(COMPILED)
    assert done.returncode == 0, done.stderr


# --- classes ---------------------------------------------------------------------------------------------------------------

CLASSES = [name for name in CONFIGS if "classes" in name]


@pytest.mark.parametrize("name", CLASSES)
def test_missing_condition_is_the_last_label(name: str) -> None:
    model = make(CONFIGS[name])
    assert torch.equal(model(x, t), model(x, t, torch.full((B,), 3)))
    assert not torch.equal(model(x, t), model(x, t, label))


@pytest.mark.parametrize("name", CLASSES)
def test_labels_are_dropped_in_training_mode_only(name: str) -> None:
    model = make(replace(CONFIGS[name], label_dropout=0.25))
    n = 400
    same, time, labels = x[:1].expand(n, L), t[:1].expand(n), torch.zeros(n, dtype=torch.long)

    def dropped() -> Tensor:
        return (model(same, time, labels) - model(x[:1], t[:1])).abs().amax((1, 2)) < 1e-5

    assert not dropped().any()
    model.train()
    assert 0.17 < dropped().float().mean() < 0.33


# --- the transformer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"label_after_silu": True}, {"norm_bias": True}], ids=["default", "UDLM", "RADD"])
def test_forward_pass_equals_its_formulas(options: dict[str, bool]) -> None:
    """One layer in float64: adaLN, rotary attention, MLP, adaLN, linear."""
    config = replace(DIT, depth=1, heads=2, classes=3, **options)
    model = make(config).double()
    w = {name: value.double() for name, value in model.state_dict().items()}
    width, half = config.width, config.width // config.heads // 2

    def norm(value: Tensor, weight: str) -> Tensor:
        centered = value - value.mean(-1, keepdim=True)
        normed = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[weight]
        return normed + w[weight.replace("weight", "bias")] if config.norm_bias else normed

    def modulated(value: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return value * (1 + scale[:, None]) + shift[:, None]

    def rotated(value: Tensor) -> Tensor:
        """Pairs (i, i + half) as complex numbers, times e^{i p 10000^{-2i/width of a head}}."""
        angle = torch.arange(L).double()[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
        pairs = torch.complex(value[..., :half], value[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pairs.real, pairs.imag], -1)

    frequency = 10_000.0 ** (-torch.arange(128).double() / 128)
    angle = 1000 * t.double()[:, None] * frequency
    condition = torch.cat([angle.cos(), angle.sin()], -1) @ w["condition.time.0.weight"].T + w["condition.time.0.bias"]
    condition = (condition * condition.sigmoid()) @ w["condition.time.2.weight"].T + w["condition.time.2.bias"]
    named = w["condition.label.weight"][label]
    if config.label_after_silu:
        condition = condition * condition.sigmoid() + named * named.sigmoid()
    else:
        condition = (condition + named) * (condition + named).sigmoid()
    linear = "modulation.linear"
    parts = (condition @ w[f"blocks.0.{linear}.weight"].T + w[f"blocks.0.{linear}.bias"]).split(width, -1)
    value = w["embedding.weight"][x]
    qkv = modulated(norm(value, "blocks.0.norm1.weight"), parts[0], parts[1]) @ w["blocks.0.attention.qkv.weight"].T
    q, k, v = (part.reshape(B, L, 2, 2 * half).transpose(1, 2) for part in qkv.split(width, -1))
    seen = torch.softmax(rotated(q) @ rotated(k).transpose(-1, -2) / math.sqrt(2 * half), -1) @ v
    value = value + parts[2][:, None] * (seen.transpose(1, 2).reshape(B, L, width) @ w["blocks.0.attention.out.weight"].T)
    hidden = modulated(norm(value, "blocks.0.norm2.weight"), parts[3], parts[4])
    hidden = hidden @ w["blocks.0.mlp.0.weight"].T + w["blocks.0.mlp.0.bias"]
    hidden = hidden / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    value = value + parts[5][:, None] * (hidden @ w["blocks.0.mlp.2.weight"].T + w["blocks.0.mlp.2.bias"])
    shift, scale = (condition @ w[f"{linear}.weight"].T + w[f"{linear}.bias"]).split(width, -1)
    expected = modulated(norm(value, "norm.weight"), shift, scale) @ w["head.weight"].T + w["head.bias"]
    output = model(x, t, label)
    assert output.dtype == torch.float64
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)  # angles are float32


def test_norm_biases_are_optional_and_start_at_one() -> None:
    fresh, plain = DiT(replace(DIT, norm_bias=True)), DiT(DIT)
    extra = fresh.state_dict().keys() - plain.state_dict().keys()
    assert extra == {"norm.bias", *(f"blocks.{i}.norm{j}.bias" for i in range(2) for j in (1, 2))}
    assert all((fresh.state_dict()[name] == 1).all() for name in extra)
    with pytest.raises(ValueError, match="label_after_silu is True, but the network has no classes"):
        replace(DIT, label_after_silu=True)


def test_causal_sites_do_not_depend_on_later_sites() -> None:
    model = make(CONFIGS["dit, causal"])
    changed = x.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % K
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()
    both_ways = make(DIT)
    assert (both_ways(x, t)[:, :9] != both_ways(changed, t)[:, :9]).any(-1).all()


def test_rotary_products_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 8)
    cos, sin = angles(50, 8)
    rotated = rotate(q.expand(50, 1, 8), cos, sin).squeeze(1)
    products = rotated @ rotate(k.expand(50, 1, 8), cos, sin).squeeze(1).T
    for distance in (-7, 0, 3, 20):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert (products.diagonal(3)[0] - products.diagonal(-3)[0]).abs() > 1e-3
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm().expand(50))


def test_output_depends_on_positions() -> None:
    model = make(DIT)
    swapped = x.clone()
    swapped[:, [0, 5]] = x[:, [5, 0]]
    moved = x[:, 0] != x[:, 5]
    assert moved.any()
    assert (model(x, t)[moved][:, 9] != model(swapped, t)[moved][:, 9]).any(-1).all()


def test_padding_of_the_vocabulary_has_no_effect() -> None:
    model = make(DIT)
    before = model(x, t)[..., :K]
    assert model.config.rows == 64
    with torch.no_grad():
        for weight in (model.embedding.weight, model.head.weight, model.head.bias):
            weight[K:] = torch.nan
    assert torch.equal(model(x, t)[..., :K], before)
    head = m2s.Posterior(m2s.Uniform(K, m2s.Linear()))
    loss = m2s.score_entropy(head, model(x, t), x, x, t)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert not model.embedding.weight.grad[K:].any()


def test_projecting_unprojected_output_gives_the_logits() -> None:
    model = make(DIT)
    logits = model(x, t)
    model.unprojected = True
    output = model(x, t)
    assert isinstance(output, m2s.Unprojected)
    assert torch.equal(output.project(), logits)
    with bfloat16():
        assert model(x, t).hidden.dtype == torch.float32


def test_close_times_are_distinguished_under_autocast() -> None:
    model, near = make(DIT), torch.tensor([0.5, 0.501])
    with bfloat16():
        condition = model.condition(x[:2], near, None)
    assert condition.dtype == torch.float32
    assert (condition[0] - condition[1]).abs().max() > 1e-3
    assert sinusoids(near, 16).shape == (2, 16)


# --- the U-Net -------------------------------------------------------------------------------------------------------------


def test_sites_are_in_row_major_order_with_channels_last() -> None:
    model = make(replace(UNET, shape=(2, 4, 3), input="level", mask=True))
    tokens = torch.randint(K, (B, 24))
    features = model._features(tokens)
    image = tokens.reshape(B, 2, 4, 3)
    levels = torch.where(image == K - 1, 0, image * 2 / (K - 2) - 1)
    torch.testing.assert_close(features[:, 0::2], levels.permute(0, 3, 1, 2).float())
    assert torch.equal(features[:, 1::2] == 1, (image == K - 1).permute(0, 3, 1, 2))
    assert features[:, 0::2].min() >= -1
    assert features[:, 0::2].max() <= 1
    with torch.no_grad():
        model.last.weight.zero_()
        model.last.bias.copy_(torch.arange(3 * K))
    assert torch.equal(model(tokens, t)[0], torch.arange(3 * K).float().reshape(3, K).repeat(8, 1))


def test_mask_without_a_column_gets_logit_zero() -> None:
    model = make(replace(UNET, mask=True, columns=K - 1))
    output = model(x, t)
    assert output.shape[-1] == K
    assert not output[..., -1].any()
    assert output[..., :-1].all()


def test_number_of_groups() -> None:
    """MD4 has 32 groups at every width. The default is groups of 4 channels, and at most 32 groups."""

    def groups(**options: object) -> set[int]:
        with torch.device("meta"):
            model = UNet(UNetConfig(K, (4, 4), **options))
        return {layer.num_groups for layer in model.modules() if isinstance(layer, nn.GroupNorm)}

    for width in (32, 64, 128, 256):
        assert groups(width=width, multipliers=(1, 2), groups=32) == {32}
        assert groups(width=width, multipliers=(1,)) == {min(32, width // 4), min(32, width // 2)}


@pytest.mark.usefixtures("without_shape_hook")
def test_invalid_groups_and_sinusoids_raise() -> None:
    with pytest.raises(ValueError, match=r"groups is 3, but it must be a divisor of width = 8"):
        replace(UNET, groups=3)
    with pytest.raises(ValueError, match="sinusoids is 'sin', but it must be one of 'cos-first', 'sin-first'"):
        replace(UNET, sinusoids="sin")


def test_every_group_is_normalized_separately() -> None:
    features = torch.randn(2, 8, 3, 5, dtype=torch.float64)
    norm = GroupNormFloat32(8, groups=8).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    centered = features - features.mean((2, 3), keepdim=True)
    expected = centered / (centered.square().mean((2, 3), keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(features), expected * norm.weight[:, None, None] + norm.bias[:, None, None])


def test_sinusoids_of_md4() -> None:
    """Sines first, and the lowest frequency is 1e-4. In SEDD cosines are first, and the last frequency is one step higher."""
    value, near = torch.tensor([0.0, 1.0, 250.0]), {"rtol": 1e-4, "atol": 1e-4}  # angles are float32
    frequency = torch.logspace(0, -4, 5, dtype=torch.float64)
    angle = value.double()[:, None] * frequency
    torch.testing.assert_close(sinusoids(value, 10, sin_first=True).double(), torch.cat([angle.sin(), angle.cos()], 1), **near)
    angle = value.double()[:, None] * 1e4 ** (-torch.arange(5).double() / 5)
    torch.testing.assert_close(sinusoids(value, 10).double(), torch.cat([angle.cos(), angle.sin()], 1), **near)


# --- learning --------------------------------------------------------------------------------------------------------------


def test_a_tiny_network_learns_sixteen_sequences() -> None:
    """The loss starts at log 27 = 3.3 nats per site. Its minimum is about log 16 / 12 = 0.23."""
    data = (torch.arange(16)[:, None] + torch.arange(12)) % 27
    model = DiT(DiTConfig(27, width=64, depth=2, heads=2, condition_width=32))
    objective = m2s.Objective(model, m2s.Posterior(m2s.Uniform(27, m2s.Linear())), t_min=0.02)
    optimizer = torch.optim.AdamW(model.parameters())
    losses, steps = [], 200
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        with unchecked() if step else contextlib.nullcontext():
            loss = objective(data.repeat(4, 1), m2s.stratified_times(64, 0.02, 0.98)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < math.log(27) / 2


# --- errors ----------------------------------------------------------------------------------------------------------------

dit, unet, conditional = make(DIT), make(UNET), make(CONFIGS["dit, classes"])
ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "token beyond the states": (lambda: dit(x + K, t), ValueError, r"x_t\[0, 0\] is \d+, .* 0\.\.12"),
    "tokens of one sample": (lambda: dit(x[0], t), ValueError, r"x_t has shape \[16\].*\[samples, positions\]"),
    "too many sites": (lambda: make(replace(DIT, length=8))(x, t), ValueError, "16 sites, .* at most 8"),
    "image of another size": (lambda: unet(x[:, :9], t), ValueError, r"x_t has shape \[4, 9\], .*\[samples, 16\]"),
    "no time": (lambda: dit(x), TypeError, "t is None, .* depends on time"),
    "time outside": (lambda: dit(x, t + 1), ValueError, r"t\[0\] is 1\.1, .*\[0, 1\]"),
    "one time for all": (lambda: unet(x, t[0]), ValueError, r"t has shape \[\], but x_t holds 4 samples: expected \[4\]"),
    "label without classes": (lambda: dit(x, t, label), ValueError, "no classes: set `classes`"),
    "label too large": (lambda: conditional(x, t, label + 2), ValueError, r"condition\[2\] is 4, .* 0\.\.3"),
    "labels of the wrong number": (lambda: conditional(x, t, label[:2]), ValueError, r"condition has shape \[2\]"),
    "odd heads": (
        lambda: DiTConfig(K, width=30, heads=4),
        ValueError,
        r"width is 30, .* multiple of twice the number of heads \(8\)",
    ),
    "no such size": (lambda: DiTConfig.preset("huge", K), ValueError, "size is 'huge', .* 'tiny', 'small', 'medium'"),
    "no such U-Net": (lambda: UNetConfig.preset("huge", K, (8, 8)), ValueError, "size is 'huge', .* 'tiny', 'mnist', 'md4'"),
    "sides that do not halve": (
        lambda: UNetConfig(K, (28, 30), multipliers=(1, 1, 1)),
        ValueError,
        r"multipliers is \(1, 1, 1\), .* multiples of 4, not \(28, 30\)",
    ),
    "too many dimensions": (lambda: UNetConfig(K, (2, 2, 2, 2)), ValueError, r"shape is .* \(height, width\)"),
    "causal": (lambda: DiTConfig(K, causal=[True]), TypeError, r"causal is \[True\], but it must be True or False"),
    "padding": (lambda: DiTConfig(K, padding=(1,)), TypeError, r"padding is \(1,\), but it must be True or False"),
    "time": (lambda: DiTConfig(K, time=1), TypeError, "time is 1, but it must be True or False"),
    "mask": (lambda: UNetConfig(K, shape=(4, 4), mask="yes"), TypeError, "mask is 'yes', but it must be True or False"),
    "dropout": (lambda: DiTConfig(K, dropout=1.0), ValueError, r"dropout is 1\.0, .*\[0, 1\)"),
    "too few rows": (lambda: UNetConfig(K, (4, 4), rows=5), ValueError, "rows is 5, but it must be at least 13"),
    "unknown kind": (lambda: build({"kind": "mlp"}), ValueError, "kind is 'mlp', .* dit, unet"),
    "unknown setting": (
        lambda: build({"kind": "dit", "states": 3, "layers": 2}),
        ValueError,
        "no setting layers; .*depth",
    ),
    "unregistered network": (lambda: describe(nn.Linear(2, 2)), TypeError, "model is a Linear, .* m2s.models.NETWORKS"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_invalid_inputs_and_configurations_raise(name: str) -> None:
    call, kind, message = ERRORS[name]
    jaxtyping.config.update("jaxtyping_disable", True)  # users run without the shape checker of the tests
    try:
        with pytest.raises(kind, match=message):
            call()
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


class Lora(nn.Module):
    """A layer plus a low-rank one."""

    def __init__(self, layer: nn.Module, width: int, after: int) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(width, 2, bias=False), nn.Linear(2, after, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("fused", [False, True], ids=["reference", "fused"])
@pytest.mark.parametrize("where", ["attention.qkv", "attention.out", "mlp.0", "mlp.2"])
def test_layers_can_be_replaced_and_hooked(where: str, fused: bool) -> None:
    if fused:
        pytest.importorskip("triton")
    torch.manual_seed(0)
    model = DiT(DiTConfig(11, width=16, depth=1, heads=2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x_t, t = torch.randint(11, (2, 5)), torch.rand(2)
    block = model.blocks[0]
    layer = block.get_submodule(where)
    after, width = layer.weight.shape
    with use_backend("fused" if fused else "reference"):
        before = model(x_t, t).detach()
        results = []
        handle = layer.register_forward_hook(lambda module, given, result: results.append(result))
        assert torch.allclose(model(x_t, t), before, atol=1e-5) and len(results) == 1
        handle.remove()
        plain = nn.Linear(width, after, bias=layer.bias is not None)
        plain.load_state_dict(layer.state_dict())
        parent, name = where.split(".")
        parent = block.get_submodule(parent)
        setattr(parent, name, plain)
        assert torch.allclose(model(x_t, t), before, atol=1e-5)
        wrapped = Lora(layer, width, after)
        setattr(parent, name, wrapped)
        found = model(x_t, t)
        assert not torch.allclose(found, before, atol=1e-3)
        found.sum().backward()
        assert wrapped.up.weight.grad.abs().sum() > 0 and layer.weight.grad.abs().sum() > 0
        nn.init.zeros_(wrapped.up.weight)
        assert torch.allclose(model(x_t, t), before, atol=1e-5)
