"""The loop that all samplers share: noise, network, belief, next state. It knows none of them by name."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from m2s import check
from m2s.belief import Head
from m2s.belief.output import Output, Unprojected
from m2s.sampler.base import Move, Plan, Sampler
from m2s.sampler.belief import Belief, Shaping
from m2s.sampler.diagnostics import Diagnostics
from m2s.sampler.draw import draw
from m2s.sampler.grid import GRIDS
from m2s.sampler.random import Noise
from m2s.sampler.registry import find

MICRO_BATCH = 16
LAST = 0xFFFFFFF0  # the step number of what is drawn after the last step


class Network(Protocol):
    def __call__(self, x_t: Tensor, t: Tensor, condition: Any = None) -> Output: ...


class Step(NamedTuple):
    """What a callback sees: one step of some samples, `samples` their indices."""

    number: int
    steps: int
    samples: Tensor  # [B]
    t: Tensor  # [B]
    s: Tensor  # [B]
    x_t: Tensor  # [B, L]
    x_s: Tensor  # [B, L]
    belief: Belief


class Trajectory:
    """A callback that keeps every state: `m2s.sample(..., callback=trajectory)`, then `trajectory.states` [steps + 1, n, L]."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, Tensor]] = {}

    def __call__(self, step: Step) -> None:
        for row, sample in enumerate(step.samples.tolist()):
            states = self._seen.setdefault(sample, {})
            if step.number == 0:
                states[0] = step.x_t[row].cpu()
            states[step.number + 1] = step.x_s[row].cpu()

    @property
    def states(self) -> Int[Tensor, "M n L"]:
        most = max(max(states) for states in self._seen.values())
        rows = [
            torch.stack([states[min(number, max(states))] for number in range(most + 1)])
            for _, states in sorted(self._seen.items())
        ]
        return torch.stack(rows, 1)


@torch.no_grad()
def sample(
    model: Network,
    head: Head,
    shape: tuple[int, int],
    steps: int = 128,
    sampler: str | Sampler = "bayes",
    grid: str = "cosine",
    seed: int = 0,
    clamp: Int[Tensor, "n L"] | None = None,
    condition: Tensor | None = None,
    guidance: float = 1.0,
    guide: Literal["posterior", "rates"] = "posterior",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    on: Literal["posterior", "leave_one_out"] = "posterior",
    batch_size: int | None = None,
    start: int = 0,
    callback: Callable[[Step], None] | None = None,
    diagnostics: bool = False,
    micro_batch: int = MICRO_BATCH,
    window: int | None = None,
    overlap: int | None = None,
    t_min: float = 1e-3,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Any:
    """`shape[0]` samples of `shape[1]` tokens, int64; with `diagnostics`, also what happened on the way.

    model         any callable (x_t [B, L], t [B], condition=None) -> output, or m2s.Unprojected
    steps         calls of the network for each sample (predictor-corrector and the released sampler make a few more)
    sampler       a name (see m2s.sampler.SAMPLERS) or an object such as m2s.sampler.Euler()
    grid          "linear" or "cosine": where the times lie
    seed, start   sample number i, counted from `start`, is the same whatever the batch, the process or the run it is drawn in
    clamp         [n, L]: tokens that stay as they are, -1 where free
    condition     [n, ...], handed to the network row by row; with guidance g != 1 the network is also called without, and
                  mu ∝ mu_c^g mu_u^(1-g), or with guide="rates" R = R_c^g R_u^(1-g)
    temperature, top_k, top_p   sharpen the posterior, or the leave-one-out law (`on`)
    batch_size    samples that move together (callback and memory); the network always sees `micro_batch` of them, padded, in
                  places that belong to their number, so that the choice of a matrix kernel cannot change a sample
    callback      called with a `Step` after every step of every micro-batch
    window        the length the network was trained on, where shape[1] is longer: windows are filled one after another, each
                  given the last `overlap` tokens (half a window) of the one before
    t_min         the network never sees a time outside [t_min, 1 - t_min]
    """
    chosen = find(sampler)
    n, length = _shape(shape)
    check.positive_int("steps", steps)
    check.positive_int("start", start, low=0)
    check.positive_int("micro_batch", micro_batch)
    if batch_size is not None:
        check.positive_int("batch_size", batch_size)
    if grid not in GRIDS:
        raise ValueError(f"there is no grid {grid!r}: choose from {', '.join(GRIDS)}")
    check.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    chosen.refuse(head)
    shaping = _shaping(head, condition, guidance, guide, temperature, top_k, top_p, on)
    if not 0 < t_min < 0.5:
        raise ValueError(f"t_min is {t_min}, but it must lie between 0 and 1/2")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed!r}, but it must be an int in [0, 2^64)")
    if start + n > 1 << 32:
        raise ValueError(f"start + n is {start + n}, but samples are numbered below 2^32")
    _check_clamp(clamp, n, length, head.process.vocab)
    if condition is not None and len(condition) != n:
        raise ValueError(f"condition has {len(condition)} rows, but {n} samples were asked for")
    device = torch.device(device) if device is not None else _device_of(model)
    run = _Run(model, head, chosen, steps, grid, seed, shaping, t_min, callback, device, micro_batch)
    run.log = Diagnostics() if diagnostics else None
    size = batch_size or n
    fixed = torch.full((n, length), -1) if clamp is None else clamp.long()
    windows = list(_windows(length, window, overlap))
    out = fixed.clone()
    groups = range(0, n, size)
    for first in tqdm(groups, desc="sampling", unit="batch", disable=not progress or len(groups) < 2):
        at = slice(first, min(first + size, n))
        for number, span in enumerate(windows):
            out[at, span] = run(
                torch.arange(start + at.start, start + at.stop),
                torch.where(fixed[at, span] >= 0, fixed[at, span], out[at, span]),
                None if condition is None else condition[at],
                number,
                progress and len(groups) < 2,
            )
    out = out.to(device)
    return (out, run.log) if run.log is not None else out


