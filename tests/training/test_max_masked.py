"""Masked positions are selected before a fused last layer, into a number of rows that a CUDA graph fixes.

Sums, gradients and training steps are the same as with all positions, also where a recording had too few rows. Without a GPU
the kernels run in Triton's interpreter, and a substitute takes the place of a graph.
"""

import functools
import itertools
import weakref

import pytest
import torch
from fake_graph import FakeGraph

import m2s
from m2s.distributed import World
from m2s.losses import weighted_sum
from m2s.losses.noise import corrupt_by_counter
from m2s.losses.weighted_sum import skips_unmasked
from m2s.models import dit
from m2s.ops import adamw, philox, use_backend
from m2s.ops.last_layer import Unprojected
from m2s.training import cuda_graph, resolve
from m2s.training import trainer as trainer_module
from m2s.training.build import make_objects
from m2s.training.cuda_graph import CUDAGraphRunner, DirectBackward, GraphedBackward, masked_capacity
from m2s.training.loop import Stopper, finish_step
from m2s.training.trainer import Trainer, balance_micro_batches
from small_runs import random_rows, small, weighted_rows

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 30
HEADS = {
    "masked": m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear())),
    "masked-hybrid": m2s.Posterior(m2s.Hybrid(VOCAB, 0.0)),
    "free": m2s.LogScore(m2s.Absorbing(VOCAB, m2s.LogLinear()), "sigma"),
    "free-hybrid": m2s.LogScore(m2s.Hybrid(VOCAB, 0.0)),
    "factorized": m2s.FactorizedRate(m2s.Absorbing(VOCAB, m2s.Linear())),
}


def situation(head, masks, bias=True):
    """Clean and noisy tokens, times, weights with padding, and the parts of a last layer; all, some or no positions are
    masked."""
    rng = torch.Generator().manual_seed(4)
    x_0 = torch.randint(VOCAB, (3, 4), generator=rng)
    t = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    if masks == "some":
        x_t = head.process.corrupt(x_0, t, rng)
    else:
        x_t = torch.full_like(x_0, VOCAB) if masks == "all" else x_0
    weight = torch.rand(3, 4, generator=rng, dtype=torch.float64)
    weight[(x_t == VOCAB) & (torch.arange(4) == 1)] = 0
    shapes = ((3, 4, 8), (VOCAB + 2, 8), (VOCAB + 2,))
    parts = [torch.randn(shape, generator=rng).to(DEVICE).requires_grad_() for shape in shapes[: 2 + bias]]
    return [value.to(DEVICE) for value in (x_0, x_t, t)], weight.to(DEVICE), parts


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masks", ["some", "none", "all"])
@pytest.mark.parametrize("kind", HEADS)
def test_spare_rows_change_nothing(kind, masks, bias):
    """Sum, terms and gradients: of all positions from logits, of the masked ones, and of those with spare rows."""
    head = HEADS[kind]
    given, weight, parts = situation(head, masks, bias)
    count = int((given[1] == VOCAB).sum())
    assert skips_unmasked(m2s.score_entropy, head) and {"some": 0 < count < 12, "none": count == 0, "all": count == 12}[masks]
    with use_backend("reference"):
        truth, truths = weighted_sum(m2s.score_entropy, head, Unprojected(*parts), *given, weight)
        slopes = torch.autograd.grad(truth, parts)
    for max_masked in (None, max(1, count), count + 1, 12, 20):
        with use_backend("fused"):
            value, terms = weighted_sum(m2s.score_entropy, head, Unprojected(*parts), *given, weight, max_masked)
            found = torch.autograd.grad(3 * value, parts)
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-6, check_dtype=False)
        torch.testing.assert_close(terms, truths, rtol=1e-5, atol=1e-6, check_dtype=False)
        assert not terms.requires_grad and (terms[given[1] != VOCAB] == 0).all() and (terms[weight == 0] == 0).all()
        for slope, wanted in zip(found, slopes, strict=True):
            assert slope.shape == wanted.shape
            size = float(torch.linalg.vector_norm(wanted))
            assert float(torch.linalg.vector_norm(slope / 3 - wanted)) <= 2e-5 * size
        assert (found[0][(given[1] != VOCAB) | (weight == 0)] == 0).all()


@pytest.mark.parametrize("kind", HEADS)
def test_too_few_rows_make_the_sum_nan(kind):
    given, weight, parts = situation(HEADS[kind], "some")
    count = int((given[1] == VOCAB).sum())
    with use_backend("fused"):
        value, terms = weighted_sum(m2s.score_entropy, HEADS[kind], Unprojected(*parts), *given, weight, count - 1)
        gradients = torch.autograd.grad(value, parts)
    assert value.isnan() and terms.sum().isnan() and gradients[1].isnan().any()


def test_which_losses_skip_unmasked_positions():
    masks, mixed = HEADS["masked"], m2s.Posterior(m2s.Hybrid(VOCAB, 0.1))
    assert skips_unmasked(m2s.masked_cross_entropy, masks) and not skips_unmasked(m2s.losses.any_order, masks)
    assert not skips_unmasked(m2s.score_entropy, mixed) and not skips_unmasked(m2s.score_entropy, m2s.LogScore(mixed.process))
    assert not skips_unmasked(m2s.score_entropy, m2s.Ordinal(masks.process))
    assert skips_unmasked(m2s.losses.path_kl, HEADS["factorized"])
    for loss in (m2s.losses.gidd, functools.partial(m2s.losses.gidd_clipped, max_weight=2.0)):
        assert skips_unmasked(loss, HEADS["masked-hybrid"]) and not skips_unmasked(loss, mixed)


