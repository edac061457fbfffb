"""The autoregressive row: an exact likelihood and an exact sampler, against enumeration over a tiny vocabulary."""

import itertools
import json
import math
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import m2s
from m2s.cli import main
from m2s.errors import UserError
from m2s.evaluation.bpd import dataset_nelbo, summary, table
from m2s.heads import NextToken, Shifted
from m2s.hub.config import from_dict, to_dict
from m2s.losses import next_token_nll, zero_integral
from m2s.models import DiT, DiTConfig, UNet
from m2s.samplers import CounterNoise, Move, Plan, Prediction, StepEvent, Trajectory
from m2s.samplers.autoregressive import Autoregressive
from m2s.training import train
from m2s.training.config import resolve
from small_runs import random_rows, small

K, L = 3, 4
HEAD = NextToken(Shifted(K))


def network(seed: int = 0, states: int = K + 1, **options: object) -> DiT:
    """A small causal network whose every layer has its say."""
    torch.manual_seed(seed)
    model = DiT(DiTConfig(states, width=16, depth=2, heads=2, time=False, causal=True, **options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def everything(vocab: int = K, length: int = L) -> Tensor:
    return torch.tensor(list(itertools.product(range(vocab), repeat=length)))


@torch.no_grad()
def by_hand(model: torch.nn.Module, row: list[int], vocab: int = K) -> float:
    """log p(row): the network is called on each prefix behind the start token by itself, one token at a time."""
    total = 0.0
    for place, token in enumerate(row):
        logits = model(torch.tensor([[vocab, *row[:place]]]), None)[0, -1, :vocab].double()
        total += float(logits[token] - torch.logsumexp(logits, 0))
    return total


@torch.no_grad()
def nll(model: torch.nn.Module, x_0: Tensor) -> Tensor:
    t = torch.full((len(x_0),), 0.5)
    x_t = HEAD.process.corrupt(x_0, t)
    return next_token_nll(HEAD, model(x_t, t), x_0, x_t, t).double().sum(-1)


def test_the_likelihood_is_that_of_one_call_for_each_token() -> None:
    model, x_0 = network(), everything()
    wanted = -torch.tensor([by_hand(model, row) for row in x_0.tolist()], dtype=torch.float64)
    torch.testing.assert_close(nll(model, x_0), wanted, rtol=1e-6, atol=0)


def test_the_likelihoods_of_all_sequences_sum_to_one() -> None:
    assert float((-nll(network(1), everything())).exp().sum()) == pytest.approx(1, abs=1e-6)


def test_no_site_sees_its_own_token_or_what_comes_after() -> None:
    model, (x_0, other) = network(2), torch.randint(K, (2, 1, L), generator=torch.Generator().manual_seed(0))
    for place in range(L):
        changed = torch.cat([x_0[:, :place], other[:, place:]], -1)
        same = [model(HEAD.process.corrupt(x, torch.zeros(1)), None)[:, : place + 1] for x in (x_0, changed)]
        assert torch.equal(*same)


def test_the_process_is_the_same_in_every_form() -> None:
    process, t = HEAD.process, torch.tensor([0.1, 0.9])
    x_0 = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 1]])
    shown = torch.tensor([[K, 0, 1, 2], [K, 2, 2, 1]])
    assert torch.equal(process.corrupt(x_0, t), shown)
    assert torch.equal(process.rows(x_0, t).argmax(-1), shown) and float(process.rows(x_0, t).sum()) == 8
    assert torch.equal(m2s.samplers.draw_categorical(process.rows(x_0, t), torch.rand(2, 4)), shown)
    assert process.reference().tolist() == [0, 0, 0, 1] and float(process.prior_kl(x_0, t).sum()) == 0
    assert process.last_time(1e-3) == 1 - 1e-3
    with pytest.raises(TypeError, match="corrupts nothing"):
        process.columns(x_0, t)


