"""The likelihood of a continuation given a context, against enumeration, and the windows of long texts."""

import math
from collections.abc import Callable

import pytest
import torch

import m2s
from exact_steps import unchecked
from m2s.data import Bytes
from m2s.data.tokenizer.characters import Characters
from m2s.evaluation.likelihood import ESTIMATORS, Options, World, exact_network, random_network
from m2s.evaluation.likelihood.conditional import Request, conditional_nats, encode_pair, is_greedy, windows
from m2s.evaluation.likelihood.world import enumerate_sequences

HEADS = {
    "masks": m2s.Posterior(m2s.Absorbing(2, m2s.LogLinear(1e-2))),
    "uniform": m2s.Posterior(m2s.Uniform(3, m2s.Linear())),
    "score": m2s.LogScore(m2s.Uniform(3, m2s.LogLinear(1e-2))),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("estimator", ["nelbo", "llada"])
def test_a_clamped_context_is_a_smaller_problem(name: str, estimator: str) -> None:
    """The mean is the enumerated value of a network of the continuation alone, to which the context is prepended."""
    head, context, passes = HEADS[name], (1, 0), 250
    if ESTIMATORS[estimator].unsupported(head):
        with pytest.raises(ValueError, match="it does not support"):
            conditional_nats(random_network(head.process, 4), head, [Request((), (0, 0, 0, 0))], estimator=estimator)
        return
    model, options = random_network(head.process, 4, scale=0.4), Options(t_min=0.05)

    def continuation(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return model(torch.cat([torch.tensor([context]).expand(len(x_t), -1), x_t.long()], 1), t)[:, 2:]

    world = World(continuation, head, 2, options)
    exact = world.nats(ESTIMATORS[estimator])
    requests = [Request(context, tuple(x)) for x in world.clean.tolist()]
    with unchecked():
        nats, error = conditional_nats(model, head, requests, passes, 3, 16, estimator, options)
    assert ((nats - exact).abs() < 4.5 * error + 0.01).all()
    assert (error < 0.2 * exact).all()


def test_a_network_that_knows_the_distribution_gives_the_conditional_probability() -> None:
    """Under masks the bound of every order is exact: the estimate is -log p(continuation | context)."""
    head = HEADS["masks"]
    model, clean = exact_network(head, 3), enumerate_sequences(2, 3)
    world = World(model, head, 3)
    joint = dict(zip(map(tuple, clean.tolist()), (-world.nats(ESTIMATORS["nelbo"])).exp().tolist(), strict=True))
    requests = [Request(tuple(x[:2]), tuple(x[2:])) for x in clean.tolist()]
    with unchecked():
        nats, error = conditional_nats(model, head, requests, 200)
    for request, found, noise in zip(requests, nats.tolist(), error.tolist(), strict=True):
        pair = [joint[(*request.context, z)] for z in (0, 1)]
        expected = -math.log(pair[request.continuation[0]] / sum(pair))
        assert found == pytest.approx(expected, abs=4.5 * noise + 0.01)


def test_order_and_batches_change_nothing() -> None:
    head = HEADS["uniform"]

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x_t * power).cumsum(1).double().sin() for power in (1, 2, 3)], -1) * t.double()[:, None, None]

    requests = [Request((0,) * (n % 3), tuple((n + i) % 3 for i in range(1 + n % 4))) for n in range(12)]
    one, _ = conditional_nats(model, head, requests, 3, 0, 16)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    other, _ = conditional_nats(model, head, [requests[place] for place in order], 3, 0, 2)
    torch.testing.assert_close(one[order], other, rtol=1e-12, atol=0)
    assert (conditional_nats(model, head, requests, 3, 1)[0] != one).all()


@pytest.mark.parametrize(("context", "count"), [(0, 3), (2, 3), (1, 23), (9, 4), (0, 11), (9, 17)])
def test_windows_predict_every_token_once(context: int, count: int) -> None:
    """No window is too long, all but the last are given one token, and the last is given as many as fit."""
    length, tokens = 8, tuple(range(context + count))
    parts = list(windows(Request(tokens[:context], tokens[context:]), length))
    assert [token for part in parts for token in part.continuation] == list(tokens[context:])
    for part in parts:
        assert len(part.tokens) <= length
        start = part.continuation[0]
        assert part.context == tokens[start - len(part.context) : start]
    if context + count > length:
        assert len(parts[-1].tokens) == length
        assert all(len(part.context) == 1 for part in parts[1:-1])


def test_the_boundary_is_tokenized_as_in_running_text() -> None:
    """Spaces at the end of the context belong to the continuation, and an empty context is the end token."""
    found = encode_pair(Bytes(), "a b  ", "c")
    assert (bytes(found.context), bytes(found.continuation)) == (b"a b", b"  c")
    assert encode_pair(Bytes(), "", "c").context == (256,)
    assert encode_pair(Characters("ab"), "", "ab").context == ()
    with pytest.raises(ValueError, match="has no tokens"):
        encode_pair(Bytes(), "a", "")


@pytest.mark.parametrize("name", ["log-linear", "cosine"])
def test_greedy_decoding(name: str) -> None:
    """Of all continuations exactly one is greedy: that of an independent loop over the most confident position.

    n of 3 masks are expected at t with alpha_t = 1 - n/3. Over 20 networks, a time of n/3 under the cosine schedule would give
    another continuation for some.
    """
    schedule = m2s.Cosine() if name == "cosine" else m2s.LogLinear(1e-2)
    head, differs = m2s.Posterior(m2s.Absorbing(2, schedule)), 0

    def decode(model: Callable, at: Callable[[float], float]) -> tuple[int, ...]:
        x_t = torch.tensor([[1, 2, 2, 2]])
        for number in (3, 2, 1):
            t = torch.tensor([min(at(number / 3), 1 - 1e-3)])
            p = torch.softmax(model(x_t, t)[..., :2], -1)
            best = max((float(p[0, i].max()), i) for i in range(4) if x_t[0, i] == 2)[1]
            x_t[0, best] = int(p[0, best].argmax())
        return tuple(x_t[0, 1:].tolist())

    def time(share: float) -> float:
        return 1 - 2 / math.pi * math.acos(share) if name == "cosine" else share / 0.99

    for seed in range(20):
        model = random_network(head.process, 4, seed)
        expected = decode(model, time)
        greedy = [
            tuple(x.tolist()) for x in enumerate_sequences(2, 3) if is_greedy(model, head, Request((1,), tuple(x.tolist())))
        ]
        assert greedy == [expected]
        differs += decode(model, lambda share: share) != expected
    assert differs > 0 or name != "cosine"
