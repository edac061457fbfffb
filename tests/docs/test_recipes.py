"""The recipes in examples/ train a network, with and without several processes, as an exact computation by hand does."""

import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from doc_pages import ROOT
from filelock import FileLock
from fork_server import Program

import m2s
from m2s.cli import main
from m2s.models import DiT, DiTConfig
from m2s.rng import derived_seed
from recorded_recipe import cut_digits

pytestmark = pytest.mark.docs

RECIPES = ("pytorch_loop", "accelerate_loop", "lightning_module", "transformers_trainer")
SEED, STEPS, BATCH, ACCUMULATE = 3, 6, 8, 2
RECORDER = ROOT / "tests" / "docs" / "recorded_recipe.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def started(*words: object) -> str:
    """Run Python in a process of its own, as a user does, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(script: Path, *words: object) -> str:
    """Run a script in a process of its own, which has torch imported, and return what it printed.

    By default a call of the network has a sixteenth of the rows that users get, as in tests/conftest.py.
    """
    code = "import runpy, sys\nfrom m2s.samplers import options\noptions.POSITIONS //= 16\n"
    code += "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = Program(code, str(script), *map(str, words), environment=environment, folder=Path.cwd()).wait(600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def initial_network() -> DiT:
    """The network of the recipes before training."""
    torch.manual_seed(SEED)
    return DiT(DiTConfig(17, width=64, depth=2, heads=4, classes=10, padding=True, label_dropout=0.0))


def bits(model: torch.nn.Module, head: m2s.Head) -> float:
    """The NELBO of half of the test digits in bits per pixel, with fixed times and noise."""
    images = m2s.data.load("digits")
    found = m2s.Checkpoint(model, head).evaluate(images.test[:128], labels=images.test_labels[:128], seed=0)
    return float(found.nats.sum() / found.sites.sum()) / math.log(2)


@functools.cache
def initial_bits() -> float:
    """The NELBO before training, which is the same for all recipes."""
    return bits(initial_network(), m2s.Posterior(m2s.Uniform(17, m2s.Linear()), offset="exact"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_and_its_checkpoint_can_be_sampled(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--steps", 80, "--batch-size", 32, "--bf16", "--seed", SEED, "--out", "run")
    printed = run(ROOT / "examples" / f"{recipe}.py", *flags)
    model, head = checkpoint = m2s.load("run", verify=True)
    assert checkpoint.config["extra"] == {"step": 80, "seed": SEED}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    trained = bits(model, head)
    assert trained < initial_bits() - 0.7
    reported = float(re.search(r"(?:images: |pixel\s+│\s+)(\d\.\d+)", printed)[1])
    assert reported == pytest.approx(trained, abs=0.5)  # of other times and noise; the standard error is 0.1
    assert main(["sample", "run", "--n", "4", "--steps", "8", "--labels", "3", "5", "--out", "drawn.png"]) in (None, 0)
    with np.load("drawn.npz") as drawn:
        assert drawn["tokens"].shape == (4, 64) and Path("drawn.png").is_file()
    assert sorted(path.name for path in Path().iterdir() if path.name != "run") == ["drawn.npz", "drawn.png"]


class Reference:
    """Training by hand: every example alone and without padding, one mean over all examples of a training step."""

    def __init__(self, processes: int) -> None:
        self.model, self.average = initial_network(), []
        self.head = m2s.Posterior(m2s.Uniform(17, m2s.Linear()), offset="exact")
        self.noise = [torch.Generator().manual_seed(derived_seed(SEED, "noise", rank)) for rank in range(processes)]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0)

    def losses(self, rank: int, x_0: torch.Tensor, weight: torch.Tensor, label: torch.Tensor) -> list[torch.Tensor]:
        """The losses of the examples of a batch."""
        t = m2s.stratified_times(len(x_0), 1e-3, 1 - 1e-3, self.noise[rank])
        x_t = self.head.process.corrupt(x_0, t, self.noise[rank])
        found = []
        for i, length in enumerate(weight.sum(1).long()):
            here, given = slice(i, i + 1), (x_0[i : i + 1, :length], x_t[i : i + 1, :length])
            output = self.model(given[1], t[here].float(), label[here])
            found.append(m2s.score_entropy(self.head, output, *given, t[here]).sum())
        return found

    def step(self, batches: list[list[tuple[torch.Tensor, ...]]]) -> None:
        """A training step on the batches of each process."""
        losses = [loss for rank, local in enumerate(batches) for batch in local for loss in self.losses(rank, *batch)]
        self.optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        norm = torch.stack([weight.grad.norm() for weight in self.model.parameters()]).norm()
        for weight in self.model.parameters():
            weight.grad.mul_(min(1.0, 1.0 / (float(norm) + 1e-6)))
        self.optimizer.step()
        weights = [weight.detach().clone() for weight in self.model.parameters()]
        old = self.average or weights
        self.average = [0.98 * average + 0.02 * weight for average, weight in zip(old, weights, strict=True)]


@pytest.fixture(scope="session")
def recorded(shared_folder: Path) -> Callable[[str, int], tuple[list[list], m2s.Checkpoint]]:
    """Runs a recipe on cut digits, once for all processes that run tests.

    Returns the batches of each process in each training step, and the checkpoint.
    """

    def of(recipe: str, processes: int) -> tuple[list[list], m2s.Checkpoint]:
        folder = shared_folder / f"{recipe}-{processes}"
        flags = ("--steps", STEPS, "--batch-size", BATCH, "--accumulate", ACCUMULATE, "--seed", SEED, "--out", folder / "run")
        devices = ("--devices", processes) if recipe == "lightning_module" else ()
        launcher = TORCHRUN if not devices else ()
        start = run if processes == 1 else functools.partial(started, *launcher)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                start(RECORDER, ROOT / "examples" / f"{recipe}.py", folder / "record", *flags, *devices)
        assert len(list((folder / "record").iterdir())) == processes
        return [torch.load(folder / "record" / f"{rank}.pt") for rank in range(processes)], m2s.load(folder / "run")

    return of


@pytest.mark.parametrize(("recipe", "processes"), [*((name, 1) for name in RECIPES), *((name, 2) for name in RECIPES[1:])])
def test_weights_are_those_of_training_by_hand(recipe: str, processes: int, recorded: Callable) -> None:
    """With padding, micro-batches, epochs that end between two training steps, and other noise in each process."""
    records, checkpoint = recorded(recipe, processes)
    reference, sizes = Reference(processes), set()
    cut = cut_digits()
    data = {(int(label), *image.tolist()) for image, label in zip(cut.train, cut.train_labels, strict=True)}
    assert {len(steps) for steps in records} == {STEPS}
    for batches in zip(*records, strict=True):
        for together in zip(*batches, strict=True):  # a training step may span two epochs, a micro-batch does not
            examples = [tuple(row[row >= 0].tolist()) for batch in together for row in unpadded(*batch)]
            assert len(set(examples)) == len(examples) == processes * BATCH and data.issuperset(examples)
        sizes.add(len(batches[0]))
        reference.step(list(batches))
    # Trainer ends an epoch with a smaller training step, and divides its loss by the number of its micro-batches.
    assert sizes == ({1, ACCUMULATE} if recipe == "transformers_trainer" else {ACCUMULATE})
    expected = dict(zip(dict(reference.model.named_parameters()), reference.average, strict=True))
    torch.testing.assert_close(dict(checkpoint.model.named_parameters()), expected, rtol=1e-4, atol=2e-6)


def unpadded(x_0: torch.Tensor, weight: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Labels and tokens of a batch, -1 at padding."""
    return torch.cat([label[:, None], x_0.masked_fill(weight == 0, -1)], 1)