def test_the_bound_is_the_likelihood() -> None:
    """`m2s.elbo` and `m2s evaluate bpd`: no integral, no prior, nothing left to chance."""
    model, x_0 = network(3), everything()
    exact = nll(model, x_0)
    found = m2s.elbo(model, HEAD, x_0, passes=3, loss=zero_integral)
    torch.testing.assert_close(found.nats, exact)
    assert float(found.standard_error.max()) == 0 and float(found.integral.abs().max() + found.prior.abs().max()) == 0
    measured = dataset_nelbo(model, HEAD, x_0, passes=5, batch_size=7)
    assert measured.exact and measured.term("bound").shape == (1, len(x_0))
    torch.testing.assert_close(measured.term("bound")[0], exact)
    result = summary(measured, {})
    assert result["bound"]["perplexity"]["value"] == pytest.approx(math.exp(float(exact.mean()) / L))
    assert result["bound"]["nats"]["error"] is None
    assert result["bound"]["nats"]["rows_error"] == pytest.approx(float(exact.std()) / len(exact) ** 0.5 / L, rel=1e-6)
    text = "\n".join(table(result, "token", exact=True))
    assert "exactly" in text and "integral" not in text and "perplexity" in text


def draws(model: torch.nn.Module, count: int, **options: object) -> Tensor:
    return m2s.sample(model, HEAD, (count, L), sampler="autoregressive", **options)


def test_samples_have_the_law_of_the_network() -> None:
    model, count = network(4), 6000
    distribution = (-nll(model, everything())).exp().numpy()
    seen = np.bincount(draws(model, count, micro_batch=500).numpy() @ K ** np.arange(L)[::-1], minlength=K**L)
    statistic = (
        (seen - count * distribution) ** 2 / (count * distribution)
    ).sum()  # chi-squared of 80 degrees: 99.99% lie below 135
    assert statistic < 135
    assert (
        np.abs(seen / count - distribution).sum() < 1.2 * np.sqrt(2 / math.pi * distribution * (1 - distribution) / count).sum()
    )


def test_samples_begin_with_a_prompt_and_follow_its_law() -> None:
    model, count = network(5), 3000
    clamp = torch.full((count, L), -1)
    clamp[:, :2] = torch.tensor([2, 0])
    found = draws(model, count, micro_batch=500, clamp=clamp)
    assert torch.equal(found[:, :2], clamp[:, :2])
    joint = (-nll(model, everything())).exp().reshape(K, K, K, K)[2, 0]
    distribution = (joint / joint.sum()).flatten().numpy()
    seen = np.bincount((found[:, 2] * K + found[:, 3]).numpy(), minlength=9)
    assert ((seen - count * distribution) ** 2 / (count * distribution)).sum() < 32  # of 8 degrees: 99.99%


def test_the_likeliest_token_each_time() -> None:
    model = network(6)
    row: list[int] = []
    for _ in range(L):
        row.append(int(model(torch.tensor([[K, *row]]), None)[0, -1, :K].argmax()))
    assert draws(model, 3, top_k=1).tolist() == [row] * 3


def test_the_law_that_has_not_seen_the_site_is_the_law() -> None:
    sharp = {"temperature": 0.5, "top_p": 0.9}
    both = [draws(network(6), 20, on=on, **sharp) for on in ("posterior", "leave_one_out")]
    assert torch.equal(*both) and not torch.equal(both[0], draws(network(6), 20))


def test_diagnostics_count_the_tokens_and_no_classes() -> None:
    tokens, log = draws(network(6), 3, diagnostics=True)
    assert torch.equal(tokens, draws(network(6), 3))
    assert log.total("jumps") == 3 * L and log.masks_left == 0 and not any(map(sum, (step.classes for step in log.steps)))


def test_a_sample_depends_on_its_number_and_the_seed_alone() -> None:
    """Not on the batch, on what else is clamped, nor on the steps that are asked for; one call for each token to be drawn."""
    model, calls = network(7), []

    def counted(x_t: Tensor, t: Tensor) -> Tensor:
        calls.append(x_t.shape)
        return model(x_t, t)

    clamp = torch.full((20, L), -1)
    clamp[3, :3], clamp[4], clamp[17, 1] = 1, 2, 0
    whole = m2s.sample(counted, HEAD, (20, L), sampler="autoregressive", clamp=clamp, steps=1)
    assert set(calls) == {(16, L)} and len(calls) == 2 * L
    assert torch.equal(draws(model, 20, clamp=clamp, batch_size=3, steps=9), whole)
    alone = [draws(model, 1, start=i, clamp=clamp[i : i + 1]) for i in range(20)]
    assert torch.equal(torch.cat(alone), whole)
    assert not torch.equal(draws(model, 20, clamp=clamp, seed=1), whole)
    assert torch.equal(whole[4], clamp[4]) and (whole < K).all()


