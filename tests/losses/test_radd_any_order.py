"""RADD's any-order loss against enumeration of all orders and subsets, and against the masked objective."""

import itertools
import json

import numpy as np
import pytest
import torch
from scipy.special import betainc

import m2s
from m2s.cli import main
from m2s.losses import any_order
from oracle import CASES, Oracle

VOCAB, LENGTH = 3, 4
SCHEDULES = [m2s.Linear(), m2s.Cosine()]
NODES, WEIGHTS = (value / 2 for value in np.polynomial.legendre.leggauss(24))
NODES = NODES + 0.5


TABLE = np.random.default_rng(3).normal(size=((VOCAB + 1) ** LENGTH, LENGTH, VOCAB + 1))
HIDDEN = np.array(list(itertools.product([False, True], repeat=LENGTH)))  # all subsets of masked sites


def place(x: np.ndarray) -> np.ndarray:
    return x @ (VOCAB + 1) ** np.arange(LENGTH)[::-1]


def logits(x: np.ndarray) -> np.ndarray:
    """A network without time: a table with one entry per noisy sequence."""
    return TABLE[place(x)]


def surprise(x_0: np.ndarray, masked: tuple[int, ...]) -> np.ndarray:
    """-log mu_{x_0} at every site, given x_0 with the sites `masked` masked."""
    x = x_0.copy()
    x[list(masked)] = VOCAB
    values = logits(x)[:, :VOCAB]
    return np.log(np.exp(values).sum(-1)) - values[np.arange(LENGTH), x_0]


def over_orders(x_0: np.ndarray) -> float:
    """The NLL of generating site by site, averaged over all orders."""
    each = [
        sum(surprise(x_0, order[place:])[order[place]] for place in range(LENGTH))
        for order in itertools.permutations(range(LENGTH))
    ]
    return float(np.mean(each))


def chances(schedule: m2s.Schedule, t: float) -> np.ndarray:
    """The probability of every subset of masked sites at time t."""
    share = float(1 - schedule.alpha(torch.tensor(t, dtype=torch.float64)))
    return np.where(HIDDEN, share, 1 - share).prod(-1)


