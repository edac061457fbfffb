"""Several threads and processes sample with the same network, and choose their own backend."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import m2s
from m2s.models import DiT, DiTConfig, MaskAt
from m2s.modes import evaluation_mode
from m2s.ops import use_backend
from m2s.ops.backend import selected_backend
from m2s.samplers import inference_model
from m2s.samplers.inference_model import InferenceModel

HEAD = m2s.Posterior(m2s.Uniform(5, m2s.Linear()), offset="exact")


class Waiting(nn.Module):
    """A network with dropout whose calls wait for each other, so that the runs of two threads overlap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.dropout, self.frozen = nn.Embedding(5, 5), nn.Dropout(0.5), nn.Dropout(0.5).eval()
        self.wait: Callable[[], object] = lambda: None

    def forward(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        self.wait()
        return self.frozen(self.dropout(self.table(x_t)))


def test_one_thread_does_not_end_the_evaluation_mode_of_another() -> None:
    """The second run starts after the first and ends after it."""
    model = Waiting().train()
    model.frozen.eval()
    expected = m2s.sample(model, HEAD, (4, 6), steps=6, seed=0)
    first_ended, second_started = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = []

        def wait() -> None:
            if threading.current_thread() is not threading.main_thread():
                second_started.set()
                assert first_ended.wait(30)
            elif not running:
                running.append(pool.submit(m2s.sample, model, HEAD, (4, 6), 6, seed=0))
                assert second_started.wait(30)

        model.wait = wait
        first = m2s.sample(model, HEAD, (4, 6), steps=6, seed=0)
        first_ended.set()
        assert torch.equal(first, expected) and torch.equal(running[0].result(30), expected)
    assert model.training and model.dropout.training and not model.frozen.training


def test_modes_are_restored_after_many_overlapping_blocks() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(), nn.Dropout().eval()))
    before = [module.training for module in model.modules()]
    failures = []

    def enter(index: int) -> None:
        for _ in range(200):
            with evaluation_mode(model if index % 2 else model[1]):
                if any(module.training for module in model[1].modules()):
                    failures.append(index)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(8)))
    assert not failures and [module.training for module in model.modules()] == before
    with pytest.raises(KeyError), evaluation_mode(model):
        raise KeyError
    assert [module.training for module in model.modules()] == before


def test_backend_belongs_to_a_thread() -> None:
    with use_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert selected_backend() == "reference" and pool.submit(selected_backend).result() == "auto"
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with use_backend("fused"):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(30)
    with use_backend("reference"):
        leave.set()
        thread.join()
        assert selected_backend() == "reference"
    assert selected_backend() == "auto"


@pytest.mark.parametrize("adapted", [False, True])
def test_a_prepared_network_does_not_change_the_output_for_other_threads(
    adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread is inside `InferenceModel`, the network itself still returns logits."""
    monkeypatch.setattr(inference_model, "LARGE", 5)
    inner = DiT(DiTConfig(6, width=8, depth=1, heads=2)).eval()
    model = MaskAt(inner, 2, 5) if adapted else inner
    prepared, kinds = InferenceModel(model, 6), []
    x_t, t = torch.zeros(2, 3, dtype=torch.long), torch.full((2,), 0.5)
    inside = False

    def call_directly(*_: object) -> None:
        nonlocal inside
        if not inside:
            inside = True
            with ThreadPoolExecutor(1) as pool:
                kinds.append(type(pool.submit(model, x_t, t).result()))

    inner.blocks[0].register_forward_pre_hook(call_directly)
    assert isinstance(prepared(x_t, t), m2s.Unprojected) and kinds == [Tensor]


def test_samples_do_not_depend_on_threads() -> None:
    """Eight threads that share a network draw what one thread draws."""
    torch.manual_seed(0)
    model = DiT(DiTConfig(5, width=16, depth=1, heads=2, dropout=0.5)).train()
    nn.init.normal_(model.head.weight)
    samples = m2s.sample(model, HEAD, (16, 6), steps=4, micro_batch=4, seed=0)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda i: m2s.sample(model, HEAD, (2, 6), steps=4, micro_batch=4, start=2 * i, seed=0), range(8)))
    assert torch.equal(torch.cat(parts), samples) and all(module.training for module in model.modules())


FORK = """
import os, sys, torch, m2s
from m2s.models import DiT, DiTConfig
torch.set_num_threads(2)
torch.manual_seed(0)
head = m2s.Posterior(m2s.Uniform(200, m2s.Linear()))
model = DiT(DiTConfig(200, width=128, depth=1, heads=4))
samples = m2s.sample(model, head, (16, 64), steps=1, seed=0)
child = os.fork()
if child == 0:
    os._exit(0 if m2s.sample(model, head, (16, 64), steps=1, seed=0).shape == samples.shape else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_after_sampling_with_several_threads_can_sample() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(m2s.__file__).parent.parent)}
    process = subprocess.Popen([sys.executable, "-c", FORK], env=environment, start_new_session=True)
    try:
        assert process.wait(90) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