def test_the_number_of_reserved_rows():
    assert masked_capacity(8192, 16384) == 9216  # 8192 + 256, in parts of 1024
    assert masked_capacity(16384, 16384) == masked_capacity(16200, 16384) == 16384
    assert masked_capacity(3, 5) == 5 and masked_capacity(0, 1) == 1 and masked_capacity(0, 4096) == 256
    for sites in (1, 7, 32, 1000):
        sizes = [masked_capacity(count, sites) for count in range(sites + 1)]
        assert sizes == sorted(sizes) and all(max(1, count) <= size <= sites for count, size in enumerate(sizes))


def trainer_of(out, rows, **changes):
    fixed = {"device": DEVICE, "kernels": "fused", "compile": "no", "precision": "float32", "network__dropout": 0.0}
    config = resolve(small(out, **{"steps": 12, "batch": 4, **fixed, **changes}))
    return Trainer(config, rows, World.start(DEVICE), *make_objects(config, rows))


@pytest.mark.parametrize("precision", ["float32"] if DEVICE == "cpu" else ["float32", "bf16"])
@pytest.mark.parametrize("micro_batch", [4, 2])
@pytest.mark.parametrize("method", ["mdlm", "sedd-absorb"])
def test_replayed_steps_with_reserved_rows_equal_direct_steps(tmp_path, monkeypatch, method, micro_batch, precision):
    """With no margin, so that recordings become too small several times; with padding."""
    rows, reserved = weighted_rows(), []

    def tight(count, sites):
        assert 0 <= count <= sites == micro_batch * rows.length
        graph = trainer.backward_pass.plain
        reserved.append((max(1, count), getattr(graph, "recorded", False), weakref.ref(graph)))
        return max(1, count)

    monkeypatch.setattr(cuda_graph, "masked_capacity", tight)
    # without balancing, the calls differ in their counts
    monkeypatch.setattr(trainer_module, "balance_micro_batches", lambda t, _: torch.arange(len(t)))
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graph, "CUDAGraphRunner", FakeGraph)
        # interpreted kernels would take long
        for module, name in ((adamw, "uses_triton"), (philox, "uses_triton"), (dit, "is_fused")):
            monkeypatch.setattr(module, name, lambda _: False)
    found, weights = [], []
    for replays in (False, True):
        kernels = "fused" if replays or DEVICE == "cuda" else "reference"
        trainer = trainer_of(tmp_path, rows, method=method, micro_batch=micro_batch, kernels=kernels, precision=precision)
        assert trainer.backward_pass.counts_masked == (DEVICE == "cuda")
        graphed = GraphedBackward(trainer.backward, counts_masked=True, curriculum=False)
        trainer.backward_pass = graphed if replays else DirectBackward(trainer.backward)
        batch, losses = trainer.local_batch(0), []
        while batch is not None:
            made = finish_step(trainer, *trainer.gradient(batch), Stopper())
            batch = made.next_batch
            losses.append(made.loss)
        found.append(losses)
        weights.append(torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach())
    assert len(found[0]) == 12 and found[1] == pytest.approx(found[0], rel=1e-4 if precision == "float32" else 1e-2)
    assert (weights[1] - weights[0]).norm() < (1e-3 if precision == "float32" else 1e-1) * weights[0].norm()
    sizes, recorded, before = zip(*reserved, strict=True)
    assert any(recorded), "no recording became too small"
    assert all(a < b for a, b in itertools.pairwise(sizes)) and graphed.max_masked == sizes[-1]
    assert isinstance(graphed.plain, FakeGraph if DEVICE == "cpu" else CUDAGraphRunner) and graphed.plain.recorded
    assert all(old() is None for old in before[1:]), "an unused recording was not released"


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 12])
def test_every_call_gets_early_and_late_times(micro_batch):
    t = (torch.randperm(12) + torch.rand(12)) / 12
    order = balance_micro_batches(t, 12 // micro_batch)
    assert order.sort().values.tolist() == list(range(12))
    means = t[order].unflatten(0, (-1, micro_batch)).mean(1)
    assert micro_batch == 1 or float(means.max() - means.min()) <= (2 if micro_batch % 2 else 1) / micro_batch / 2 + 1e-6
    if micro_batch % 2 == 0:
        assert float(means.max() - means.min()) <= 1 / 12  # up to the positions of times in their twelfths


def test_one_recording_is_enough_for_nearly_all_steps(tmp_path):
    """Times are spread over a call as over a batch."""
    trainer = trainer_of(
        tmp_path, random_rows(length=128), method="md4", batch=32, micro_batch=4, steps=60, kernels="reference"
    )
    trainer.backward_pass.counts_masked = True
    counts = [max(trainer.local_batch(step).read_masked_counts()) for step in range(60)]
    assert masked_capacity(round(counts[0]), 512) <= 0.75 * 512 and max(counts) <= masked_capacity(round(counts[0]), 512)


@pytest.mark.parametrize("micro_batch", [None, 4, 2])
def test_masked_positions_are_counted_for_every_call(tmp_path, micro_batch):
    rows = random_rows()
    trainer = trainer_of(tmp_path, rows, method="md4", micro_batch=micro_batch)
    trainer.backward_pass.counts_masked = True
    for step in (0, 5):
        local = trainer.local_batch(step)
        calls = zip(*(value.split(micro_batch or 4) for value in (local.batch.x_0, local.t, local.rows)), strict=True)
        noisy = [corrupt_by_counter(trainer.head.process, *call, trainer.config.run.seed, step) for call in calls]
        assert local.read_masked_counts() == [int((x_t == rows.vocab).sum()) for x_t in noisy]
    trainer.backward_pass.counts_masked = False
    assert trainer.local_batch(0).read_masked_counts is None
