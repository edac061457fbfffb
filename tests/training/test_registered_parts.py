"""A plugin file adds a process, a schedule, a head, a loss, a network, a data set and a method, and `m2s train` uses them."""

import inspect
import json
from pathlib import Path

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.data import DATASETS
from m2s.heads.registry import HEADS
from m2s.hub import CLASSES
from m2s.losses.registry import LOSSES
from m2s.methods import METHODS
from m2s.models import NETWORKS
from m2s.process.registry import PROCESSES, SCHEDULES
from m2s.registry import Registry, load_plugin, option_types, parse_options
from m2s.training.run_folder import RECORD
from small_runs import losses, user_error

PLUGIN = '''
"""A plugin with one part of each kind."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import m2s
from m2s.data import DATASETS, ImageDataset
from m2s.data.source import ImageSource
from m2s.heads.registry import HEADS
from m2s.losses.registry import LOSSES, LossEntry
from m2s.methods import METHODS, HeadConfig, Method, ProcessConfig
from m2s.models import NETWORKS
from m2s.process.registry import PROCESSES, SCHEDULES


class Slow(m2s.Linear):
    """alpha = 1 - t, with a field."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Noise(m2s.Uniform):
    """Uniform noise with a strength."""

    def __init__(self, vocab: int, schedule: m2s.process.Schedule, strength: int = 1) -> None:
        super().__init__(vocab, schedule)
        self.strength = strength


class Tempered(m2s.Posterior):
    """A posterior with a temperature."""

    def __init__(self, process: m2s.process.Process, temperature: float = 1.0) -> None:
        super().__init__(process, "none")
        self.temperature = temperature


@SCHEDULES.register("plugin-schedule")
def schedule(*, factor: float = 0.5) -> Slow:
    return Slow(factor)


@PROCESSES.register("plugin-process")
def process(vocab: int, schedule: m2s.process.Schedule, *, strength: int = 1) -> Noise:
    return Noise(vocab, schedule, strength)


@HEADS.register("plugin-head")
def head(process: m2s.process.Process, *, temperature: float = 1.0) -> Tempered:
    return Tempered(process, temperature)


def scaled(head, output, x_0, x_t, t, factor: float = 1.0) -> Tensor:
    return factor * m2s.score_entropy(head, output, x_0, x_t, t)


@dataclass(frozen=True)
class BagConfig:
    states: int
    width: int = 8
    power: Literal["one", "two"] = "one"
    bias: bool = False


class Bag(nn.Module):
    """Logits from the embedding of a token and of the time."""

    def __init__(self, config: BagConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.states, config.width)
        self.time, self.last = nn.Linear(1, config.width), nn.Linear(config.width, config.states, config.bias)

    def forward(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        return self.last(self.embedding(x_t) + self.time(t[:, None])[:, None])


def open_bits(folder=None, length=512, hub=False, *, size: int = 32) -> ImageSource:
    pixels = torch.randint(2, (size, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    labels = torch.zeros(size, dtype=torch.long)
    return ImageSource(ImageDataset("bits", pixels, labels, pixels, labels, (4, 4), 2))


def add(registry, name, entry):
    registry.add(name, entry) if hasattr(registry, "add") else registry.__setitem__(name, entry)


LOSSES.add("plugin-loss", LossEntry(scaled, nelbo=m2s.score_entropy))
add(NETWORKS, "plugin-network", (BagConfig, Bag))
add(DATASETS, "plugin-data", open_bits)
METHODS.add(
    "plugin-method",
    Method(
        name="plugin-method",
        title="A plugin's method",
        process=ProcessConfig(kind="plugin-process", schedule="plugin-schedule", options=("strength=3",)),
        head=HeadConfig(kind="plugin-head", loss="plugin-loss"),
        text="All parts of the plugin.",
        bibtex="@misc{plugin, title = {Plugin}, author = {A, B}, year = {2026}}",
    ),
)
'''
REGISTRIES = (PROCESSES, SCHEDULES, HEADS, LOSSES, NETWORKS, DATASETS, METHODS, CLASSES)
QUICK = ["--steps", "2", "--batch", "8", "--validation-samples", "4", "--device", "cpu"]