def integral(loss, schedule: m2s.Schedule, x_0: np.ndarray, table: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The integral over t in [low, high] of E[loss | x_0], by quadrature over t and enumeration of masked subsets."""
    head = m2s.Posterior(m2s.Absorbing(VOCAB, schedule))
    x_t = np.where(HIDDEN, VOCAB, x_0)
    tokens = torch.from_numpy(np.tile(x_0, (len(x_t), 1))), torch.from_numpy(x_t)
    total = torch.zeros((), dtype=torch.float64)
    for node, weight in zip(low + (high - low) * NODES, (high - low) * WEIGHTS, strict=True):
        t = torch.full((len(x_t),), node, dtype=torch.float64)
        chance = torch.from_numpy(chances(schedule, node))
        total = total + weight * (chance @ loss(head, table[place(x_t)], *tokens, t).sum(-1))
    return total


def expected(loss, schedule: m2s.Schedule, x_0: np.ndarray) -> float:
    """The integral over all times."""
    return float(integral(loss, schedule, x_0, torch.from_numpy(TABLE), 0.0, 1.0))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_any_order_and_masked_objective_equal_the_mean_over_orders(schedule: m2s.Schedule) -> None:
    for seed in range(3):
        x_0 = np.random.default_rng(seed).integers(VOCAB, size=LENGTH)
        wanted = over_orders(x_0)
        assert expected(any_order, schedule, x_0) == pytest.approx(wanted, rel=1e-10)
        assert expected(m2s.masked_cross_entropy, schedule, x_0) == pytest.approx(wanted, rel=1e-10)


def surprise_at_a_mask(schedule: m2s.Schedule, x_0: np.ndarray, table: torch.Tensor, t: float) -> torch.Tensor:
    """E[(1/n) sum_{i masked} -log mu_{x_0^i} | x_0] at time t; 0 for a sequence without masks."""
    log_mu = torch.log_softmax(table[place(np.where(HIDDEN, VOCAB, x_0))][..., :VOCAB], -1)[:, range(LENGTH), x_0]
    weight = chances(schedule, t)[:, None] * HIDDEN / np.maximum(HIDDEN.sum(-1, keepdims=True), 1)
    return -(torch.from_numpy(weight) * log_mu).sum()


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES, m2s.LogLinear(), m2s.LogLinear(0.2), m2s.Exponential(3.0), m2s.Geometric(0.05, 3.0)], ids=str
)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1e-3, 1.0), (1e-3, 1 - 1e-3), (0.2, 0.7)])
def test_difference_to_the_masked_objective_is_a_boundary_term(schedule: m2s.Schedule, low: float, high: float) -> None:
    """masked - any-order = [alpha_t E_t[mean of -log mu_{x_0} over the masked sites]] from t = low to high,
    and likewise for gradients.

    The reason is d/dlambda (1 - lambda) Pr(n) = Pr(n) (n/lambda - (L + 1)). The difference is 0 if lambda covers [0, 1]. For
    the log-linear schedule over all times it is eps E_1[...].
    """
    x_0 = np.random.default_rng(5).integers(VOCAB, size=LENGTH)
    table = torch.from_numpy(TABLE).requires_grad_()
    masked, found = (integral(loss, schedule, x_0, table, low, high) for loss in (m2s.masked_cross_entropy, any_order))
    left = [float(schedule.alpha(torch.tensor(t, dtype=torch.float64))) for t in (low, high)]
    first, last = (alpha * surprise_at_a_mask(schedule, x_0, table, t) for alpha, t in zip(left, (low, high), strict=True))
    difference, ends = masked - found, last - first
    torch.testing.assert_close(difference, ends, rtol=1e-9, atol=1e-13)
    one, two = (torch.autograd.grad(value, table)[0] for value in (difference, ends))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-13)
    if (low, high) == (0, 1) and isinstance(schedule, m2s.LogLinear):
        at_the_end = surprise_at_a_mask(schedule, x_0, table, 1.0).item()
        assert at_the_end > 0.5
        assert difference.item() == pytest.approx(schedule.eps * at_the_end, rel=1e-9)


@pytest.mark.parametrize("eps", [1e-3, 0.2])
def test_weight_of_each_number_of_masks_for_the_log_linear_schedule(eps: float) -> None:
    """With S_n the mean over the sets of n sites of their summed -log mu, Lambda = 1 - eps and I the incomplete beta function:

    all orders: sum_n S_n/n,   masked: sum_n S_n/n I_Lambda(n, L - n + 1),   any-order: sum_n S_n/n I_Lambda(n + 1, L - n + 1).
    """
    schedule, x_0, n = m2s.LogLinear(eps), np.array([1, 0, 2, 1]), np.arange(1, LENGTH + 1)
    sets = [list(itertools.combinations(range(LENGTH), count)) for count in n]
    each = np.array([np.mean([surprise(x_0, hidden)[list(hidden)].sum() for hidden in some]) for some in sets]) / n
    assert each.sum() == pytest.approx(over_orders(x_0), rel=1e-12)
    wanted = {
        m2s.masked_cross_entropy: each @ betainc(n, LENGTH - n + 1, 1 - eps),
        any_order: each @ betainc(n + 1, LENGTH - n + 1, 1 - eps),
    }
    assert wanted[any_order] < wanted[m2s.masked_cross_entropy] < each.sum()
    for loss, value in wanted.items():
        assert expected(loss, schedule, x_0) == pytest.approx(value, rel=1e-12)


def test_loss_for_a_number_of_masks_equals_k_dce() -> None:
    """k-DCE of the paper: k uniform on 1..L, and L/k times the cross entropy of k random sites. Here k = 0 occurs too:
    its loss is 0."""
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


def test_exact_posterior_gives_the_entropy() -> None:
    """The exact posterior of an absorbing process does not depend on time, and its loss is the entropy of the data."""
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
        total += weight * float((oracle.distribution[clean] * likelihood[clean, noisy]) @ loss)
    assert total == pytest.approx(-(oracle.distribution * np.log(oracle.distribution)).sum(), rel=1e-10)


def test_any_order_loss_has_a_smaller_second_moment() -> None:
    """(L + 1)/n is the mean of 1/lambda given n, so the loss has the same mean and a smaller variance."""
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
def test_unsupported_heads_raise(head: m2s.Head) -> None:
    x = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(TypeError, match=r"is for m2s\.Posterior over m2s\.Absorbing"):
        any_order(head, torch.zeros(1, 2, head.process.states), x, x, torch.tensor([0.5]))


def test_network_with_time_is_rejected(tmp_path, capsys) -> None:
    asked = ["train", "digits", "--method", "radd", "--head.loss", "any-order", "--steps", "1"]
    with pytest.raises(SystemExit) as error:
        main([*asked, "--network.time", "yes", "--out", str(tmp_path / "run")])
    assert error.value.code == 2 and "--network.time no" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_validation_uses_the_nelbo(tmp_path) -> None:
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