# --- the cache of keys and values -----------------------------------------------------------------------------------------

LONG = 11
PROMPT = torch.full((20, LONG), -1)
PROMPT[:, :4] = torch.tensor([2, 0, 1, 1])
RAGGED = torch.full((20, LONG), -1)
RAGGED[0, :7], RAGGED[1, 2:9], RAGGED[2], RAGGED[3, ::2], RAGGED[17, -1], RAGGED[18, :2], RAGGED[18, 4:6] = 1, 2, 0, 1, 0, 2, 0
LABELS = torch.arange(20) % 3


def without_cache(model: DiT) -> object:
    """The same network, which offers none."""
    return lambda x_t, t, condition=None: model(x_t, t, condition)


def sites_of(model: DiT) -> list[tuple[int, ...]]:
    """The shapes [samples, sites] that a network works on from now on."""
    shapes: list[tuple[int, ...]] = []
    model.blocks[0].register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape[:2])))
    return shapes


class Laws:
    """A callback that keeps the logits by which every token was drawn, by sample and step."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], Tensor] = {}

    def __call__(self, step: StepEvent) -> None:
        for row, sample in enumerate(step.samples.tolist()):
            drawn = (step.x_t[row] == K).nonzero().flatten()[:1] + row * step.x_t.shape[1]
            if len(drawn):
                self.found[sample, step.number] = step.prediction[drawn].log_weights()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("several", [1, 3, LONG])
@torch.no_grad()
def test_a_cache_gives_the_same_logits_at_every_site(dtype: torch.dtype, tolerance: float, several: int) -> None:
    model, x_t = network(9, classes=3).to(dtype), torch.randint(K + 1, (5, LONG))
    given, label = torch.arange(LONG).expand(5, -1), LABELS[:5]
    cache, kept = model.new_cache(5, LONG), None
    assert cache.shape == (2, 2, 5, 2, LONG, 8) and cache.dtype == dtype
    parts = []
    for x, at in zip(x_t.split(several, 1), given.split(several, 1), strict=True):
        parts.append(model(x, None, label, cache, at))
        assert kept is None or torch.equal(cache[..., : kept.shape[-2], :], kept)  # what is there stays
        kept = cache[..., : int(at.max()) + 1, :].clone()
    torch.testing.assert_close(torch.cat(parts, 1), model(x_t, None, label), rtol=0, atol=tolerance)


@torch.no_grad()
def test_samples_need_not_be_at_the_same_site() -> None:
    model, x_t = network(10), torch.randint(K + 1, (3, LONG))
    whole, cache = model(x_t), model.new_cache(3, LONG)
    for step in range(LONG + 5):
        at = (step - torch.tensor([[0], [3], [5]])).clamp(0, LONG - 1)
        found = model(x_t.gather(1, at), None, None, cache, at)
        torch.testing.assert_close(found, whole.gather(1, at.unsqueeze(-1).expand_as(found)), rtol=0, atol=1e-5)


CALLS = {
    "one": {"n": 1},
    "five": {"n": 5},
    "twenty": {"n": 20},
    "twenty, in batches": {"n": 20, "batch_size": 3},
    "from the seventh": {"n": 13, "start": 7},
    "a prompt": {"n": 20, "clamp": PROMPT},
    "tokens anywhere": {"n": 20, "clamp": RAGGED},
    "nothing to draw": {"n": 20, "clamp": RAGGED[2].expand(20, -1)},
    "classes": {"n": 20, "condition": LABELS},
    "guidance": {"n": 20, "condition": LABELS, "guidance": 2.5, "clamp": RAGGED},
    "sharper": {"n": 20, "temperature": 0.7, "top_p": 0.9},
    "windows": {"n": 20, "window": 6, "overlap": 2},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("unprojected", [False, True])
def test_a_cache_changes_no_token(name: str, unprojected: bool) -> None:
    options = {"sampler": "autoregressive", "micro_batch": 8, **CALLS[name]}
    shape, model = (options.pop("n"), LONG), network(11, classes=3)
    model.unprojected = unprojected
    distributions, wanted = Laws(), Laws()
    shapes = sites_of(model)
    found = m2s.sample(model, HEAD, shape, callback=distributions, **options)
    assert (8, 1) in shapes
    shapes.clear()
    assert torch.equal(found, m2s.sample(without_cache(model), HEAD, shape, callback=wanted, **options))
    assert (8, 1) not in shapes and distributions.found.keys() == wanted.found.keys()
    for key, logits in wanted.found.items():
        torch.testing.assert_close(distributions.found[key], logits, rtol=0, atol=1e-5)


def test_each_site_is_worked_on_once() -> None:
    model = network(12, classes=3)
    shapes, options = sites_of(model), {"sampler": "autoregressive", "micro_batch": 4}
    m2s.sample(model, HEAD, (4, LONG), **options)
    assert shapes == [(4, 1)] * LONG
    shapes.clear()
    m2s.sample(without_cache(model), HEAD, (4, LONG), **options)
    assert shapes == [(4, LONG)] * LONG
    shapes.clear()
    m2s.sample(model, HEAD, (4, LONG), condition=LABELS[:4], guidance=2.0, **options)
    assert shapes == [(4, 1)] * 2 * LONG
    shapes.clear()
    m2s.sample(model, HEAD, (4, LONG), clamp=PROMPT[:4], **options)
    assert shapes == [(4, LONG)] + [(4, 1)] * (LONG - 4)  # a prompt is gone through once


def test_no_bit_of_a_law_depends_on_the_other_samples() -> None:
    """Nor on their prompts, at which the network is called on whole sequences."""
    model, together = network(13), Laws()
    m2s.sample(model, HEAD, (20, LONG), sampler="autoregressive", clamp=RAGGED, callback=together)
    for sample in range(20):
        alone, clamp = Laws(), RAGGED[sample : sample + 1]
        m2s.sample(model, HEAD, (1, LONG), sampler="autoregressive", clamp=clamp, start=sample, callback=alone)
        assert len(alone.found) == int((clamp < 0).sum())
        assert all(torch.equal(together.found[key], logits) for key, logits in alone.found.items())


@dataclass(frozen=True)
class Fickle(Autoregressive):
    """Changes a token on the way and another when all are drawn, after which it draws one again."""

    def plan(self, steps: int, grid: str, free: Tensor, head: m2s.Head, noise: CounterNoise) -> Plan:
        return super().plan(steps, grid, free + 4, head, noise)

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Tensor:
        x = super().step(prediction, move, noise)
        before, left = prediction.masked.sum(-1), (x == K).sum(-1)
        x[:, 2] = torch.where(left == LONG - 6, (x[:, 2] + 1) % K, x[:, 2])
        x[:, 0] = torch.where((left == 0) & (before == 1), (x[:, 0] + 1) % K, x[:, 0])
        x[:, 5] = torch.where((left == 0) & (before == 0), K, x[:, 5])
        return x


def test_what_does_not_extend_the_sequence_is_gone_through_again() -> None:
    model, distributions, wanted = network(14), Laws(), Laws()
    shapes, options = sites_of(model), {"sampler": Fickle(), "micro_batch": 2}
    found = m2s.sample(model, HEAD, (2, LONG), callback=distributions, **options)
    assert shapes.count((2, 1)) == LONG + 4 and shapes.count((2, LONG)) == 3
    assert torch.equal(found, m2s.sample(without_cache(model), HEAD, (2, LONG), callback=wanted, **options))
    for key, logits in wanted.found.items():
        torch.testing.assert_close(distributions.found[key], logits, rtol=0, atol=1e-5)


def test_one_micro_batch_at_a_time_holds_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches, most = network(15, classes=3), [], []
    new_cache = model.new_cache

    def watched(samples: int, length: int) -> Tensor:
        cache = new_cache(samples, length)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(model, "new_cache", watched)
    options = {"sampler": "autoregressive", "condition": LABELS, "guidance": 2.0, "micro_batch": 4}
    m2s.sample(model, HEAD, (20, L), callback=lambda _: most.append(sum(cache() is not None for cache in caches)), **options)
    assert len(caches) == 2 * 5 and set(most) == {2}


@pytest.mark.parametrize("options", [{"causal": False, "time": False}, {"causal": True, "time": True}])
def test_no_cache_where_a_site_depends_on_more_than_those_before(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = DiT(DiTConfig(K + 1, width=16, depth=1, heads=2, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert model.new_cache(4, L) is None and not hasattr(UNet, "new_cache")
    shapes = sites_of(model)
    found = draws(model, 4, micro_batch=4)
    assert shapes == [(4, L)] * L and torch.equal(found, draws(without_cache(model), 4, micro_batch=4))


def test_what_a_callback_keeps_is_not_written_over() -> None:
    kept: list[StepEvent] = []
    m2s.sample(network(1), HEAD, (2, L), sampler="autoregressive", callback=kept.append)
    unknown = [int(step.prediction.output.isnan().any(-1).sum(-1)[0]) for step in kept]
    assert unknown == [L - 1 - number for number in range(L)]


def test_a_forward_of_ones_own_is_called_as_ever() -> None:
    class Cooler(DiT):
        def forward(self, x_t, t=None, condition=None):
            return 0.5 * super().forward(x_t, t, condition)

    model = Cooler(network(1).config).eval()
    assert model.new_cache(2, L) is None
    assert m2s.sample(model, HEAD, (2, L), sampler="autoregressive").shape == (2, L)


def test_autocast_leaves_a_network_of_float64_alone() -> None:
    model = network(1).double()
    wanted = m2s.sample(model, HEAD, (2, L), sampler="autoregressive")
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(m2s.sample(model, HEAD, (2, L), sampler="autoregressive"), wanted)


def test_a_cache_has_the_dtype_that_the_network_works_in() -> None:
    model, x_t = network(16, length=L), torch.randint(K + 1, (3, L))
    cache = model.new_cache(3, L)
    assert cache.dtype == torch.float32 and model.to(torch.bfloat16).new_cache(3, L).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert model.float().new_cache(3, L).dtype == torch.float16
    with pytest.raises(ValueError, match="has 5 sites, but the network was made for at most 4"):
        model.new_cache(1, 5)
    for given in ({"cache": cache}, {"at": x_t}):
        with pytest.raises(ValueError, match="cache and at go together"):
            model(x_t, None, None, **given)


COMPILED = """
import torch
from m2s.models import DiT, DiTConfig