def test_accelerate_in_one_process_is_the_plain_loop_bit_for_bit(recorded: Callable) -> None:
    found = [recorded(recipe, 1)[1].model.state_dict() for recipe in RECIPES[:2]]
    assert list(found[0]) == list(found[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_lightning_has_the_batches_of_the_plain_loop_in_the_first_epoch(recorded: Callable) -> None:
    loop, lightning = ([batch for step in recorded(recipe, 1)[0][0] for batch in step] for recipe in RECIPES[::2])
    first = len(cut_digits().train) // BATCH // ACCUMULATE * ACCUMULATE
    for ours, theirs in zip(loop[:first], lightning[:first], strict=True):
        assert torch.equal(unpadded(*ours), unpadded(*theirs))


def test_the_page_links_every_recipe() -> None:
    recipes = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert recipes == {*RECIPES, "diffusers_pipeline"}  # RECIPES train
    page = (ROOT / "docs" / "python.md").read_text()
    for recipe in recipes:
        assert f"](../examples/{recipe}.py)" in page


def test_the_recipe_for_diffusers_draws_from_a_run(tmp_path: Path) -> None:
    """The prompt stays, and all masks are drawn. The same seed repeats the text."""
    torch.manual_seed(0)
    model = DiT(DiTConfig(5, width=16, depth=1, heads=2, time=False))
    data, tokenizer = {"kind": "text", "length": 12}, m2s.data.Characters("abc ")
    m2s.save(tmp_path / "run", model, m2s.Posterior(m2s.Absorbing(4, m2s.Linear())), data, tokenizer)
    words = (ROOT / "examples" / "diffusers_pipeline.py", "--checkpoint", tmp_path / "run", "--prompt", "cab ", "--steps", 6)
    one, two, other = (run(*words, "--seed", seed).splitlines()[-1] for seed in (3, 3, 4))
    assert re.fullmatch("cab [abc ]{8}", one) and one == two and one != other
