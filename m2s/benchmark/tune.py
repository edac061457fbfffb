"""Tuning: the Triton kernels over block sizes and numbers of warps."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison
from m2s.benchmark.inputs import Inputs
from m2s.benchmark.projection import scores
from m2s.benchmark.setting import Setting
from m2s.losses.score_entropy import row_loss_spec
from m2s.ops.last_layer_chunks import CHUNK, Layer
from m2s.process import SiteCoefficients

# Block sizes in columns, numbers of warps, and lines of the kernel that draws tokens.
BLOCKS, WARPS, LINES = (512, 1024, 2048, 4096, 8192, 16384), (4, 8, 16, 32), (2, 4, 8, 16)
TILES = (512, 1024, 2048, 4096, 8192)  # block sizes of kernels that hold several blocks at once
MAX_COLUMNS = 64  # of one thread; more do not fit its registers
MAX_HELD, MAX_HELD_BY_THREAD = 1 << 15, 128  # columns in the registers of a program and of a thread

Kernel = Callable[[int, int], Any]  # takes a block size, or a number of lines, and a number of warps
Kernels = dict[str, tuple[Kernel, tuple[int, ...]]]  # by name, with the block sizes to try


def tune(setting: Setting, parts: tuple[str, ...]) -> dict[str, Any]:
    """Time the kernels of some parts over block sizes and warps, on as many rows as an operation passes at once.

    Args:
        setting: Sizes and device.
        parts: Names of parts. Those without kernels are ignored.

    Returns:
        `tables`: median milliseconds by kernel, block size and warps.
    """
    comparison = Comparison(setting)
    if reason := setting.why_unavailable("fused"):
        comparison.skipped.append(f"every kernel: {reason}")
        return comparison.result("kernels over block sizes and warps", {}, [])
    makers = {"loss": _losses, "projection": _projection, "classify": _classify, "reverse-step": _step}
    sizes = {}
    for part in (name for name in makers if name in parts):
        for name, (kernel, blocks) in makers[part](setting).items():
            sizes[name] = blocks
            for block in blocks:
                for warps in (warps for warps in WARPS if blocks is LINES or 32 * warps <= block <= 32 * warps * MAX_COLUMNS):
                    comparison.add(f"{name} {block} x {warps}", lambda k=kernel, b=block, w=warps: k(b, w))  # type: ignore[misc]
    comparison.run()

    def median(name: str, block: int, warps: int) -> float | None:
        return comparison.value(f"{name} {block} x {warps}", "median_ms")

    tables = {
        name: {block: {warps: median(name, block, warps) for warps in WARPS} for block in blocks}
        for name, blocks in sizes.items()
    }
    return comparison.result(f"kernels over block sizes and warps, {_rows(setting):,} rows", {}, [], tables=tables)


def _rows(setting: Setting) -> int:
    """Return the rows of one chunk."""
    return min(setting.rows, max(1, CHUNK // setting.columns))


def _logits(setting: Setting) -> tuple[Inputs, Tensor]:
    """Return inputs, and the logits of their first chunk."""
    inputs = Inputs.random(setting)
    layer = Layer(*(leaf.detach() for leaf in inputs.leaves))
    return inputs, layer.logits(slice(0, _rows(setting)))


def _losses(setting: Setting) -> Kernels:
    """Return the kernels of the losses."""
    inputs, logits = _logits(setting)
    some = slice(0, len(logits))
    x_0, t = inputs.x_0[some], inputs.t[some]
    weight = torch.full_like(t, 1 / len(t))
    uniform, absorbing = m2s.Uniform(setting.vocab, m2s.Linear()), m2s.Absorbing(setting.vocab, m2s.Linear())
    kernels: Kernels = {}
    for head in (m2s.Posterior(uniform), m2s.LogScore(uniform), m2s.FactorizedRate(uniform), m2s.Posterior(absorbing)):
        x_t = torch.full_like(x_0, setting.vocab) if head.process is absorbing else inputs.corrupt(uniform)[some]
        spec = row_loss_spec(head, x_0, x_t, t)
        assert spec is not None
        kernel = import_module(f"m2s.ops.{spec.kind}.triton")
        prepared = kernel.prepare(x_t, x_0, spec.scalars)
        rest = (logits, *prepared, head.process.mask is not None, setting.vocab, weight, setting.operands)
        kernels[spec.kind] = (_sized(kernel.row_losses, rest), BLOCKS)
    return kernels


def _sized(rows: Callable[..., Any], rest: tuple[Any, ...]) -> Kernel:
    """Return a kernel that takes its block size and warps, which are arguments of `rows` or bound in a partial."""
    if isinstance(rows, functools.partial):
        return lambda block, warps: rows.func(rows.args[0], block, warps, *rest)
    return lambda block, warps: rows(*rest, block=block, warps=warps)


def _projection(setting: Setting) -> Kernels:
    """Return the kernel of the projection."""
    # Triton is optional.
    from m2s.ops.project.triton import nearest_posterior

    score, x_t, t, process = scores(setting)
    site = SiteCoefficients(*process.at(x_t, t.double()))
    states, mask = process.states, process.mask

    def project(block: int, warps: int) -> Any:
        held = max(1, min(MAX_HELD, MAX_HELD_BY_THREAD * 32 * warps) // block)
        return nearest_posterior(score, x_t, site, states, mask, False, block=block, held=held, warps=warps)

    return {"project": (project, TILES)}


def _classify(setting: Setting) -> Kernels:
    """Return the kernel of the classification."""
    # Triton is optional.
    from m2s.ops.classify.triton import measure_scores

    score, x_t, t, process = scores(setting)
    t, s = t.double(), 0.98 * t.double()
    return {
        "classify": (
            lambda block, warps: measure_scores(score, x_t, t, s, process, 1e-6, False, block=block, warps=warps),
            TILES,
        )
    }


def _step(setting: Setting) -> Kernels:
    """Return the kernel that draws tokens."""
    # Triton is optional.
    from m2s.ops.reverse_step.triton import draw_token

    inputs, logits = _logits(setting)
    k = inputs.corrupt(m2s.Uniform(setting.vocab, m2s.Linear()))[: len(logits)]
    offset = torch.zeros_like(inputs.t[: len(logits)])
    u = torch.rand(len(logits), dtype=torch.float64, device=logits.device)
    return {"reverse-step": (lambda lines, warps: draw_token(logits, k, offset, u, setting.vocab, False, lines, warps), LINES)}