torch.manual_seed(0)
model = DiT(DiTConfig(5, width=16, depth=2, heads=2, time=False, causal=True)).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
x_t, cache = torch.randint(5, (3, 6)), model.new_cache(3, 6)
with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
    parts = [compiled(x_t[:, i : i + 1], None, None, cache, torch.full((3, 1), i)) for i in range(6)]
    torch.testing.assert_close(torch.cat(parts, 1), model(x_t), rtol=0, atol=1e-5)
"""


def test_a_compiler_sees_one_graph_for_all_sites() -> None:
    """In a process of its own: the tests' shape checker does not compile."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------------------------------------------


def test_longer_than_the_network_was_made_for() -> None:
    trajectory = Trajectory()
    found = m2s.sample(network(8, length=L), HEAD, (2, 10), sampler="autoregressive", window=L, overlap=2, callback=trajectory)
    assert found.shape == (2, 10) and (found < K).all()
    kept = trajectory.states
    assert torch.equal(kept[-1], found)
    assert (((kept[1:] != kept[:-1]) & (kept[:-1] >= 0) & (kept[:-1] < K)).sum()) == 0  # what is drawn stays


@pytest.mark.parametrize("sampler", ["bayes", "euler", "tau_leaping", "predictor_corrector", "analytic", "first_hitting"])
def test_other_samplers_are_refused(sampler: str) -> None:
    with pytest.raises(TypeError):
        m2s.sample(network(), HEAD, (1, L), sampler=sampler)


