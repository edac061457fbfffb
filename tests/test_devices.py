"""Losses, projections, samples and training steps agree across devices, dtypes and compilers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fork_server import run_script

import m2s

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
VOCAB = 64
PROCESSES = {
    "uniform": m2s.Uniform(VOCAB, m2s.Linear()),
    "absorbing": m2s.Absorbing(VOCAB, m2s.Cosine()),
    "hybrid": m2s.Hybrid(VOCAB, p_uniform=0.1),
    "gaussian": m2s.RateMatrix.gaussian(VOCAB, m2s.Exponential(1.0)),
}


def situation(process: m2s.Process, device: str) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(1)
    x_0 = torch.randint(VOCAB, (4, 9), generator=rng)
    t = torch.linspace(0.01, 0.99, 4)
    x_t = process.corrupt(x_0, t, rng)
    output = 2 * torch.randn(4, 9, process.states + 5, generator=rng)
    return tuple(value.to(device) for value in (x_0, x_t, t, output))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROCESSES)
def test_float32_on_a_device_agrees_with_float64_on_the_cpu(name: str, device: str) -> None:
    """Loss, score, posterior, projection and classes. On a CPU the test compares dtypes only."""
    process = PROCESSES[name]
    for head in (
        m2s.Posterior(process),
        m2s.Posterior(process, offset="exact"),
        m2s.LogScore(process),
        m2s.FactorizedRate(process),
    ):
        x_0, x_t, t, output = situation(process, "cpu")
        exact = m2s.score_entropy(head, output.double(), x_0, x_t, t.double())
        exact_score = head.log_score(output.double(), x_t, t.double())
        x_0, x_t, t, output = situation(process, device)
        loss = m2s.score_entropy(head, output, x_0, x_t, t)
        assert loss.device.type == device and loss.dtype == torch.float32
        assert torch.allclose(loss.cpu().double(), exact, rtol=2e-5, atol=1e-6)
        log_score = head.log_score(output, x_t, t)
        finite = exact_score.isfinite()
        assert torch.allclose(log_score.cpu().double()[finite], exact_score[finite], rtol=1e-4, atol=1e-4)
        assert process.corrupt(x_0, t).device.type == device
        if isinstance(head, m2s.Posterior) and name != "gaussian":
            score = head.log_score(output.double(), x_t, t.double()).exp()
            assert (m2s.classify(score, x_t, t.double(), process) >= 2).all()
            mu = m2s.project(score, x_t, t.double(), process)
            assert torch.allclose(mu, head.posterior(output.double(), x_t, t.double()), atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_half_precision_output_is_float32(dtype: torch.dtype) -> None:
    process = PROCESSES["uniform"]
    x_0, x_t, t, output = situation(process, "cpu")
    head = m2s.Posterior(process)
    rounded = output.to(dtype).requires_grad_()
    loss = m2s.score_entropy(head, rounded, x_0, x_t, t)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, m2s.score_entropy(head, rounded.detach().float(), x_0, x_t, t))
    loss.sum().backward()
    assert rounded.grad is not None and rounded.grad.dtype == dtype and rounded.grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROCESSES)
def test_samples_on_a_device_equal_those_on_the_cpu(name: str, device: str) -> None:
    """The random bits are equal, and with the same float64 logits also the tokens."""
    process = PROCESSES[name]
    table = 2 * torch.randn(process.states, process.states + 3, dtype=torch.float64)
    numbers = torch.arange(7)
    here, there = (m2s.samplers.CounterNoise(3, numbers.to(place), 5, 2) for place in ("cpu", device))
    assert torch.equal(here("token"), there("token").cpu()) and torch.equal(here.once("time"), there.once("time").cpu())
    for head in (m2s.Posterior(process), m2s.Posterior(process, offset="exact"), m2s.LogScore(process)):
        for sampler in ("bayes", "euler", "first_hitting", "predictor_corrector"):
            if (sampler in ("bayes", "predictor_corrector") and not head.has_posterior) or (
                sampler == "first_hitting" and (name != "absorbing" or not head.has_posterior)
            ):
                continue
            both = [
                m2s.sample(
                    lambda x_t, t, at=place: table.to(at)[x_t], head, (5, 9), steps=6, sampler=sampler, device=place, seed=0
                )
                for place in ("cpu", device)
            ]
            assert both[1].device.type == device and torch.equal(both[0], both[1].cpu())


COMPILED = """
import sys, torch, m2s
torch.manual_seed(int(sys.argv[2]))
processes = [m2s.Uniform(61, m2s.Linear())]
if sys.argv[1] == "aot_eager":
    processes += [m2s.Uniform(2, m2s.Linear()), m2s.Uniform(64, m2s.LogLinear()), m2s.Absorbing(17, m2s.Linear())]
    processes += [m2s.Hybrid(6, 0.3), m2s.Uniform(1043, m2s.Linear())]  # eight columns at a time, and a remainder of three