def names() -> list[list[str]]:
    return [list(registry) for registry in REGISTRIES]


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory):
    """The plugin, loaded as `m2s --plugin FILE` loads it. Afterwards nothing of it is registered."""
    file = tmp_path_factory.mktemp("plugin") / "my_parts.py"
    file.write_text(PLUGIN)
    before = names()
    load_plugin(file)
    assert sum(map(len, names())) == sum(map(len, before)) + 7  # one part of each kind; their classes need no registration
    yield file
    for registry, old in zip(REGISTRIES, before, strict=True):
        for name in set(registry) - set(old):
            registry.remove(name) if isinstance(registry, Registry) else registry.pop(name)


def trained(out: Path, *arguments: str) -> m2s.Checkpoint:
    main(["train", "digits", *QUICK, "--out", str(out), *arguments])
    assert all(x == x for x in losses(out))
    return m2s.load(out)


def test_a_process_and_a_schedule_with_options(tmp_path: Path) -> None:
    options = ["--process.options", "strength=2", "factor=0.25"]
    chosen = ["--process.kind", "plugin-process", "--process.schedule", "plugin-schedule"]
    process = trained(tmp_path / "run", *chosen, *options).head.process
    assert (type(process).__name__, process.strength, process.schedule.factor) == ("Noise", 2, 0.25)
    record = json.loads((tmp_path / "run" / RECORD).read_text())
    assert record["config"]["process"]["options"] == ["strength=2", "factor=0.25"]
    main(["train", "digits", *QUICK, "--out", str(tmp_path / "run"), *chosen, *options])  # resumes


def test_a_head_and_a_loss_with_options(tmp_path: Path) -> None:
    same = ["--method", "m2s", "--network.width", "8", "--log-every", "1"]
    chosen = [*same, "--head.kind", "plugin-head", "--head.loss", "plugin-loss", "--head.options", "temperature=2", "factor=3"]
    assert trained(tmp_path / "run", *chosen).head.temperature == 2.0
    trained(tmp_path / "plain", *same)
    assert losses(tmp_path / "run")[0] == pytest.approx(3 * losses(tmp_path / "plain")[0], rel=1e-6)


def test_a_network_with_options(tmp_path: Path) -> None:
    chosen = ["--network.kind", "plugin-network", "--network.width", "4", "--network.options", "power=two", "bias=yes"]
    config = trained(tmp_path / "run", *chosen).model.config
    assert (config.states, config.width, config.power, config.bias) == (17, 4, "two", True)


def test_a_method_brings_its_parts(tmp_path: Path) -> None:
    checkpoint = trained(tmp_path / "run", "--method", "plugin-method", "--network.width", "8")
    assert checkpoint.head.process.strength == 3 and type(checkpoint.head).__name__ == "Tempered"
    parts = METHODS["plugin-method"].build(5)
    assert parts.nelbo_loss is m2s.score_entropy and parts.loss is not parts.nelbo_loss


def test_a_data_set_with_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = trained(tmp_path / "run", "--data.name", "plugin-data", "--data.options", "size=24", "--network.width", "8")
    assert checkpoint.data == {"kind": "image", "shape": [4, 4], "levels": 2}
    assert "bits (24 examples of 16)" in capsys.readouterr().err
    trained(tmp_path / "default", "--data.name", "plugin-data", "--network.width", "8")
    assert "bits (32 examples of 16)" in capsys.readouterr().err