class _Run:
    """What stays the same over all batches of a call."""

    def __init__(
        self,
        model: Network,
        head: Head,
        sampler: Sampler,
        steps: int,
        grid: str,
        seed: int,
        shaping: Shaping,
        t_min: float,
        callback: Callable[[Step], None] | None,
        device: torch.device,
        micro_batch: int,
    ) -> None:
        self.model, self.head, self.sampler, self.steps, self.grid = model, head, sampler, steps, grid
        self.seed, self.shaping, self.t_min, self.callback, self.device = seed, shaping, t_min, callback, device
        self.micro_batch = micro_batch
        self.log: Diagnostics | None = None

    def __call__(self, samples: Tensor, fixed: Tensor, condition: Tensor | None, window: int, progress: bool) -> Tensor:
        """One window of one batch."""
        groups = list(self._micro_batches(samples, fixed, condition, window))
        most = max(len(group.plan.t) for group in groups)
        for number in tqdm(range(most), desc="sampling", unit="step", disable=not progress):
            for group in groups:
                if number < len(group.plan.t):
                    self._step(group, number)
        for group in groups:
            self._finish(group)
        return torch.cat([group.x[group.real] for group in groups]).cpu()

    def _micro_batches(self, samples: Tensor, fixed: Tensor, condition: Tensor | None, window: int) -> Iterator["_Group"]:
        """Sample i is row i mod size of a batch of fixed size; rows that no sample has are filled and thrown away."""
        size = self.micro_batch
        low, high = int(samples[0]), int(samples[-1]) + 1
        for first in range(low - low % size, high, size):
            begin, end = max(low, first), min(high, first + size)
            real, rows = slice(begin - first, end - first), slice(begin - low, end - low)
            clamp = torch.zeros(size, fixed.shape[1], dtype=torch.long)
            clamp[real] = fixed[rows]
            given = None
            if condition is not None:
                given = condition.new_zeros(size, *condition.shape[1:])
                given[real] = condition[rows]
                given = given.to(self.device)
            numbers = torch.arange(first, first + size, device=self.device)
            yield self._begin(_Group(numbers, real, clamp.to(self.device), given, window))

    def _begin(self, group: "_Group") -> "_Group":
        """The reference law at t = 1, and the plan."""
        noise = self._noise(group, 0)
        u = noise("start")
        reference = self.head.process.reference().to(u)
        group.x = torch.where(group.free, draw(reference.expand(*u.shape, -1), u), group.clamp)
        group.plan = self.sampler.plan(self.steps, self.grid, group.free.sum(-1), self.head, noise)
        return group

    def _noise(self, group: "_Group", step: int) -> Noise:
        return Noise(self.seed, group.numbers, group.clamp.shape[1], step, group.window)

    def _belief(self, group: "_Group", t: Tensor, limit: bool) -> Belief:
        seen = t.clamp(self.t_min, 1 - self.t_min).to(torch.get_default_dtype())
        output = self._call(group.x, seen, group.condition)
        without = self._call(group.x, seen, None) if self.shaping.guidance != 1 else None
        believed = t.clamp(max=1 - self.t_min) if limit else t
        return Belief(self.head, output, group.x, believed, self.shaping, without, group.free)

    def _call(self, x_t: Tensor, t: Tensor, condition: Tensor | None) -> Output:
        output = self.model(x_t, t) if condition is None else self.model(x_t, t, condition)
        found = output.hidden if isinstance(output, Unprojected) else output
        check.not_nan("the network's output", found)
        return output

    def _step(self, group: "_Group", number: int) -> None:
        plan = group.plan
        t, s = plan.t[number], plan.s[number]
        belief = self._belief(group, t, self.sampler.open_start or self.head.open_start)
        before = group.x
        move = Move(t, s, None if plan.reveal is None else plan.reveal[number])
        after = self.sampler.step(belief, move, self._noise(group, number + 1))
        group.x = torch.where(group.free, after, group.clamp)
        if self.log is not None:
            self.log.add(number, belief, move, group.x, group.real)
        if self.callback is not None:
            kept = group.real
            rows = (group.numbers[kept], t[kept], s[kept], before[kept], group.x[kept])
            self.callback(Step(number, len(plan.t), *rows, belief))

    def _finish(self, group: "_Group") -> None:
        """Masks that are left are drawn from the belief, and counted."""
        if self.head.process.mask is None:
            return
        left = (group.x == self.head.process.mask) & group.free
        if self.log is not None:
            self.log.masks_left += int(left[group.real].sum())
        if not bool(left.any()):
            return
        t = torch.full((len(group.x),), self.t_min, dtype=torch.float64, device=self.device)
        belief = self._belief(group, t, False)
        (token,) = belief.map(lambda part, u: (draw(part.last_step(), u),), self._noise(group, LAST)("last"))
        group.x = torch.where(left, token, group.x)


