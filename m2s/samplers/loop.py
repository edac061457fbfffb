"""The loop that all samplers share: noise, network, belief, next state. It knows none of them by name."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from m2s import validation
from m2s.devices import resolve_device
from m2s.heads import Head
from m2s.heads.output import call_model, check_model
from m2s.modes import evaluation_mode
from m2s.ops import probe_triton
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.last_layer import Output, Unprojected
from m2s.process import Process
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.diagnostics import Diagnostics
from m2s.samplers.options import MICRO_BATCH, SamplingOptions
from m2s.samplers.prediction import Prediction

LAST = 0xFFFFFFF0  # the step number of what is drawn after the last step


class StepEvent(NamedTuple):
    """What a callback sees: one step of some samples, `samples` their indices."""

    number: int
    steps: int
    samples: Tensor  # [B]
    t: Tensor  # [B]
    s: Tensor  # [B]
    x_t: Tensor  # [B, L], or the window of it that is being filled
    x_s: Tensor  # [B, L]
    prediction: Prediction  # from left to right, with a cache: of the sites that have been drawn; NaN elsewhere
    window: slice  # which sites these are
    length: int  # of the whole


class Trajectory:
    """A callback that keeps every state: `m2s.sample(..., callback=trajectory)`, then `trajectory.states` [steps + 1, n, L].

    Sites of a window that is yet to come are -1. A sample that needed fewer steps stays as it was; masks that are drawn after
    the last step are still masks here.
    """

    def __init__(self) -> None:
        self._seen: dict[int, list[Tensor]] = {}

    def __call__(self, step: StepEvent) -> None:
        for row, sample in enumerate(step.samples.tolist()):
            states = self._seen.setdefault(sample, [torch.full((step.length,), -1)])
            if step.number == 0:
                states[-1][step.window] = step.x_t[row].cpu()
            states.append(states[-1].clone())
            states[-1][step.window] = step.x_s[row].cpu()

    @property
    def states(self) -> Int[Tensor, "M n L"]:
        most = max(map(len, self._seen.values()))
        rows = [torch.stack(states + states[-1:] * (most - len(states))) for _, states in sorted(self._seen.items())]
        return torch.stack(rows, 1)


@torch.no_grad()
def sample(
    model: Callable[..., Output],
    head: Head,
    shape: tuple[int, int],
    steps: int = 128,
    sampler: str | Sampler = "auto",
    grid: str = "cosine",
    seed: int = 0,
    clamp: Int[Tensor, "n L"] | None = None,
    condition: Tensor | None = None,
    guidance: float = 1.0,
    guide: Literal["posterior", "rates", "step"] = "posterior",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    on: Literal["posterior", "leave_one_out"] = "posterior",
    batch_size: int | None = None,
    start: int = 0,
    callback: Callable[[StepEvent], None] | None = None,
    diagnostics: bool = False,
    micro_batch: int = MICRO_BATCH,
    window: int | None = None,
    overlap: int | None = None,
    t_min: float = 1e-3,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Any:
    """`shape[0]` samples of `shape[1]` tokens, int64; with `diagnostics`, also what happened on the way.

    model         any callable (x_t [B, L], t [B], condition=None) -> output, or m2s.Unprojected; from left to right, one with
                  a cache of keys and values (`new_cache`, as a causal DiT has) is called on new sites alone
    steps         calls of the network for each sample (predictor-corrector and the released sampler make a few more)
    sampler       a name (see m2s.samplers.SAMPLERS) or an object such as m2s.samplers.Euler(); "auto": bayes for a posterior, for
                  a free score analytic, or tau_leaping where rates are tabulated
    grid          "linear" or "cosine": where the times lie
    seed, start   sample number i, counted from `start`, is the same whatever the batch, the process or the run it is drawn in
    clamp         [n, L]: tokens that stay as they are, -1 where free
    condition     [n, ...], handed to the network row by row; with guidance g != 1 the network is also called without, and
                  mu ∝ mu_c^g mu_u^(1-g), with guide="rates" R = R_c^g R_u^(1-g), with guide="step" (bayes, ancestral,
                  analytic) p(x_s) ∝ p_c^g p_u^(1-g), the distributions of one step, as in UDLM's D-CFG
    temperature, top_k, top_p   sharpen the posterior, or the leave-one-out law (`on`)
    batch_size    samples that move together (callback and memory), but from left to right, where micro-batches go one after
                  another; the network always sees `micro_batch` of them, padded, in places that belong to their number, so
                  that the choice of a matrix kernel cannot change a sample
    callback      called with a `Step` after every step of every micro-batch
    window        the length the network was trained on, where shape[1] is longer: windows are filled one after another, each
                  given the last `overlap` tokens (half a window) of the one before
    t_min         the network never sees a time outside [t_min, 1 - t_min]
    device        where it is called; by default where its parameters are, and the CPU where they cannot be seen (a function)
    """
    if not callable(model):
        raise TypeError(f"model must be a network, callable as model(x_t, t, condition=None), not {model!r}")
    options = SamplingOptions(
        head=head,
        shape=shape,
        steps=steps,
        sampler=sampler,
        grid=grid,
        seed=seed,
        clamp=clamp,
        condition=condition,
        guidance=guidance,
        guide=guide,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        on=on,
        batch_size=batch_size,
        start=start,
        micro_batch=micro_batch,
        window=window,
        overlap=overlap,
        t_min=t_min,
    )
    check_model(model, head.process)
    device = _device_of(model) if device is None else torch.device(resolve_device(str(device)))
    probe_triton(device)
    run = _Run(model, options, callback, Diagnostics() if diagnostics else None, device)
    with evaluation_mode(model):
        out = _fill(run, options, progress)
    return (out, run.log) if run.log is not None else out


def _fill(run: "_Run", options: SamplingOptions, progress: bool) -> Int[Tensor, "n L"]:
    """Every batch, and in each every window."""
    (n, length), clamp, condition = options.shape, options.clamp, options.condition
    fixed = torch.full((n, length), -1) if clamp is None else clamp.long().cpu()
    out = fixed.clone()
    groups = range(0, n, options.batch_size or n)
    for first in tqdm(groups, desc="sampling", unit="batch", disable=not progress or len(groups) < 2):
        at = slice(first, min(first + groups.step, n))
        for number, span in enumerate(options.windows()):
            out[at, span] = run(
                torch.arange(options.start + at.start, options.start + at.stop),
                out[at, span],
                None if condition is None else condition[at],
                number,
                span,
                progress and len(groups) < 2,
            )
    return out.to(run.device)


class _Run:
    """What stays the same over all batches of a call."""

    def __init__(
        self,
        model: Callable[..., Output],
        options: SamplingOptions,
        callback: Callable[[StepEvent], None] | None,
        log: Diagnostics | None,
        device: torch.device,
    ) -> None:
        self.model, self.options, self.callback, self.log, self.device = model, options, callback, log, device
        self.head, self.sampler, self.logits_processor, self.t_min = (
            options.head,
            options.chosen,
            options.logits_processor,
            options.t_min,
        )

    def __call__(
        self, samples: Tensor, fixed: Tensor, condition: Tensor | None, window: int, span: slice, progress: bool
    ) -> Tensor:
        """One window of one batch."""
        groups = list(self._micro_batches(samples, fixed, condition, window, span))
        walk = [(number, group) for group in groups for number in range(len(group.plan.t) + 1)]
        if not self.sampler.left_to_right:  # which holds the cache of one micro-batch at a time
            walk.sort(key=lambda at: at[0])
        for number, group in tqdm(walk, desc="sampling", unit="step", disable=not progress):
            if number < len(group.plan.t):
                self._step(group, number)
            else:
                self._finish(group)
                group.networks.clear()
        return torch.cat([group.x[group.real] for group in groups]).cpu()

    def _micro_batches(
        self, samples: Tensor, fixed: Tensor, condition: Tensor | None, window: int, span: slice
    ) -> Iterator["_Group"]:
        """Sample i is row i mod size of a batch of fixed size; rows that no sample has are filled and thrown away."""
        size = self.options.micro_batch
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
            yield self._begin(_Group(numbers, real, clamp.to(self.device), given, window, span))

    def _begin(self, group: "_Group") -> "_Group":
        """A draw from the reference distribution at t = 1 (all masks where the mask is absorbing), and the plan."""
        noise = self._noise(group, 0)
        u = noise("start")
        group.x = torch.where(group.free, draw_categorical(self.head.process.reference().to(u), u), group.clamp)
        plan = self.sampler.plan(self.options.steps, self.options.grid, group.free.sum(-1), self.options.acts_as, noise)
        last = plan.s <= 0
        group.ends = list(zip(last.any(-1).tolist(), last.all(-1).tolist(), strict=True))  # here, once: a host read waits
        if self.options.acts_as.predicts_score:
            # The last step inverts the noise of the score, so both must be of one time: that which the network sees.
            plan = plan._replace(t=torch.where(last, plan.t.clamp(min=self.t_min), plan.t))
        group.plan = plan
        conditions = [group.condition] if self.logits_processor.guidance == 1 else [group.condition, None]
        group.networks = [_Network(self.model, given, self.head.process) for given in conditions]
        return group

    def _noise(self, group: "_Group", step: int) -> CounterNoise:
        return CounterNoise(self.options.seed, group.numbers, group.clamp.shape[1], step, group.window)

    def _belief(self, group: "_Group", t: Tensor, limit: bool, site: Tensor | None = None) -> Prediction:
        """Of all sites, or of one of each sample and those that were asked for before."""
        seen = t.clamp(self.t_min, 1 - self.t_min).to(torch.get_default_dtype())
        shown = self.head.network_input(group.x)
        output, *without = [network(shown, seen, site) for network in group.networks]
        believed = t.clamp(max=1 - self.t_min) if limit else t
        return Prediction(
            self.head, output, group.x, believed, self.logits_processor, without[0] if without else None, group.free
        )

    def _step(self, group: "_Group", number: int) -> None:
        plan = group.plan
        t, s, mask = plan.t[number], plan.s[number], self.head.process.mask
        site = group.x.eq(mask).long().argmax(-1) if self.sampler.left_to_right and mask is not None else None
        prediction = self._belief(group, t, self.sampler.open_start or self.head.open_start, site)
        before = group.x
        move = Move(t, s, None if plan.reveal is None else plan.reveal[number])
        after = self._after(prediction, move, self._noise(group, number + 1), group.ends[number])
        group.x = torch.where(group.free, after, group.clamp)
        if self.log is not None:
            self.log.add(number, prediction, move, group.x, group.real)
        if self.callback is not None:
            kept = group.real
            rows = (group.numbers[kept], t[kept], s[kept], before[kept], group.x[kept])
            self.callback(StepEvent(number, len(plan.t), *rows, prediction.rows(kept), group.span, self.options.shape[1]))
            for network in group.networks:
                network.leave()

    def _after(self, prediction: Prediction, move: Move, noise: CounterNoise, ends: tuple[bool, bool]) -> Tensor:
        """One step of the plan. Where it leads to s = 0, for some samples or for all (`ends`), it removes all noise."""
        some, every = ends
        if not some or self.sampler.left_to_right:
            return self.sampler.step(prediction, move, noise)
        last = self.sampler.last_step(prediction, noise)
        return last if every else torch.where((move.s <= 0).unsqueeze(-1), last, self.sampler.step(prediction, move, noise))

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
        prediction = self._belief(group, t, False)
        (token,) = prediction.map(lambda part, u: (draw_categorical(part.last_step(), u),), self._noise(group, LAST)("last"))
        group.x = torch.where(left, token, group.x)


class _Group:
    """One micro-batch on its way."""

    x: Tensor
    plan: Plan
    ends: list[tuple[bool, bool]]  # of each step: whether it leads to s = 0 for some sample, and for all
    networks: list["_Network"]  # with the condition, and under guidance without it

    def __init__(self, numbers: Tensor, real: slice, clamp: Tensor, condition: Tensor | None, window: int, span: slice) -> None:
        self.numbers, self.real, self.clamp, self.condition = numbers, real, clamp, condition
        self.window, self.span = window, span
        self.free = clamp < 0


class _Network:
    """The network under one condition, as one micro-batch calls it.

    Where a sampler reads one site of each sample and the network has a cache, it is called on that site alone, given the keys
    and values of those before. A sample whose cached sites are not those before (a prompt, tokens given further on, a token
    that changed) is gone through as a whole first. Neither that nor any shape depends on the other samples.
    """

    cached: Tensor  # [B, L]: the tokens that the cache was made of, -1 past them

    def __init__(self, model: Callable[..., Output], condition: Tensor | None, process: Process) -> None:
        self.model, self.condition, self.process = model, condition, process
        self.cache: Tensor | None = None  # [layers, 2, B, ...]
        self.said: Tensor | None = None  # [B, L, ...]: of the sites that were asked for; NaN elsewhere

    def __call__(self, x_t: Int[Tensor, "B L"], t: Tensor, site: Int[Tensor, "B"] | None) -> Output:
        if site is not None and self.cache is None and hasattr(self.model, "new_cache"):
            self.cache, self.cached = self.model.new_cache(*x_t.shape), torch.full_like(x_t, -1)
        if site is None or self.cache is None:
            return self._call(x_t, t)
        at, sites = site.unsqueeze(-1), torch.arange(x_t.shape[1], device=x_t.device)
        lost = ((x_t != self.cached) & (sites < at)).any(-1)
        if bool(lost.any()):
            whole = torch.zeros_like(self.cache)
            self._call(x_t, t, cache=whole, at=sites.expand_as(x_t))
            self.cache[:, :, lost] = whole[:, :, lost]
        output = self._call(x_t.gather(1, at), t, cache=self.cache, at=at)
        self.cached = x_t.masked_fill(sites > at, -1)
        return self._among_all(output, at, x_t.shape[1])

    def leave(self) -> None:
        """What was said so far to who may keep it: the next step goes on in a copy."""
        self.said = None if self.said is None else self.said.clone()

    def _among_all(self, output: Output, at: Int[Tensor, "B 1"], length: int) -> Output:
        """What was said of one site, in its place among all."""
        new = output.hidden if isinstance(output, Unprojected) else output
        if self.said is None:
            self.said = new.new_full((len(new), length, new.shape[-1]), torch.nan)
        self.said.scatter_(1, at.unsqueeze(-1).expand_as(new), new)
        return Unprojected(self.said, output.weight, output.bias) if isinstance(output, Unprojected) else self.said

    def _call(self, x_t: Tensor, t: Tensor, **cached: Tensor) -> Output:
        """What the network says, looked at while it still has its shape."""
        output, states = call_model(self.model, self.process, x_t, t, self.condition, **cached), self.process.states
        if isinstance(output, Unprojected):
            rows = output.weight.shape[0]
            if output.hidden.shape[:-1] != x_t.shape or rows < states:
                raise ValueError(
                    f"the network's output has shape {[*output.hidden.shape[:-1], rows]} (its last layer has {rows} rows), "
                    f"expected {[*x_t.shape, states]} or more columns{validation.missing_mask_hint(rows, states)}"
                )
            validation.not_nan("the network's output", output.hidden)
        else:
            validation.probabilities("the network's output", output, x_t, states, wider=True)
        return output


def _device_of(model: object) -> torch.device:
    if isinstance(model, torch.nn.Module):
        parameter = next(model.parameters(), None)
        if parameter is not None:
            return parameter.device
    return torch.device("cpu")
