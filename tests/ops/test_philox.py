"""Counter-based uniform numbers: the kernel has every bit of the definition, for any seed, sample, step and position."""

import pytest
import torch
from fork_server import run_script
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

import m2s
from m2s.losses.noise import corrupt_by_counter, sample_times
from m2s.ops import use_backend
from m2s.ops.philox import _uniforms, uniforms
from m2s.ops.philox import triton as fused
from m2s.ops.philox.naive import LOW
from m2s.samplers import CounterNoise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = [0, 1, 0x9E3779B97F4A7C15, (1 << 64) - 1]
SAMPLES = [0, 1, 16, 0x7FFFFFFF, 1 << 31, LOW, (1 << 40) + 5, -1]  # of which the low 32 bits count


def key(seed: int) -> tuple[int, int]:
    """The two words of a seed."""
    return seed & LOW, seed >> 32


def both(*given: object) -> tuple[Tensor, Tensor]:
    """The numbers of the kernel and of the definition."""
    with use_backend("fused"):
        found = uniforms(*given)
    with use_backend("reference"):
        return found, uniforms(*given)


@pytest.mark.parametrize(
    ("counter", "given", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D)),
        ((LOW, LOW, LOW, LOW), (LOW, LOW), (0x408F276D, 0x41C83B0E)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(counter, given, words):
    """Known answers of Random123 (kat_vectors); the first two of their four words make a number."""
    sample, step, site, word = counter
    expected = ((words[0] >> 5) * (1 << 26) + (words[1] >> 6)) / (1 << 53)
    for found in both(torch.tensor([sample], device=DEVICE), step, site, 1, word, given):
        assert found.tolist() == [[expected]]


@pytest.mark.parametrize(
    ("seed", "sites"),
    [*((seed, sites) for seed in SEEDS for sites in ((0, 3), (LOW, 1))), (SEEDS[-1], (5, 128)), (SEEDS[0], (0, 257))],
)
def test_kernel_has_every_bit(seed, sites):
    samples = torch.tensor(SAMPLES, device=DEVICE)
    for step in (0, 1, 16, 0xFFFFFFF0):
        for word in (0, 1, 10_003 | 40_000 << 16, LOW):
            found, expected = both(samples, step, *sites, word, key(seed))
            assert found.dtype == expected.dtype == torch.float64 and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("sites", [1, 5, 130])
def test_steps_on_the_device(sites, dtype):
    """One step for all samples, one for each, and strided steps and samples."""
    samples = (torch.arange(12, device=DEVICE) + (1 << 31))[1::2]
    each = torch.arange(7, 7 + 2 * len(samples), device=DEVICE, dtype=dtype)[::2].unsqueeze(-1)
    steps = [torch.tensor(3, device=DEVICE, dtype=dtype), torch.tensor(3, dtype=dtype), each]
    for step in steps if dtype == torch.int32 else [*steps, each + 0xFFFFFF00]:
        found, expected = both(samples, step, 0, sites, 10_001, key(SEEDS[2]))
        assert torch.equal(found, expected)
    assert torch.equal(found[2:3], both(samples[2:3], int(step[2]), 0, sites, 10_001, key(SEEDS[2]))[0])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_results(shape):
    found, expected = both(torch.arange(shape[0], device=DEVICE), 1, 0, shape[1], 0, (0, 0))
    assert found.shape == expected.shape == shape


@pytest.mark.parametrize("step", [5, torch.tensor(5, device=DEVICE)], ids=["number", "tensor"])
def test_noise_is_one_kernel(step):
    """No other operation runs, and nothing is copied."""
    started = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            started.append(str(function))
            return function(*args, **(kwargs or {}))

    noise = CounterNoise(SEEDS[2], torch.arange(3, device=DEVICE), 9, step, 2)
    expected = noise("token"), noise.once("time")
    with use_backend("fused"), Watch():
        found = noise("token"), noise.once("time")
    assert all(map(torch.equal, found, expected))
    expected_ops = ("m2s.uniforms.default", "aten.squeeze.dim")
    inside = ("aten.new_empty.default", "aten.expand.default", "aten.slice.Tensor")  # no kernels
    assert [name for name in started if name not in inside] == [expected_ops[0], *expected_ops]


@pytest.mark.parametrize(
    "process",
    [
        m2s.Uniform(300, m2s.Linear()),
        m2s.Absorbing(300, m2s.LogLinear()),
        m2s.Hybrid(300, 0.2),
        m2s.RateMatrix.uniform(5, m2s.Linear()),
    ],
    ids=lambda process: type(process).__name__,
)
def test_corruption_is_the_same_on_both_backends(process):
    x_0, rows = torch.randint(process.vocab, (6, 33), device=DEVICE), torch.arange(2, 8, device=DEVICE)
    t = torch.linspace(0.05, 0.95, 6, dtype=torch.float64, device=DEVICE)
    for step in (4, torch.tensor(4, device=DEVICE)):
        given = (process, x_0, t, rows, SEEDS[2], step)
        with use_backend("fused"):
            found = corrupt_by_counter(*given)
        assert torch.equal(found, corrupt_by_counter(*given)) and (found != x_0).any()


def test_times_are_drawn_on_the_host(monkeypatch):
    """Also where no kernel can run and the fused backend is selected."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = (torch.arange(8, device=DEVICE), 8, 3, 5, 0.0, 1.0)
    with use_backend("fused"):
        found = sample_times(*given)
    assert all(map(torch.equal, found, sample_times(*given)))


def test_kernel_is_compiled_once():
    """By default Triton specializes a kernel for arguments of 1, multiples of 16 and numbers beyond 31 bits."""
    kernel = (
        fused._uniforms
        if isinstance(fused._uniforms, JITFunction)
        else JITFunction(fused._uniforms.fn, **fused._uniforms.kwargs)
    )
    bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    numbers, result = torch.arange(8), torch.empty(8, dtype=torch.float64)
    kinds = {
        str(bind(numbers[start:], numbers[start:], result, *8 * [value], STEPS=True, BLOCK=128)[1])
        for value in (0, 1, 16, 17, 1 << 31, LOW)
        for start in (0, 1)  # aligned to 16 bytes, and not
    }
    assert len(kinds) == 1


@pytest.mark.parametrize("step", [5, torch.tensor(5, device=DEVICE)], ids=["number", "tensor"])
def test_fake_implementation(step):
    """Shapes and dtypes as torch.compile assumes them (torch.library.opcheck)."""
    steps = (step, 0) if isinstance(step, Tensor) else (None, step)
    torch.library.opcheck(_uniforms, (torch.arange(3, device=DEVICE), *steps, 0, 5, LOW, *key(SEEDS[3])))


COMPILED = """
import sys

import torch

import m2s
from m2s.ops import use_backend
from m2s.samplers import CounterNoise
from m2s.losses.noise import corrupt_by_counter

device, seed = sys.argv[1], (1 << 64) - 3
process = m2s.Uniform(40, m2s.Linear())
x_0, t = torch.randint(40, (4, 9), device=device), torch.linspace(0.1, 0.9, 4, device=device)


def numbers(samples, step):
    noise = CounterNoise(seed, samples, 9, step)
    return noise("token"), noise.once("time"), corrupt_by_counter(process, x_0, t, samples, seed, step)


graphs = []


def keep(graph, inputs):
    graphs.append([str(node.target) for node in graph.graph.nodes])
    return graph


compiled = torch.compile(numbers, backend=keep, fullgraph=True)
samples = torch.arange(4, device=device) + (1 << 31)
for step in (1, 2, 3, 16, torch.tensor(7, device=device), torch.tensor(8, device=device)):
    expected = numbers(samples, step)
    with use_backend("fused"):
        assert all(map(torch.equal, compiled(samples, step), expected)), step
assert len(graphs) <= 3, len(graphs)  # a step, any step, a tensor
assert all(sum("m2s.uniforms" in name for name in names) == 4 for names in graphs), graphs
"""


def test_compiled_noise():
    """Compiled in a separate process: the shape checker of the tests does not compile."""
    done = run_script(COMPILED, DEVICE)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["reference", "fused"])
def test_sample_numbers_in_32_bits(kind):
    samples = torch.tensor([0, 3, 2**31 - 1, -1], device=DEVICE)
    with use_backend(kind):
        assert torch.equal(CounterNoise(5, samples.int(), 3, 1)(0), CounterNoise(5, samples, 3, 1)(0))