def test_what_goes_with_what() -> None:
    x, t = torch.zeros(1, 2, dtype=torch.long), torch.tensor([0.5])
    posterior = m2s.Posterior(m2s.Uniform(K, m2s.Linear()))
    for loss in (next_token_nll, zero_integral):
        with pytest.raises(TypeError, match=r"is for m2s\.belief\.NextToken"):
            loss(posterior, torch.zeros(1, 2, K), x, x, t)
    with pytest.raises(TypeError, match="where nothing is corrupted"):
        NextToken(posterior.process)
    with pytest.raises(TypeError, match="has no score"):
        m2s.score_entropy(HEAD, torch.zeros(1, 2, K + 1), x, HEAD.process.corrupt(x, t), t)
    with pytest.raises(TypeError, match="draws the next token"):
        m2s.sample(network(states=K), posterior, (1, 2), sampler="autoregressive")
    with pytest.raises(ValueError, match="autoregressive"):
        m2s.sample(network(), HEAD, (1, 2), sampler="autoregresive")


def test_a_file_can_hold_it() -> None:
    again = from_dict(to_dict(HEAD))
    assert isinstance(again, NextToken) and repr(again) == repr(HEAD) == "NextToken(Shifted(3))"


def test_validation_is_the_exact_likelihood(tmp_path) -> None:
    """What a run reports of the weights it publishes, against the network called prefix by prefix."""
    source = random_rows(count=12, length=3)
    train(small(tmp_path / "run", method="ar", validation_passes=3, network__dropout=0.0), source)
    model, head = m2s.load(tmp_path / "run")
    assert isinstance(head, NextToken) and model.config.causal and not model.config.time
    exact = -np.mean([by_hand(model, row, source.vocab) for row in source.rows.tolist()]) / source.length
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    last = [line for line in lines if "validation_bits" in line][-1]
    assert last["validation_bits"] == pytest.approx(exact / math.log(2), rel=1e-5)
    assert last["validation_perplexity"] == pytest.approx(math.exp(exact), rel=1e-5)
    assert last["validation_integral"] == last["validation_prior"] == 0


