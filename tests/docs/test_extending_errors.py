"""Every message in the tables "Common errors" of docs/extending is what the mistake beside it gives."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from doc_pages import ROOT, plugins, restored_registries

import m2s
from m2s.cli import main
from m2s.registry import load_plugin

PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "extending").glob("*.md"))}
SHORT = "--steps 1 --batch 4 --validation-samples 4 --device cpu"
SCAN = "m2s train digits --plugin my_network.py --network.kind scan --network.width 8"
CYCLES = "m2s train digits --plugin my_data.py --data.name cycles --data.length 12 --network.kind dit --network.size tiny"
METRIC = "m2s evaluate brightness samples.npz --plugin my_metric.py"
UNIFORM = m2s.Uniform(5, m2s.Linear())
HEAD = m2s.Posterior(UNIFORM, offset="exact")
ROWS = torch.arange(32).reshape(4, 8) % 5


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with all plugins and a file of samples. Afterwards nothing is registered."""
    for page in PAGES.values():
        for name, code in plugins(page).items():
            (tmp_path / name).write_text(code)
    np.savez(tmp_path / "samples.npz", tokens=np.zeros((2, 64), dtype=np.int64))
    monkeypatch.chdir(tmp_path)
    with restored_registries():
        yield


def edited(name: str, old: str, new: str) -> None:
    """Change a plugin."""
    code = Path(name).read_text()
    assert old in code
    Path(name).write_text(code.replace(old, new))


def network(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*x_t.shape, 5)


def scan(states: int) -> torch.nn.Module:
    """The network of the page."""
    load_plugin("my_network.py")
    settings, module = m2s.models.NETWORKS["scan"]
    return module(settings(states=states))


def run(command: str) -> None:
    """Run a command, in the way that a user runs it; a run takes one step."""
    words = shlex.split(command)[1:]
    main([*words, *(shlex.split(SHORT) if words[0] == "train" else [])])


class Broken(m2s.samplers.Sampler):
    def step(self, prediction, move, noise):
        return prediction.posterior()


class Purpose(m2s.samplers.Sampler):
    def step(self, prediction, move, noise):
        return (noise("mine") < 0.5).long()


class OnlyAlpha(m2s.Schedule):
    def alpha(self, t):
        return 1 - t**2


def load_what_another_program_trained(command: str) -> None:
    with restored_registries():
        run(f"{command} --out run")
    m2s.load("run")


def twice() -> None:
    scan(5)
    m2s.models.NETWORKS.add("scan", m2s.models.NETWORKS["dit"])


def loss_of(model: Callable | torch.nn.Module, **options: Callable) -> Callable[[], object]:
    return lambda: m2s.Objective(model, HEAD, **options)(ROWS)


def draw(model: Callable, head: m2s.Head = HEAD, **options: object) -> Callable[[], object]:
    return lambda: m2s.sample(model, head, (1, 8), steps=2, **options)


def with_sampler() -> None:
    load_plugin("my_sampler.py")
    m2s.sample(network, m2s.LogScore(UNIFORM), (1, 8), sampler="renoise")


def after_training() -> None:
    with restored_registries():
        run(f"{CYCLES} --out run")
    with restored_registries():
        run("m2s evaluate bpd run")


def weighted() -> None:
    edited("my_data.py", "% self.vocab)", "% self.vocab, torch.ones(len(indices), self.length))")
    with restored_registries():
        run(f"{CYCLES} --out run")
    with restored_registries():
        run("m2s evaluate bpd run --plugin my_data.py")


def edit_and_run(name: str, old: str, new: str, command: str) -> Callable[[], None]:
    def action() -> None:
        edited(name, old, new)
        run(command)

    return action


def write_and_run(name: str, code: str, command: str) -> Callable[[], None]:
    def action() -> None:
        Path(name).write_text(code)
        run(command)

    return action