class _Group:
    """One micro-batch on its way."""

    x: Tensor
    plan: Plan

    def __init__(self, numbers: Tensor, real: slice, clamp: Tensor, condition: Tensor | None, window: int) -> None:
        self.numbers, self.real, self.clamp, self.condition, self.window = numbers, real, clamp, condition, window
        self.free = clamp < 0


def _windows(length: int, window: int | None, overlap: int | None) -> Iterator[slice]:
    """The whole, or windows that share `overlap` tokens with the one before."""
    if window is None:
        if overlap is not None:
            raise ValueError("overlap is for sequences longer than a window: give window too")
        yield slice(0, length)
        return
    check.positive_int("window", window, low=2)
    overlap = window // 2 if overlap is None else overlap
    if not 0 <= overlap < window:
        raise ValueError(f"overlap is {overlap}, but it must lie in 0..{window - 1}, below the window")
    begin = 0
    while True:
        yield slice(begin, min(begin + window, length))
        if begin + window >= length:
            return
        begin += window - overlap


def _shape(shape: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(shape, tuple | list | torch.Size) or len(shape) != 2:
        raise ValueError(f"shape is {shape!r}, but it must be (number of samples, length)")
    for name, value in zip(("shape[0]", "shape[1]"), shape, strict=True):
        check.positive_int(name, value)
    return int(shape[0]), int(shape[1])


def _shaping(
    head: Head,
    condition: Tensor | None,
    guidance: float,
    guide: Literal["posterior", "rates"],
    temperature: float,
    top_k: int | None,
    top_p: float,
    on: Literal["posterior", "leave_one_out"],
) -> Shaping:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, but it must be positive; for the likeliest token use top_k=1")
    if top_k is not None:
        check.positive_int("top_k", top_k)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, but it must lie in (0, 1]")
    if on not in ("posterior", "leave_one_out"):
        raise ValueError(f"on is {on!r}, but it must be 'posterior' or 'leave_one_out'")
    if guide not in ("posterior", "rates"):
        raise ValueError(f"guide is {guide!r}, but it must be 'posterior' or 'rates'")
    shaping = Shaping(temperature, top_k, top_p, on, guidance, guide if head.has_posterior else "rates")
    if guidance != 1 and condition is None:
        raise ValueError(f"guidance is {guidance}, but there is no condition to exaggerate")
    if shaping.sharpens and not (head.has_posterior and shaping.guide == "posterior"):
        raise TypeError("temperature, top_k and top_p sharpen a posterior, and a free score has none: use m2s.Projected(head)")
    return shaping


def _check_clamp(clamp: Tensor | None, n: int, length: int, vocab: int) -> None:
    if clamp is None:
        return
    if not isinstance(clamp, Tensor) or clamp.dtype.is_floating_point or clamp.dtype == torch.bool:
        raise TypeError("clamp must be a torch.Tensor of integers: tokens, and -1 where the site is free")
    if clamp.shape != (n, length):
        raise ValueError(f"clamp has shape {list(clamp.shape)}, but the samples have shape {[n, length]}")
    bad = (clamp < -1) | (clamp >= vocab)
    if bad.any():
        at = check.first(bad)
        raise ValueError(
            f"clamp{list(at)} is {int(clamp[at])}, but it must be a token in 0..{vocab - 1}, or -1 for a free site"
        )


def _device_of(model: object) -> torch.device:
    if isinstance(model, torch.nn.Module):
        parameter = next(model.parameters(), None)
        if parameter is not None:
            return parameter.device
    return torch.device("cpu")
