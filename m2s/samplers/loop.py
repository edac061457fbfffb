"""`m2s.sample`: draw samples from a network."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.devices import resolve_device
from m2s.errors import UserError
from m2s.heads import Head
from m2s.heads.output import check_model
from m2s.modes import evaluation_mode
from m2s.ops import probe_triton
from m2s.ops.last_layer import Output
from m2s.progress import bar_class
from m2s.rng import draw_seed
from m2s.samplers.autoregressive import generate_autoregressive
from m2s.samplers.base import NamedSampler
from m2s.samplers.diagnostics import Diagnostics
from m2s.samplers.events import StepEvent
from m2s.samplers.micro_batch import SamplingRun, Window, micro_batches, time_dtype
from m2s.samplers.options import SamplingOptions
from m2s.samplers.reverse_process import simulate_reverse_process

logger = logging.getLogger(__name__)


@overload
def sample(
    model: Callable[..., Output],
    head: Head,
    shape: tuple[int, int],
    steps: int = 128,
    sampler: str | NamedSampler = "auto",
    grid: str = "cosine",
    seed: int | None = None,
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
    diagnostics: Literal[False] = False,
    micro_batch: int | None = None,
    window: int | None = None,
    overlap: int | None = None,
    t_min: float = 1e-3,
    lengths: Int[Tensor, "n"] | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Tensor: ...


@overload
def sample(
    model: Callable[..., Output],
    head: Head,
    shape: tuple[int, int],
    steps: int = 128,
    sampler: str | NamedSampler = "auto",
    grid: str = "cosine",
    seed: int | None = None,
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
    *,
    diagnostics: Literal[True],
    micro_batch: int | None = None,
    window: int | None = None,
    overlap: int | None = None,
    t_min: float = 1e-3,
    lengths: Int[Tensor, "n"] | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> tuple[Tensor, Diagnostics]: ...


@overload
def sample(
    model: Callable[..., Output],
    head: Head,
    shape: tuple[int, int],
    steps: int = 128,
    sampler: str | NamedSampler = "auto",
    grid: str = "cosine",
    seed: int | None = None,
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
    micro_batch: int | None = None,
    window: int | None = None,
    overlap: int | None = None,
    t_min: float = 1e-3,
    lengths: Int[Tensor, "n"] | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Tensor | tuple[Tensor, Diagnostics]: ...


def sample(
    model: Callable[..., Output],
    head: Head,
    shape: tuple[int, int],
    steps: int = 128,
    sampler: str | NamedSampler = "auto",
    grid: str = "cosine",
    seed: int | None = None,
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
    micro_batch: int | None = None,
    window: int | None = None,
    overlap: int | None = None,
    t_min: float = 1e-3,
    lengths: Int[Tensor, "n"] | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Draw samples from a network.

    Sampling starts from the reference distribution of the process at t = 1 and simulates the reverse process to t = 0. A head
    that predicts the next token generates from left to right instead. Every random number is a function of (seed, sample, step,
    site), so sample number i is the same bit for bit whatever else is drawn with it.

    Args:
        model: Any callable `model(x_t, t, condition=None)` with x_t [M, L] and t [M], which returns logits [M, L, >= S] or
            `m2s.Unprojected`. It is called without gradients, in evaluation mode and without the caller's autocast. t is
            float32, or float64 where all parameters are; for a function without parameters it has torch's default dtype.
        head: What the output means, such as `m2s.Posterior(process)`.
        shape: (n, L), the number of samples and their length.
        steps: Calls of the network for each sample. `analytic` makes one more, the samplers with a corrector more. In
            autoregressive generation there is one call for each token.
        sampler: A name in `m2s.samplers.SAMPLERS`, or an object such as `m2s.samplers.Remasking(strength=0.3)`. "auto" is
            `m2s.samplers.default_sampler(head)`.
        grid: Where the times lie, "cosine" or "linear" (`m2s.samplers.GRIDS`).
        seed: Of all randomness, in [0, 2^64). None: drawn from torch's global CPU generator, so that every call draws other
            samples and `torch.manual_seed` repeats them. `Diagnostics.seed` has the number that was used, and the logger
            "m2s.samplers.loop" reports it at level INFO.
        clamp: Tokens that stay as they are, [n, L]; -1 at sites to be drawn.
        condition: A condition for each sample, [n, ...], passed to the network.
        guidance: Strength g of classifier-free guidance. For g != 1 the network is also called without the condition.
        guide: What guidance combines:
            "posterior": mu ∝ mu_c^g mu_u^(1-g);
            "rates": R = R_c^g R_u^(1-g), always used for an unconstrained score unless "step" is given;
            "step": p(x_s) ∝ p_c^g p_u^(1-g), with bayes, ancestral or analytic (D-CFG of UDLM).
        temperature: Sharpens the posterior; 1 leaves it as it is.
        top_p: Keep the smallest set of tokens with this probability.
        top_k: Keep the `top_k` most likely tokens.
        on: Which distribution temperature, top_k and top_p apply to, "posterior" or "leave_one_out".
        batch_size: Samples that take a step together; by default all. It bounds memory and has no effect on the samples.
        start: The number of the first sample.
        callback: Called with a `StepEvent` after every step of every micro-batch.
        diagnostics: Also return `Diagnostics`.
        micro_batch: Rows of every call of the network. Sample i is in row i mod `micro_batch`; other rows are padding. None:
            a number that depends on the length alone, `m2s.samplers.default_micro_batch`. Fewer rows take less memory.
        window: The length that the network was trained on, where L is greater. Windows are filled one after another.
        overlap: Tokens that a window shares with the one before; by default half a window.
        t_min: The network sees times in [t_min, 1 - t_min] only.
        lengths: The length of each sample, [n], for a network that was trained with padding (`model.padding_id`). The result
            is -1 from there on. None: all have length L.
        device: Where the network is called; by default where its parameters are, and the CPU for a function.
        progress: Show a progress bar.

    Returns:
        Tokens, int64 [n, L]. With `diagnostics`, the pair (tokens, `Diagnostics`).

    Raises:
        TypeError: An argument has the wrong type, or the sampler does not support the head. Raised before the network is
            called.
        ValueError: An argument is out of range, the network's output has the wrong shape, or its first or last output is NaN
            or infinite.

    Example:
        >>> head = m2s.Posterior(m2s.Absorbing(27, m2s.Linear()))
        >>> model = m2s.models.DiT(m2s.models.DiTConfig(states=28, width=64, depth=2, heads=2))
        >>> m2s.sample(model, head, (4, 16), steps=8, sampler="ancestral").shape
        torch.Size([4, 16])
    """
    options = SamplingOptions(
        head=head,
        shape=shape,
        steps=steps,
        sampler=sampler,
        grid=grid,
        seed=_known_seed(seed),
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
        lengths=lengths,
    )
    return sample_with_options(model, options, callback, diagnostics, device, progress)