SIZE = (
    "from m2s.evaluation import METRICS\n\n\n@METRICS.register('size')\ndef size(samples):\n    return {'size': len(samples)}\n"
)
MISTAKES: dict[str, list[str | Callable[[], object]]] = {  # in the order of the rows
    "index": [
        "m2s train digits --plugin my_file.py",
        write_and_run("my_file.py", "import nothing_of_that_name", "m2s train digits --plugin my_file.py"),
        twice,
        f"{SCAN} --network.options layer=2",
        f"{SCAN} --network.options layers=two",
    ],
    "process-and-schedule": [
        lambda: OnlyAlpha().sigma(torch.tensor(0.5)),
        "m2s train digits --plugin my_noise.py --method gidd --process.schedule quadratic",
        lambda: load_what_another_program_trained("m2s train digits --plugin my_noise.py --process.schedule quadratic"),
        lambda: m2s.Chain.uniform(3, torch.full((4,), 0.3, dtype=torch.float64)).rates(torch.tensor(0.5)),
    ],
    "head-and-loss": [
        lambda: type("Half", (m2s.Head,), {})(UNIFORM),
        "m2s train digits --plugin my_loss.py --head.loss cross-entropy --method sedd",
        loss_of(network, loss=lambda head, output, x_0, x_t, t: output.sum()),
        "m2s train digits --plugin my_loss.py --head.loss cross-entropy --head.options smooth=0.1",
    ],
    "sampler": [
        with_sampler,
        draw(network, sampler=Broken()),
        draw(network, sampler=Purpose()),
        draw(network, sampler="renoise"),
        "m2s sample builtin:digits-m2s --plugin my_sampler.py --sampler euler --greedy True --out drawn.npz",
    ],
    "data": [
        edit_and_run("my_data.py", "self.size, self.held_out", "self.count, self.held", CYCLES),
        edit_and_run("my_data.py", "% self.vocab)", "% 9)", CYCLES),
        edit_and_run("my_data.py", "arange(self.length)", "arange(13)", CYCLES),
        CYCLES.replace(" --network.kind dit", ""),
        after_training,
        weighted,
    ],
    "method-and-metric": [
        "m2s train digits --method m2s-cosine",
        METRIC.replace(" --plugin my_metric.py", ""),
        METRIC.replace("samples.npz", "samples.png"),
        f"{METRIC} --reference text.txt",
        edit_and_run("my_metric.py", "return found", "return torch.ones(1)", METRIC),
        write_and_run("size.py", SIZE, "m2s evaluate size samples.npz --plugin size.py --reference digits:test"),
    ],
    "network-and-training-loop": [
        lambda: load_what_another_program_trained(SCAN),
        lambda: m2s.hub.save("saved", torch.nn.Linear(2, 2), HEAD, data={"kind": "text", "length": 8}),
        edit_and_run("my_network.py", "        self.config = config  # a checkpoint stores it\n", "", SCAN),
        lambda: loss_of(scan(4))(),
        loss_of(lambda x_t, t: torch.zeros(4, 5)),
        draw(lambda x_t, t: torch.full((*x_t.shape, 5), float("nan"))),
        f"{SCAN} --optimizer.kind muon",
    ],
}


def rows(page: str) -> list[str]:
    """The messages in the table of a page."""
    table = PAGES[page].partition("\n## Common errors\n")[2]
    return re.findall(r"^\| `([^`]*)` \|", table, re.M)


def test_every_row_is_tested() -> None:
    assert {page: len(rows(page)) for page in PAGES} == {page: len(MISTAKES[page]) for page in PAGES}


@pytest.mark.filterwarnings("error:OnlyAlpha leaves")
@pytest.mark.parametrize(
    ("page", "message", "mistake"),
    [(page, message, mistake) for page in PAGES for message, mistake in zip(rows(page), MISTAKES[page], strict=False)],
    ids=[f"{page}-{number}" for page in PAGES for number, _ in enumerate(rows(page))],
)
def test_the_mistake_gives_the_message(
    page: str, message: str, mistake: str | Callable[[], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((Exception, SystemExit)) as caught:
        run(mistake) if isinstance(mistake, str) else mistake()
    text = capsys.readouterr().err if isinstance(caught.value, SystemExit) else str(caught.value)
    assert message in text
    assert "Traceback" not in text
