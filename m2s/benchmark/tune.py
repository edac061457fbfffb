"""Every kernel over block sizes and numbers of warps."""

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

BLOCKS, WARPS, LINES = (512, 1024, 2048, 4096, 8192, 16384), (4, 8, 16, 32), (2, 4, 8, 16)
TILES = (512, 1024, 2048, 4096, 8192)  # blocks of which a program has several at once
MOST = 64  # columns for one thread; more would not stay in its registers
HELD, HELD_BY_THREAD = 1 << 15, 128  # columns in registers, at most, of a program and of a thread

Kernel = Callable[[int, int], Any]  # of a block size, or a number of lines, and a number of warps
Kernels = dict[str, tuple[Kernel, tuple[int, ...]]]  # by name, with the block sizes to try


def tune(setting: Setting, parts: tuple[str, ...]) -> dict[str, Any]:
    """Of the kernels of these parts, on as many rows as the operations hand over at once."""
    contest = Comparison(setting)
    if lacking := setting.lacks("fused"):
        contest.skipped.append(f"every kernel: {lacking}")
        return contest.result("kernels over block sizes and warps", {}, [])
    makers = {"loss": _losses, "projection": _projection, "audit": _audit, "draw": _step}
    sizes = {}
    for part in (name for name in makers if name in parts):
        for name, (kernel, blocks) in makers[part](setting).items():
            sizes[name] = blocks
            for block in blocks:
                for warps in (warps for warps in WARPS if blocks is LINES or 32 * warps <= block <= 32 * warps * MOST):
                    contest.enter(f"{name} {block} x {warps}", lambda k=kernel, b=block, w=warps: k(b, w))  # type: ignore[misc]
    contest.run()
    tables = {
        name: {block: {warps: contest.value(f"{name} {block} x {warps}", "median_ms") for warps in WARPS} for block in blocks}
        for name, blocks in sizes.items()
    }
    return contest.result(f"kernels over block sizes and warps, {_rows(setting):,} rows", {}, [], tables=tables)


def _rows(setting: Setting) -> int:
    return min(setting.rows, max(1, CHUNK // setting.columns))


def _logits(setting: Setting) -> tuple[Inputs, Tensor]:
    given = Inputs.draw(setting)
    layer = Layer(*(leaf.detach() for leaf in given.leaves))
    return given, layer.logits(slice(0, _rows(setting)))


def _losses(setting: Setting) -> Kernels:
    given, logits = _logits(setting)
    some = slice(0, len(logits))
    x_0, t = given.x_0[some], given.t[some]
    weight = torch.full_like(t, 1 / len(t))
    uniform, absorbing = m2s.Uniform(setting.vocab, m2s.Linear()), m2s.Absorbing(setting.vocab, m2s.Linear())
    kernels: Kernels = {}
    for head in (m2s.Posterior(uniform), m2s.LogScore(uniform), m2s.Posterior(absorbing)):
        x_t = torch.full_like(x_0, setting.vocab) if head.process is absorbing else given.corrupt(uniform)[some]
        told = row_loss_spec(head, x_0, x_t, t)
        assert told is not None
        kernel = import_module(f"m2s.ops.{told.kind}.triton")
        ready = kernel.prepare(x_t, x_0, told.scalars)
        rest = (logits, *ready, head.process.mask is not None, setting.vocab, weight, setting.operands)
        kernels[told.kind] = (_sized(kernel.row_losses, rest), BLOCKS)
    return kernels


def _sized(rows: Callable[..., Any], rest: tuple[Any, ...]) -> Kernel:
    """The operation on rows with its block and warps to choose: arguments of its own, or bound in a partial launch."""
    if isinstance(rows, functools.partial):
        return lambda block, warps: rows.func(rows.args[0], block, warps, *rest)
    return lambda block, warps: rows(*rest, block=block, warps=warps)


def _projection(setting: Setting) -> Kernels:
    from m2s.ops.project.triton import nearest_posterior

    score, x_t, t, process = scores(setting)
    assert isinstance(process, m2s.Uniform)
    site = SiteCoefficients(*process.at(x_t, t.double()))
    states, mask = process.states, process.mask

    def project(block: int, warps: int) -> Any:
        held = max(1, min(HELD, HELD_BY_THREAD * 32 * warps) // block)
        return nearest_posterior(score, x_t, site, states, mask, False, block=block, held=held, warps=warps)

    return {"project": (project, TILES)}


def _audit(setting: Setting) -> Kernels:
    from m2s.ops.classify.triton import measure_scores

    score, x_t, t, process = scores(setting)
    assert isinstance(process, m2s.Uniform)
    t, s = t.double(), 0.98 * t.double()
    return {
        "audit": (lambda block, warps: measure_scores(score, x_t, t, s, process, 1e-6, False, block=block, warps=warps), TILES)
    }


def _step(setting: Setting) -> Kernels:
    from m2s.ops.reverse_step.triton import draw_token

    given, logits = _logits(setting)
    k, offset = given.corrupt(m2s.Uniform(setting.vocab, m2s.Linear()))[: len(logits)], torch.zeros_like(given.t[: len(logits)])
    u = torch.rand(len(logits), dtype=torch.float64, device=logits.device)
    return {"draw": (lambda lines, warps: draw_token(logits, k, offset, u, setting.vocab, False, lines, warps), LINES)}