def sample_with_options(
    model: Callable[..., Output],
    options: SamplingOptions,
    callback: Callable[[StepEvent], None] | None = None,
    diagnostics: bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Any:
    """Draw samples with options that are already validated.

    Args:
        model: The network; see `sample`.
        options: All options that a sample depends on.
        callback: Called with a `StepEvent` after every step of every micro-batch.
        diagnostics: Also return `Diagnostics`.
        device: Where the network is called; by default where its parameters are.
        progress: Show a progress bar.

    Returns:
        Tokens, int64 [n, L]. With `diagnostics`, the pair (tokens, `Diagnostics`).

    Raises:
        TypeError: The model is not callable, or is an objective in place of a network.
        ValueError: The network has no embedding for the mask, or its output has the wrong shape.
    """
    if not callable(model):
        raise TypeError(f"model must be a network, callable as model(x_t, t, condition=None), not {model!r}")
    check_model(model, options.head.process)
    if options.lengths is not None and getattr(model, "padding_id", None) is None:
        reason = "the network has no padding_id, so it would read padding as tokens"
        raise UserError(option="lengths", reason=reason, hint="train it on padded sequences, as m2s.fit does")
    device = _device_of(model) if device is None else torch.device(resolve_device(str(device)))
    probe_triton(device)
    run = SamplingRun(model, options, callback, Diagnostics(options.seed) if diagnostics else None, device, time_dtype(model))
    with evaluation_mode(model), independent_of_caller(device):
        tokens = _fill_windows(run, progress)
    return tokens if run.log is None else (tokens, run.log)


@contextlib.contextmanager
def independent_of_caller(device: torch.device) -> Iterator[None]:
    """Compute without gradients and without the caller's autocast and inference mode.

    Autocast would round the network's output, and so change samples. Tensors that are made in inference mode cannot be used in
    training. A process caches some of its tables, so it would hold such tensors after sampling.

    Args:
        device: Where the network is called.

    Yields:
        None.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in {device.type, "cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _fill_windows(run: SamplingRun, progress: bool) -> Int[Tensor, "n L"]:
    """Fill every window of every batch. A window is given the tokens that it shares with the one before."""
    options = run.options
    fill = generate_autoregressive if options.head.generates_left_to_right else simulate_reverse_process
    n, length = options.shape
    # The device is named, because the caller may have set another default.
    clamp = torch.full((n, length), -1, device="cpu") if options.clamp is None else options.clamp.long().cpu()
    padded = None if options.lengths is None else torch.arange(length, device="cpu") >= options.lengths.cpu().unsqueeze(-1)
    if padded is not None:
        clamp = clamp.masked_fill(padded, 0)  # any token: the network sees padding there
    tokens = clamp.clone()
    firsts = range(0, n, options.batch_size or n)
    several = len(firsts) > 1  # then the bar counts batches, otherwise steps
    for first in bar_class()(firsts, desc="sampling", unit="batch", disable=not progress or not several):
        rows = slice(first, min(first + firsts.step, n))
        samples = torch.arange(options.start + rows.start, options.start + rows.stop, device="cpu")
        condition = None if options.condition is None else options.condition[rows]
        for number, sites in enumerate(options.windows()):
            hidden = None if padded is None else padded[rows, sites]
            window = Window(samples, tokens[rows, sites], condition, number, sites, hidden)
            batches = list(micro_batches(window, options.call_rows, run.device))
            fill(run, batches, progress and not several)
            tokens[rows, sites] = torch.cat([batch.x[batch.requested] for batch in batches]).cpu()
    if padded is not None:
        tokens.masked_fill_(padded, -1)
    if tokens.numel() and int(tokens.max()) >= options.head.process.vocab:
        raise ValueError(
            "a sample ends with a mask: the network's output gives no valid distribution, for example because scores overflow"
        )
    return tokens.to(run.device)


def _known_seed(seed: int | None) -> int:
    """The seed that was given, or one that is drawn and logged."""
    if seed is not None:
        return seed
    drawn = draw_seed()
    logger.info("m2s.sample uses seed=%d, drawn from torch's generator", drawn)
    return drawn


def _device_of(model: object) -> torch.device:
    """The device of the model's parameters; the CPU where there are none."""
    if isinstance(model, torch.nn.Module):
        parameter = next(model.parameters(), None)
        if parameter is not None:
            return parameter.device
    return torch.device("cpu")
