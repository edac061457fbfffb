"""What the projection of a score changes: mean scores against exact ones, and halves of a projection."""

import itertools

import torch

import m2s
from m2s.evaluation.comparison import TIMES, HalfProjected, mean_scores, with_errors

VOCAB, LENGTH = 3, 2
PROCESS = m2s.Uniform(VOCAB, m2s.Linear())
STATES = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
PRIOR = torch.tensor([4, 1, 2, 1, 6, 1, 3, 1, 5], dtype=torch.float64)
PRIOR /= PRIOR.sum()


def exact_log_scores(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """log p_t(x with y at i) - log p_t(x) for every position i and token y, by enumeration."""
    kernel = PROCESS.alpha(t[:1].double()) * torch.eye(VOCAB, dtype=torch.float64)
    kernel = kernel + (1 - PROCESS.alpha(t[:1].double())) / VOCAB
    joint = sum(p * kernel[a].outer(kernel[b]) for p, (a, b) in zip(PRIOR, STATES.tolist(), strict=True))
    first, second = x_t[:, 0], x_t[:, 1]
    here = joint[first, second].log()[:, None]
    return torch.stack([joint[:, second].T.log() - here, joint[first].log() - here], 1)


def test_exact_scores_have_the_mean_one() -> None:
    x_0 = STATES[torch.multinomial(PRIOR, 20_000, replacement=True, generator=torch.Generator().manual_seed(0))]
    found = mean_scores(exact_log_scores, {"exact": m2s.LogScore(PROCESS)}, x_0)
    assert [row["t"] for row in found] == list(TIMES)
    for row in found:
        assert abs(row["exact"] - 1) < 0.05, row
    low = mean_scores(lambda x, t: exact_log_scores(x, t) - 0.3, {"exact": m2s.LogScore(PROCESS)}, x_0)
    assert all(abs(row["exact"] - 2.718281828**-0.3) < 0.05 for row in low)


def test_halves_of_a_projection() -> None:
    """Together the halves are the projection. Where there is a posterior, neither changes the score."""
    generator = torch.Generator().manual_seed(0)
    x_t, t = torch.randint(VOCAB, (50, LENGTH), generator=generator), torch.full((50,), 0.3)
    output = torch.randn(50, LENGTH, VOCAB, generator=generator, dtype=torch.float64) * 2
    head = m2s.LogScore(PROCESS)
    before, after = head.log_score(output, x_t, t), m2s.Projected(head).log_score(output, x_t, t)
    raised = HalfProjected(head, raises=True).log_score(output, x_t, t)
    lowered = HalfProjected(head, raises=False).log_score(output, x_t, t)
    torch.testing.assert_close(raised + lowered, before + after)
    assert (raised >= before).all() and (lowered <= before).all()
    assert (raised > before + 1e-6).any() and (lowered < before - 1e-6).any()
    exact = exact_log_scores(x_t, t)
    for raises in (True, False):
        torch.testing.assert_close(HalfProjected(head, raises).log_score(exact, x_t, t), exact)


def test_differences_are_paired() -> None:
    distances = torch.tensor([[1.0, 1.1, 0.9, 1.2], [1.5, 1.6, 1.4, 1.7]], dtype=torch.float64)
    found = with_errors(distances, ["a", "b"])
    gap = found["differences"]["b - a"]
    assert abs(gap["value"] - 0.5) < 1e-12 and gap["error"] < 1e-12 < found["distances"]["a"]["error"]
    one = found["distances"]["a"]
    assert abs(one["high"] - one["value"] - 1.96 * one["error"]) < 1e-12
