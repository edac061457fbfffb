"""The order of training examples: every epoch is a permutation, a function of the seed and the step alone."""

import pytest
import torch

import m2s.data

GOLDEN = [8, 6, 4, 1, 3, 9, 5, 2, 0, 7]


@pytest.mark.parametrize("size", [*range(1, 35), 1000, 4097])
def test_every_epoch_is_a_permutation(size):
    epochs = m2s.data.batch_indices(size, 3 * size, 0, seed=1).reshape(3, size)
    assert torch.equal(epochs.sort(1).values, torch.arange(size).expand(3, size))
    if size > 10:
        assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], torch.arange(size))
        assert not torch.equal(epochs[0], m2s.data.batch_indices(size, size, 0, seed=2))


def test_the_order_depends_on_seed_and_step_alone():
    stream = m2s.data.batch_indices(100, 12 * 30, 0, seed=5).reshape(30, 12)
    for start, world in ((0, 1), (17, 1), (3, 2), (8, 3), (29, 12)):
        readers = [m2s.data.batches(100, 12, seed=5, start=start, rank=rank, world=world) for rank in range(world)]
        for step in range(start, 30):
            assert torch.equal(torch.cat([next(reader) for reader in readers]), stream[step])
    assert m2s.data.batch_indices(10, 10, 0, seed=0).tolist() == GOLDEN  # a later version must resume a run in the same order
    huge = m2s.data.batch_indices(10**12, 8, 10**11, seed=3)
    assert len(huge.unique()) == 8 and huge.min() >= 0 and huge.max() < 10**12


def test_every_example_is_equally_likely_at_every_position():
    orders = torch.stack([m2s.data.batch_indices(6, 6, 0, seed=seed) for seed in range(1800)])
    counts = torch.nn.functional.one_hot(orders, 6).sum(0)  # [position, item], 300 each
    assert (counts - 300).abs().max() < 5 * (1800 * 5 / 36) ** 0.5
    pairs = torch.bincount(6 * orders[:, 0] + orders[:, 1], minlength=36).reshape(6, 6)
    assert pairs.diagonal().sum() == 0 and (pairs[~torch.eye(6).bool()] - 60).abs().max() < 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 0), "size"),
        ((5, 0, 0), "global_batch"),
        ((5, 4, -1), "step"),
        ((5, 4, 0, -1), "seed"),
        ((5, 4, 0, 0, 2, 2), "rank"),
        ((5, 4, 0, 0, 0, 3), "multiple of world = 3"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        m2s.data.batch_indices(*arguments)