t = torch.tensor([1e-3, 0.1, 0.6, 0.99, 0.9999])
for process in processes:
    x_0 = torch.randint(process.vocab, (5, 9))
    x_t = process.corrupt(x_0, t)
    for offset in ("none", "exact") if sys.argv[1] == "aot_eager" else ("exact",):
        torch._dynamo.reset()
        head = m2s.Posterior(process, offset=offset)
        exact = torch.randn(5, 9, max(70, process.states + 5), dtype=torch.float64).float().double().requires_grad_()
        output = exact.detach().float().requires_grad_()
        loss = lambda output: m2s.score_entropy(head, output, x_0, x_t, t)
        eager, compiled = loss(exact), torch.compile(loss, fullgraph=True, backend=sys.argv[1])(output)
        torch.testing.assert_close(compiled.double(), eager, rtol=2e-6, atol=1e-11)  # 1e-5 of the resolution of 1e-6 nats
        eager.sum().backward(), compiled.sum().backward()
        error, size = (output.grad - exact.grad).norm(dim=-1), exact.grad.norm(dim=-1)
        assert (error <= 2e-6 * size + 1e-11).all(), (process, offset, (error / size).max())
torch._dynamo.reset()
form = lambda output, x_0, x_t, t, process: m2s.score_entropy(m2s.Posterior(process), output, x_0, x_t, t)
compiled = torch.compile(form, fullgraph=True, backend=sys.argv[1])
shapes = ((4, 61), (5, 40), (5, 61), (7, 47))  # dynamic shapes
for rows, vocab in shapes if sys.argv[1] == "aot_eager" else ():  # independent of the backend
    process, t = m2s.Uniform(vocab, m2s.Linear()), torch.linspace(0.1, 0.9, rows)
    x_0 = torch.randint(vocab, (rows, 6))
    x_t, output = process.corrupt(x_0, t), torch.randn(rows, 6, vocab)
    torch.testing.assert_close(compiled(output, x_0, x_t, t, process), form(output, x_0, x_t, t, process), rtol=2e-6, atol=0)
process = m2s.Uniform(64, m2s.Linear())
x_t, t = torch.randint(64, (5, 9)), torch.tensor([1e-3, 0.1, 0.6, 0.99, 0.9999])
score = torch.exp(torch.randn(5, 9, 64))
projection = lambda value: m2s.project(value, x_t, t, process)
assert torch.allclose(projection(score), torch.compile(projection, fullgraph=True, backend=sys.argv[1])(score), atol=1e-6)
print("one graph")
"""


def test_loss_and_projection_compile_to_one_graph() -> None:
    """Without graph breaks and with equal values. In a separate process: the shape checker of the tests cannot be traced."""
    backend = "inductor" if any(map(shutil.which, ("c++", "g++", "clang++"))) else "aot_eager"  # inductor needs a C++ compiler
    done = run_script(COMPILED, backend, "0")
    assert done.stdout.strip() == "one graph", done.stderr


REPLAYED = """
import sys
from pathlib import Path
from small_runs import losses, small, weighted_rows
from m2s.training import train
from m2s.training.config import replace
out, network, micro_batch, compiled = sys.argv[1:]
changes = {"steps": 8, "log_every": 1, "precision": "float32", "network__dropout": 0.0, "micro_batch": int(micro_batch)}
if network == "duo":  # 16 training steps, the first 8 with relaxed tokens
    changes |= {"method": "duo", "steps": 16}
# md4 and sedd-absorb gather the masked positions; the Gaussian processes read transition matrices from tables
if network in ("md4", "sedd-absorb", "radd", "tauldr-absorb", "tauldr", "m2s-gaussian", "neural-ctmc", "gidd-clipped", "ar"):
    changes |= {"method": network}
if network == "unet":
    changes |= {"network__kind": "unet", "network__depth": None, "network__heads": None, "network__multipliers": (1, 2)}
found = []
for device in ("cpu", "cuda"):
    config = small(Path(out) / device, **changes, compile="no" if device == "cpu" else compiled)
    rows = weighted_rows()
    rows.shape = (2, 2)
    train(replace(config, "device", device), rows)
    found.append(losses(Path(out) / device))
assert len(found[0]) == changes["steps"] and all(abs(a - b) < 1e-4 * abs(a) for a, b in zip(*found, strict=True)), found
print("the same losses")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs are for a GPU")
@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize(
    ("network", "compiled"),
    [(network, compiled) for network in ("dit", "unet", "duo") for compiled in ("no", "yes")]
    + [("md4", "yes"), ("sedd-absorb", "yes"), ("radd", "no"), ("tauldr-absorb", "no")]
    + [("neural-ctmc", "yes"), ("gidd-clipped", "no"), ("ar", "yes")]
    + [(network, compiled) for network in ("tauldr", "m2s-gaussian") for compiled in ("no", "yes")],
)
def test_compiled_and_captured_training_steps_equal_those_on_the_cpu(tmp_path, network, micro_batch, compiled) -> None:
    """Eight training steps with padding, of which the GPU captures the fourth as a CUDA graph."""
    command = [sys.executable, "-c", REPLAYED, str(tmp_path), network, str(micro_batch), compiled]
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "the same losses", done.stderr