def test_the_help_lists_the_registered_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "digits", "--help"])
    page = capsys.readouterr().out
    for kind in ("process", "schedule", "head", "loss", "network"):
        assert f"plugin-{kind}" in "".join(page.split("\n")).replace(" ", "").replace("│", ""), kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--process.options", "strength=2"),
            "--process.options is 'strength=2', but there is no option 'strength': choose from rescale",
        ),
        (("--process.kind", "plugin-process", "--process.options", "stregth=2"), "did you mean strength"),
        (
            ("--process.kind", "plugin-process", "--process.options", "strength=x"),
            "--process.options is 'strength=x', but strength must be a whole number",
        ),
        (
            ("--process.kind", "plugin-process", "--process.options", "strength"),
            "--process.options is 'strength', but it has no value: write KEY=VALUE",
        ),
        (
            ("--network.kind", "plugin-network", "--network.options", "power=six"),
            "--network.options is 'power=six', but power must be one of one, two",
        ),
        (
            ("--network.options", "power=one"),
            "--network.options is 'power=one', but it is for a plugin's network, not for unet",
        ),
        (("--head.options", "factor=2"), "--head.options is 'factor=2', but there is no option 'factor'"),
    ],
)
def test_wrong_options_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments, message: str) -> None:
    assert message in user_error(capsys, "train", "digits", *QUICK, "--out", str(tmp_path / "run"), *arguments)
    assert not (tmp_path / "run").exists()


def test_options_have_the_types_of_their_annotations() -> None:
    def build(vocab: int, *, a: int, b: float | None = 1.0, c: bool = False, d: tuple[int, ...] = (), e="x", f: Path = Path()):
        """Build nothing."""

    types = option_types(build)
    assert list(types) == ["a", "b", "c", "d", "e", "f"]
    given = ["a=3", "b=none", "c=yes", "d=1,2", "e=3", "f=x/y"]
    expected = {"a": 3, "b": None, "c": True, "d": (1, 2), "e": "3", "f": Path("x/y")}
    assert parse_options(given, types, "process") == expected
    assert parse_options(["b=2"], types, "process") == {"b": 2.0}


def test_defaults_of_the_options_are_those_of_the_builders() -> None:
    """A field at its default value is not passed on: the builder's default must be the same."""
    process, checked = m2s.training.ProcessConfig(), set()
    for builder in [*PROCESSES.values(), *SCHEDULES.values()]:
        for name, parameter in inspect.signature(builder).parameters.items():
            if hasattr(process, name) and name != "schedule":
                assert getattr(process, name) == parameter.default, (builder, name)
                checked.add(name)
    assert checked == set(vars(process)) - {"kind", "schedule", "options"}
    largest = inspect.signature(LOSSES["gidd-clipped"].function).parameters["max_weight"].default
    assert largest == m2s.training.HeadConfig().max_weight


def test_a_plugins_fused_loss_is_used() -> None:
    """A loss that declares the fused form of score entropy computes the same sum by it."""
    pytest.importorskip("triton")
    from m2s.losses.registry import LossEntry, has_fused_form
    from m2s.losses.score_entropy import row_loss_spec
    from m2s.losses.weighted_sum import skips_unmasked, weighted_sum
    from m2s.ops import use_backend
    from m2s.ops.last_layer import Unprojected

    def mine(head, output, x_0, x_t, t):
        raise AssertionError("the fused form is used")

    head = m2s.Posterior(m2s.Uniform(5, m2s.Linear()))
    assert not has_fused_form(mine, head)
    LOSSES.add("plugin-fused", LossEntry(mine, fused=row_loss_spec))
    try:
        assert has_fused_form(mine, head) and not skips_unmasked(mine, m2s.Posterior(m2s.Absorbing(5, m2s.Linear())))
        x_0, x_t, t = torch.tensor([[1, 2]]), torch.tensor([[1, 3]]), torch.tensor([0.5])
        parts, weight = (torch.randn(1, 2, 4), torch.randn(6, 4), torch.randn(6)), torch.ones(1, 2)
        with use_backend("fused"):
            found, expected = (
                weighted_sum(f, head, Unprojected(*parts), x_0, x_t, t, weight)[0] for f in (mine, m2s.score_entropy)
            )
        torch.testing.assert_close(found, expected)
    finally:
        LOSSES.remove("plugin-fused")
