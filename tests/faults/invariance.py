"""Suite 4: sample i is the same bit for bit, whatever else is drawn with it, before it, around it and where."""

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import m2s
from m2s.models import DiT, DiTConfig
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers import SAMPLERS

from .campaign import Suite, suite
from .commands import workplace
from .fork import forked
from .fuzz_api import head, process

COUNT, LENGTH = 6, 5
Draw = Callable[..., Tensor]


def situation(dice: random.Random) -> tuple[nn.Module | Callable[..., Tensor], dict[str, Any]] | None:
    """A network with dropout and options of `m2s.sample`; None where the sampler does not support the head."""
    of = process(dice)
    torch.manual_seed(dice.randrange(99))
    model = DiT(DiTConfig(of.states, width=16, depth=1, heads=2, dropout=0.3))
    with torch.no_grad():
        for weight in model.parameters():  # at the start of training the output is zero, whatever the input
            weight.normal_(std=0.5)
    options = {
        "head": head(dice, of),
        "steps": dice.choice((1, 2, 4)),
        "sampler": dice.choice(("auto", *SAMPLERS)),
        "grid": dice.choice(("linear", "cosine")),
        "seed": dice.randrange(2**40),
        "micro_batch": dice.choice((1, 2, 4)),
        "temperature": dice.choice((1.0, 1.0, 0.7)),
    }
    try:
        m2s.sample(model, shape=(1, LENGTH), **options)
    except (TypeError, ValueError):
        return None
    return model, options


def same_samples(number: int, dice: random.Random) -> str:
    """Draw the same samples in another way.

    Args:
        number: The number of the case; it chooses the way.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    name = list(WAYS)[number % len(WAYS)]

    def work() -> str:
        made = None
        while made is None:
            made = situation(dice)
        model, options = made

        def draw(first: int, count: int) -> Tensor:
            return m2s.sample(model, shape=(count, LENGTH), start=first, **options)

        expected = draw(0, COUNT)
        found = WAYS[name](draw, model, dice)
        bad = [i for i in range(COUNT) if not torch.equal(expected[i], found[i])]
        shown = f"{options['head']}, {options['sampler']}, micro_batch {options['micro_batch']}"
        return f"{name}: {shown}: samples {bad} differ" if bad else ""

    ended = forked(work, workplace())
    return ended.value if ended.code == 0 and ended.value is not None else f"{name}: exit code {ended.code}\n{ended.err}"


def in_batches(draw: Draw, model: Any, dice: random.Random) -> Tensor:
    """In batches of other sizes."""
    first, parts = 0, []
    while first < COUNT:
        count = min(dice.randint(1, 4), COUNT - first)
        parts.append(draw(first, count))
        first += count
    return torch.cat(parts)


def in_another_order(draw: Draw, model: Any, dice: random.Random) -> Tensor:
    """One by one in random order, with other random numbers drawn in between."""
    found = {}
    for i in dice.sample(range(COUNT), COUNT):
        torch.rand(dice.randint(1, 9))
        found[i] = draw(i, 1)
    return torch.cat([found[i] for i in range(COUNT)])


def in_processes(draw: Draw, model: Any, dice: random.Random) -> Tensor:
    """Each half in a process of its own, as after a restart."""
    parts = []
    for first in (0, COUNT // 2):
        ended = forked(lambda first=first: draw(first, COUNT // 2).tolist(), workplace())  # type: ignore[misc]
        assert ended.code == 0, ended.err
        parts.append(torch.tensor(ended.value))
    return torch.cat(parts)


def in_threads(draw: Draw, model: Any, dice: random.Random) -> Tensor:
    """Each third in a thread, all at the same time and with the same network, which is in training mode before."""
    if isinstance(model, nn.Module):
        model.train()
    found: dict[int, Tensor] = {}

    def work(first: int) -> None:
        for i in range(first, first + COUNT // 3):
            found[i] = draw(i, 1)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, COUNT, COUNT // 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if isinstance(model, nn.Module) and not all(module.training for module in model.modules()):
        raise AssertionError("the network is not in training mode afterwards")
    return torch.cat([found[i] for i in range(COUNT)])


def under(context: Callable[[], Any]) -> Callable[[Draw, Any, random.Random], Tensor]:
    """Inside a context of the caller."""

    def way(draw: Draw, model: Any, dice: random.Random) -> Tensor:
        with context():
            return draw(0, COUNT)

    return way


@contextlib.contextmanager
def double() -> Any:
    """float64 as the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


WAYS: dict[str, Callable[[Draw, Any, random.Random], Tensor]] = {
    "batch": in_batches,
    "order": in_another_order,
    "process": in_processes,
    "thread": in_threads,
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "gradient": under(torch.enable_grad),
    "inference": under(torch.inference_mode),
    "default dtype": under(double),
}


def across_devices(number: int, dice: random.Random) -> str:
    """Compare the random bits, and the tokens for the same logits, on the CPU and on a GPU.

    Args:
        number: The number of the case.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    seed, of = dice.randrange(2**60), process(dice)
    step = dice.randrange(9)
    bits = [CounterNoise(seed, torch.arange(4, device=device), 7, step)("token").cpu() for device in ("cpu", "cuda")]
    if not torch.equal(*bits):
        return f"random bits of seed {seed} differ"
    made = head(dice, of)
    table = torch.randn(of.states, of.states, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def draw(device: str) -> Tensor:
        place = table.to(device)
        return m2s.sample(lambda x, t: place[x], made, (4, 5), steps=3, seed=seed % 2**31, device=device).cpu()

    return "" if torch.equal(draw("cpu"), draw("cuda")) else f"{made}: tokens differ for the same logits"


SUITES: list[Suite] = [
    suite("invariance", "the same sample in another way", same_samples, target=400, short=len(WAYS)),
    suite(
        "devices",
        "random bits and tokens on CPU and GPU",
        across_devices,
        target=100,
        short=5,
        skip=lambda: "" if torch.cuda.is_available() else "there is no GPU",
    ),
]