def test_a_transformer_takes_the_place_of_a_u_net() -> None:
    for size, instead in (("tiny", "tiny"), ("mnist", "tiny"), ("md4", "small")):
        found = resolve(small(Path("x"), method="ar", network__kind="unet", network__size=size)).network
        assert (found.kind, found.size, found.time) == ("dit", instead, "no")
    assert resolve(small(Path("x"), method="m2s", network__kind="unet")).network.kind == "unet"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"network__time": "yes"}, "there is no time"),
        ({"process__kind": "uniform"}, "where nothing is corrupted"),
        ({"head__kind": "posterior"}, "head.loss is likelihood"),
        ({"head__loss": "score-entropy"}, "has no score"),
        ({"network__clock": "sigma"}, "has no schedule"),
        ({"head__offset": "exact"}, "head: head.offset is exact, which is for a posterior, not next-token"),
    ],
)
def test_what_is_refused(tmp_path, changes, word) -> None:
    with pytest.raises(UserError, match=word):
        train(small(tmp_path / "run", method="ar", **changes), random_rows())
    assert not (tmp_path / "run").exists()


def test_from_data_to_samples_by_command(tmp_path, capsys) -> None:
    run, cpu = tmp_path / "run", ["--device", "cpu"]
    quick = ["--batch", "8", "--network.width", "8", "--network.depth", "1", "--validation-samples", "4"]
    main(["train", "digits", "--method", "ar", "--steps", "2", "--out", str(run), *quick, *cpu])
    main(["sample", str(run), "--n", "2", "--sampler", "autoregressive", "--out", str(tmp_path / "x.npz"), *cpu])
    tokens = np.load(tmp_path / "x.npz")["tokens"]
    assert tokens.shape == (2, 64) and 0 <= tokens.min() <= tokens.max() < 17
    capsys.readouterr()
    main(["evaluate", "bpd", str(run), "--limit", "4", "--out", str(tmp_path / "bpd.json"), *cpu])
    said, result = capsys.readouterr().out, json.loads((tmp_path / "bpd.json").read_text())
    assert "exactly" in said and " passes\n" not in said
    assert result["exact"] and len(result["passes"]) == 1 and not (tmp_path / "bpd.png").exists()
    model, rows = m2s.load(run).model, m2s.data.load("digits").test
    chosen = rows[torch.arange(4) * len(rows) // 4].long()
    direct = -np.mean([by_hand(model, row, 17) for row in chosen.tolist()]) / 64 / math.log(2)
    assert result["bound"]["bits"]["value"] == pytest.approx(direct, rel=1e-5)


def test_training_sees_the_likelihood_itself(tmp_path) -> None:
    """Whatever the density of times: the first loss of a network whose last layer is zero is log K at every site."""
    source = random_rows()
    train(small(tmp_path / "run", method="ar", importance=0.1, steps=1, log_every=1), source)
    line = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(math.log(source.vocab), rel=1e-6)
