"""RADD's any-order loss: against all orders, all subsets and the masked objective, enumerated; and by the command line."""

import itertools
import json

import numpy as np
import pytest
import torch

import m2s
from m2s.cli import main
from m2s.objective import any_order
from oracle import CASES, Oracle

VOCAB, LENGTH = 3, 4
SCHEDULES = [m2s.Linear(), m2s.Cosine()]
NODES, WEIGHTS = (value / 2 for value in np.polynomial.legendre.leggauss(24))
NODES = NODES + 0.5


def logits(x: np.ndarray, seed: int = 3) -> np.ndarray:
    """A network that is not told the time: one row for each of all noisy sequences."""
    table = np.random.default_rng(seed).normal(size=((VOCAB + 1) ** LENGTH, LENGTH, VOCAB + 1))
    return table[x @ (VOCAB + 1) ** np.arange(LENGTH)[::-1]]


def surprise(x_0: np.ndarray, masked: tuple[int, ...]) -> np.ndarray:
    """-log mu_{x_0} at every site where `masked` are hidden."""
    x = x_0.copy()
    x[list(masked)] = VOCAB
    values = logits(x)[:, :VOCAB]
    return np.log(np.exp(values).sum(-1)) - values[np.arange(LENGTH), x_0]


def over_orders(x_0: np.ndarray) -> float:
    """The mean over all orders of the likelihood of a network that fills the sites in that order."""
    each = [
        sum(surprise(x_0, order[place:])[order[place]] for place in range(LENGTH))
        for order in itertools.permutations(range(LENGTH))
    ]
    return float(np.mean(each))


def expected(loss, schedule: m2s.Schedule, x_0: np.ndarray) -> float:
    """The integral over t of E[loss | x_0], over all subsets of masked sites; quadrature of an analytic function."""
    head = m2s.Posterior(m2s.Absorbing(VOCAB, schedule))
    hidden = np.array(list(itertools.product([False, True], repeat=LENGTH)))
    x_t = np.where(hidden, VOCAB, x_0)
    total = 0.0
    for node, weight in zip(NODES, WEIGHTS, strict=True):
        t = torch.full((len(x_t),), node, dtype=torch.float64)
        share = float(1 - schedule.alpha(t[0]))
        chance = np.where(hidden, share, 1 - share).prod(-1)
        tokens = torch.from_numpy(np.tile(x_0, (len(x_t), 1))), torch.from_numpy(x_t)
        total += weight * float(chance @ loss(head, torch.from_numpy(logits(x_t)), *tokens, t).sum(-1).numpy())
    return total


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_it_is_on_average_the_masked_objective_and_the_mean_over_all_orders(schedule: m2s.Schedule) -> None:
    for seed in range(3):
        x_0 = np.random.default_rng(seed).integers(VOCAB, size=LENGTH)
        wanted = over_orders(x_0)
        assert expected(any_order, schedule, x_0) == pytest.approx(wanted, rel=1e-10)
        assert expected(m2s.masked_cross_entropy, schedule, x_0) == pytest.approx(wanted, rel=1e-10)


def test_given_the_number_of_masks_it_is_what_the_authors_write() -> None:
    """k-DCE: k uniform on 1..L, k sites evenly, L/k times their cross entropy. Here k = 0 is drawn too, and counts nothing."""
    head, x_0 = m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear())), np.array([2, 0, 1, 1])
    t = torch.tensor([0.37], dtype=torch.float64)
    for count in range(LENGTH + 1):
        for masked in itertools.combinations(range(LENGTH), count):
            x_t = x_0.copy()
            x_t[list(masked)] = VOCAB
            rows = (torch.from_numpy(row[None]) for row in (logits(x_t), x_0, x_t))
            found = any_order(head, *rows, t)
            wanted = LENGTH / count * surprise(x_0, masked)[list(masked)].sum() if count else 0.0
            assert float(found.sum()) * LENGTH / (LENGTH + 1) == pytest.approx(wanted, rel=1e-12, abs=1e-15)
            assert (found[0][[i not in masked for i in range(LENGTH)]] == 0).all()


def test_exact_beliefs_give_the_entropy() -> None:
    """The oracle's posterior under a mask knows no time: every order spends the entropy of the data law."""
    case = CASES["absorbing-linear"]
    oracle = Oracle(case.noise, 3)
    head, total = m2s.Posterior(case.process), 0.0
    for node, weight in zip(NODES, WEIGHTS, strict=True):
        with np.errstate(divide="ignore"):
            output = torch.from_numpy(np.log(oracle.posterior(oracle.noisy, node)))
        likelihood = oracle.likelihood(oracle.noisy, node)
        clean, noisy = np.nonzero(likelihood)
        x_0, x_t = torch.from_numpy(oracle.clean[clean]), torch.from_numpy(oracle.noisy[noisy])
        t = torch.full((len(clean),), node, dtype=torch.float64)
        loss = any_order(head, output[noisy], x_0, x_t, t).sum(-1).numpy()
        total += weight * float((oracle.law[clean] * likelihood[clean, noisy]) @ loss)
    assert total == pytest.approx(-(oracle.law * np.log(oracle.law)).sum(), rel=1e-10)


def test_its_weight_varies_less() -> None:
    """(L + 1)/n is the mean of 1/lambda given n: the same mean, and no greater second moment at any sequence."""
    head, x_0 = m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear())), np.array([0, 1, 2, 0])
    square = {}
    for loss in (any_order, m2s.masked_cross_entropy):

        def squared(*given, loss=loss) -> torch.Tensor:
            return loss(*given).sum(-1, keepdim=True) ** 2

        square[loss] = expected(squared, head.process.schedule, x_0)
    assert square[any_order] < square[m2s.masked_cross_entropy]


@pytest.mark.parametrize(
    "head",
    [m2s.LogScore(m2s.Absorbing(VOCAB, m2s.Linear())), m2s.Posterior(m2s.Uniform(VOCAB, m2s.Linear()))],
    ids=["score", "uniform"],
)
def test_what_it_is_not_for(head: m2s.Head) -> None:
    x = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(TypeError, match=r"is for m2s\.Posterior over m2s\.Absorbing"):
        any_order(head, torch.zeros(1, 2, head.process.states), x, x, torch.tensor([0.5]))


def test_a_network_that_sees_the_time_is_refused(tmp_path, capsys) -> None:
    asked = ["train", "digits", "--method", "radd", "--head.loss", "any-order", "--steps", "1"]
    with pytest.raises(SystemExit) as error:
        main([*asked, "--network.time", "yes", "--out", str(tmp_path / "run")])
    assert error.value.code == 2 and "--network.time no" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_it_trains_and_is_validated_by_the_bound(tmp_path) -> None:
    asked = ["--batch", "8", "--network.width", "8", "--validation-samples", "4", "--device", "cpu", "--steps", "2"]
    runs = {loss: tmp_path / loss for loss in ("any-order", "masked")}
    for loss, run in runs.items():
        main(["train", "digits", "--method", "radd", "--head.loss", loss, "--optimizer.lr", "1e-12", "--out", str(run), *asked])
    one, two = (
        [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines() if "validation_bits" in line]
        for run in runs.values()
    )
    assert one[-1]["validation_bits"] == pytest.approx(two[-1]["validation_bits"], rel=1e-6)
    assert not m2s.load(runs["any-order"]).model.config.time
