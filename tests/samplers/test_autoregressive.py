"""Autoregressive networks: exact likelihood and generation, against enumeration over a tiny vocabulary."""

import itertools
import json
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from fork_server import run_script
from torch import Tensor

import m2s
from m2s.cli import main
from m2s.errors import UserError
from m2s.evaluation.bpd import dataset_nelbo, format_table, summarize
from m2s.heads import NextToken, Shifted
from m2s.hub.config import from_dict, to_dict
from m2s.losses import next_token_nll, zero_integral
from m2s.models import DiT, DiTConfig, UNet
from m2s.samplers import StepEvent, Trajectory
from m2s.samplers.autoregressive import CachedNetwork
from m2s.training import train
from m2s.training.config import resolve
from small_runs import random_rows, small

K, L = 3, 4
HEAD = NextToken(Shifted(K))


def network(seed: int = 0, states: int = K + 1, **options: object) -> DiT:
    """A small causal network with random weights in every layer."""
    torch.manual_seed(seed)
    model = DiT(DiTConfig(states, width=16, depth=2, heads=2, time=False, causal=True, **options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def all_sequences(vocab: int = K, length: int = L) -> Tensor:
    return torch.tensor(list(itertools.product(range(vocab), repeat=length)))


@torch.no_grad()
def log_likelihood_by_prefixes(model: torch.nn.Module, row: list[int], vocab: int = K) -> float:
    """log p(row), by one call of the network for each prefix, behind the start token."""
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


def test_likelihood_by_one_call_for_each_token() -> None:
    model, x_0 = network(), all_sequences()
    wanted = -torch.tensor([log_likelihood_by_prefixes(model, row) for row in x_0.tolist()], dtype=torch.float64)
    torch.testing.assert_close(nll(model, x_0), wanted, rtol=1e-6, atol=0)


def test_likelihoods_of_all_sequences_sum_to_one() -> None:
    assert float((-nll(network(1), all_sequences())).exp().sum()) == pytest.approx(1, abs=1e-6)


def test_a_site_sees_only_the_tokens_before_it() -> None:
    model, (x_0, other) = network(2), torch.randint(K, (2, 1, L), generator=torch.Generator().manual_seed(0))
    for place in range(L):
        changed = torch.cat([x_0[:, :place], other[:, place:]], -1)
        same = [model(HEAD.process.corrupt(x, torch.zeros(1)), None)[:, : place + 1] for x in (x_0, changed)]
        assert torch.equal(*same)


def test_the_process_shifts_the_sequence_and_has_no_transitions() -> None:
    process, t = HEAD.process, torch.tensor([0.1, 0.9])
    x_0 = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 1]])
    shown = torch.tensor([[K, 0, 1, 2], [K, 2, 2, 1]])
    assert torch.equal(process.corrupt(x_0, t), shown)
    assert torch.equal(process.rows(x_0, t).argmax(-1), shown) and float(process.rows(x_0, t).sum()) == 8
    assert torch.equal(m2s.samplers.draw_categorical(process.rows(x_0, t), torch.rand(2, 4)), shown)
    assert process.reference().tolist() == [0, 0, 0, 1] and float(process.prior_kl(x_0, t).sum()) == 0
    assert process.last_time(1e-3) == 1 - 1e-3
    assert not process.has_transitions and process.transition_matrix is process.step_transition_matrix is process.rates is None
    assert m2s.Uniform(K, m2s.Linear()).has_transitions


def test_the_elbo_is_the_likelihood() -> None:
    """`m2s.elbo` and `m2s evaluate bpd` have no integral, no prior and no variance."""
    model, x_0 = network(3), all_sequences()
    exact = nll(model, x_0)
    found = m2s.elbo(model, HEAD, x_0, passes=3, loss=zero_integral)
    torch.testing.assert_close(found.nats, exact)
    assert float(found.standard_error.max()) == 0 and float(found.integral.abs().max() + found.prior.abs().max()) == 0
    measured = dataset_nelbo(model, HEAD, x_0, passes=5, batch_size=7, seed=0)
    assert measured.exact and measured.term("nelbo").shape == (1, len(x_0))
    torch.testing.assert_close(measured.term("nelbo")[0], exact)
    result = summarize(measured, {})
    assert result["nelbo"]["perplexity"]["value"] == pytest.approx(math.exp(float(exact.mean()) / L))
    assert result["nelbo"]["nats"]["error"] is None
    assert result["nelbo"]["nats"]["rows_error"] == pytest.approx(float(exact.std()) / len(exact) ** 0.5 / L, rel=1e-6)
    text = "\n".join(format_table(result, "token", exact=True))
    assert "exactly" in text and "integral" not in text and "perplexity" in text


def draws(model: torch.nn.Module, count: int, **options: object) -> Tensor:
    return m2s.sample(model, HEAD, (count, L), sampler="autoregressive", **{"seed": 0, **options})


def test_samples_have_the_distribution_of_the_network() -> None:
    model, count = network(4), 6000
    distribution = (-nll(model, all_sequences())).exp().numpy()
    seen = np.bincount(draws(model, count, micro_batch=500).numpy() @ K ** np.arange(L)[::-1], minlength=K**L)
    statistic = (
        (seen - count * distribution) ** 2 / (count * distribution)
    ).sum()  # chi-squared of 80 degrees: 99.99% lie below 135
    assert statistic < 135
    assert (
        np.abs(seen / count - distribution).sum() < 1.2 * np.sqrt(2 / math.pi * distribution * (1 - distribution) / count).sum()
    )


def test_samples_continue_a_prompt_with_its_conditional_distribution() -> None:
    model, count = network(5), 3000
    clamp = torch.full((count, L), -1)
    clamp[:, :2] = torch.tensor([2, 0])
    found = draws(model, count, micro_batch=500, clamp=clamp)
    assert torch.equal(found[:, :2], clamp[:, :2])
    joint = (-nll(model, all_sequences())).exp().reshape(K, K, K, K)[2, 0]
    distribution = (joint / joint.sum()).flatten().numpy()
    seen = np.bincount((found[:, 2] * K + found[:, 3]).numpy(), minlength=9)
    assert ((seen - count * distribution) ** 2 / (count * distribution)).sum() < 32  # of 8 degrees: 99.99%


def test_top_1_takes_the_most_likely_token() -> None:
    model = network(6)
    row: list[int] = []
    for _ in range(L):
        row.append(int(model(torch.tensor([[K, *row]]), None)[0, -1, :K].argmax()))
    assert draws(model, 3, top_k=1).tolist() == [row] * 3


def test_leave_one_out_is_the_posterior() -> None:
    sharp = {"temperature": 0.5, "top_p": 0.9}
    both = [draws(network(6), 20, on=on, **sharp) for on in ("posterior", "leave_one_out")]
    assert torch.equal(*both) and not torch.equal(both[0], draws(network(6), 20))


def test_diagnostics_count_tokens_and_no_classes() -> None:
    tokens, log = draws(network(6), 3, diagnostics=True)
    assert torch.equal(tokens, draws(network(6), 3))
    assert log.total("jumps") == 3 * L and log.masks_left == 0 and not any(map(sum, (step.classes for step in log.steps)))


def test_a_sample_depends_only_on_its_number_and_the_seed() -> None:
    """Not on the batch, other clamps or the number of steps. There is one call for each token."""
    model, calls = network(7), []

    def counted(x_t: Tensor, t: Tensor) -> Tensor:
        calls.append(x_t.shape)
        return model(x_t, t)

    clamp = torch.full((20, L), -1)
    clamp[3, :3], clamp[4], clamp[17, 1] = 1, 2, 0
    full = m2s.sample(counted, HEAD, (20, L), sampler="autoregressive", clamp=clamp, steps=1, seed=0, micro_batch=16)
    assert set(calls) == {(16, L)} and len(calls) == 2 * L
    assert torch.equal(draws(model, 20, clamp=clamp, batch_size=3, steps=9, micro_batch=16), full)
    alone = [draws(model, 1, start=i, clamp=clamp[i : i + 1], micro_batch=16) for i in range(20)]
    assert torch.equal(torch.cat(alone), full)
    assert not torch.equal(draws(model, 20, clamp=clamp, seed=1), full)
    assert torch.equal(full[4], clamp[4]) and (full < K).all()


# --- the cache of keys and values -----------------------------------------------------------------------------------------

LONG = 11
PROMPT = torch.full((20, LONG), -1)
PROMPT[:, :4] = torch.tensor([2, 0, 1, 1])
RAGGED = torch.full((20, LONG), -1)
RAGGED[0, :7], RAGGED[1, 2:9], RAGGED[2], RAGGED[3, ::2], RAGGED[17, -1], RAGGED[18, :2], RAGGED[18, 4:6] = 1, 2, 0, 1, 0, 2, 0
LABELS = torch.arange(20) % 3


def without_cache(model: DiT) -> object:
    """The same network without `new_cache`."""
    return lambda x_t, t, condition=None: model(x_t, t, condition)


def sites_of(model: DiT) -> list[tuple[int, ...]]:
    """A list to which the shape [samples, sites] of every future call is added."""
    shapes: list[tuple[int, ...]] = []
    model.blocks[0].register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape[:2])))
    return shapes


class RecordedLogits:
    """A callback that records the logits from which every token was drawn, by sample and step."""

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
        assert kept is None or torch.equal(cache[..., : kept.shape[-2], :], kept)  # earlier entries are not changed
        kept = cache[..., : int(at.max()) + 1, :].clone()
    torch.testing.assert_close(torch.cat(parts, 1), model(x_t, None, label), rtol=0, atol=tolerance)


@torch.no_grad()
def test_samples_need_not_be_at_the_same_site() -> None:
    model, x_t = network(10), torch.randint(K + 1, (3, LONG))
    full, cache = model(x_t), model.new_cache(3, LONG)
    for step in range(LONG + 5):
        at = (step - torch.tensor([[0], [3], [5]])).clamp(0, LONG - 1)
        found = model(x_t.gather(1, at), None, None, cache, at)
        torch.testing.assert_close(found, full.gather(1, at.unsqueeze(-1).expand_as(found)), rtol=0, atol=1e-5)


CALLS = {
    "one": {"n": 1},
    "five": {"n": 5},
    "twenty": {"n": 20},
    "twenty, in batches": {"n": 20, "batch_size": 3},
    "from the seventh": {"n": 13, "start": 7},
    "a prompt": {"n": 20, "clamp": PROMPT},
    "clamped tokens anywhere": {"n": 20, "clamp": RAGGED},
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
    distributions, wanted = RecordedLogits(), RecordedLogits()
    shapes = sites_of(model)
    found = m2s.sample(model, HEAD, shape, callback=distributions, seed=0, **options)
    assert (8, 1) in shapes
    shapes.clear()
    assert torch.equal(found, m2s.sample(without_cache(model), HEAD, shape, callback=wanted, seed=0, **options))
    assert (8, 1) not in shapes and distributions.found.keys() == wanted.found.keys()
    for key, logits in wanted.found.items():
        torch.testing.assert_close(distributions.found[key], logits, rtol=0, atol=1e-5)


def test_each_site_is_computed_once() -> None:
    model = network(12, classes=3)
    shapes, options = sites_of(model), {"sampler": "autoregressive", "micro_batch": 4}
    m2s.sample(model, HEAD, (4, LONG), seed=0, **options)
    assert shapes == [(4, 1)] * LONG
    shapes.clear()
    m2s.sample(without_cache(model), HEAD, (4, LONG), seed=0, **options)
    assert shapes == [(4, LONG)] * LONG
    shapes.clear()
    m2s.sample(model, HEAD, (4, LONG), condition=LABELS[:4], guidance=2.0, seed=0, **options)
    assert shapes == [(4, 1)] * 2 * LONG
    shapes.clear()
    m2s.sample(model, HEAD, (4, LONG), clamp=PROMPT[:4], seed=0, **options)
    assert shapes == [(4, LONG)] + [(4, 1)] * (LONG - 4)  # a prompt is processed once


def test_logits_do_not_depend_on_other_samples() -> None:
    """Bit for bit, also where other samples have prompts, for which the network is called on full sequences."""
    model, together = network(13), RecordedLogits()
    m2s.sample(model, HEAD, (20, LONG), sampler="autoregressive", clamp=RAGGED, callback=together, seed=0)
    for sample in range(20):
        alone, clamp = RecordedLogits(), RAGGED[sample : sample + 1]
        m2s.sample(model, HEAD, (1, LONG), sampler="autoregressive", clamp=clamp, start=sample, callback=alone, seed=0)
        assert len(alone.found) == int((clamp < 0).sum())
        assert all(torch.equal(together.found[key], logits) for key, logits in alone.found.items())


@torch.no_grad()
def test_a_stale_cache_is_recomputed() -> None:
    """Where tokens before the site have changed since the last call; only for the samples where they have."""
    model, x, t = network(14), torch.randint(K, (2, LONG)), torch.full((2,), 0.5)
    shapes, cached = sites_of(model), CachedNetwork(model, None, HEAD.process)

    def check(sites: list[int], recomputed: bool) -> None:
        shown, at = HEAD.network_input(x), torch.tensor(sites)
        shapes.clear()
        output = cached(shown, t, at)
        assert shapes == [(2, LONG)] * recomputed + [(2, 1)]
        rows = torch.arange(2)
        torch.testing.assert_close(output[rows, at], model(shown)[rows, at], rtol=0, atol=1e-5)

    for site in range(6):
        check([site, site], recomputed=False)
    x[:, 2] = (x[:, 2] + 1) % K  # a token of both samples changes on the way
    check([6, 6], recomputed=True)
    before = cached.cache[:, :, 0, :, :7].clone()
    x[1, 0] = (x[1, 0] + 1) % K  # a token of one sample changes
    check([7, 7], recomputed=True)
    assert torch.equal(cached.cache[:, :, 0, :, :7], before)
    check([8, 3], recomputed=False)  # an earlier site, whose predecessors are in the cache
    check([9, 9], recomputed=True)  # sites 4 to 8 of the second sample are no longer in the cache


def test_one_micro_batch_at_a_time_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches, most = network(15, classes=3), [], []
    new_cache = model.new_cache

    def watched(samples: int, length: int) -> Tensor:
        cache = new_cache(samples, length)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(model, "new_cache", watched)
    options = {"sampler": "autoregressive", "condition": LABELS, "guidance": 2.0, "micro_batch": 4}
    m2s.sample(
        model, HEAD, (20, L), callback=lambda _: most.append(sum(cache() is not None for cache in caches)), seed=0, **options
    )
    assert len(caches) == 2 * 5 and set(most) == {2}


@pytest.mark.parametrize("options", [{"causal": False, "time": False}, {"causal": True, "time": True}])
def test_networks_that_are_not_causal_have_no_cache(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = DiT(DiTConfig(K + 1, width=16, depth=1, heads=2, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert model.new_cache(4, L) is None and not hasattr(UNet, "new_cache")
    shapes = sites_of(model)
    found = draws(model, 4, micro_batch=4)
    assert shapes == [(4, L)] * L and torch.equal(found, draws(without_cache(model), 4, micro_batch=4))


def test_events_stored_by_a_callback_are_not_overwritten() -> None:
    kept: list[StepEvent] = []
    m2s.sample(network(1), HEAD, (2, L), sampler="autoregressive", callback=kept.append, seed=0)
    unknown = [int(step.prediction.output.isnan().any(-1).sum(-1)[0]) for step in kept]
    assert unknown == [L - 1 - number for number in range(L)]


def test_a_subclass_with_another_forward_has_no_cache() -> None:
    class Cooler(DiT):
        def forward(self, x_t, t=None, condition=None):
            return 0.5 * super().forward(x_t, t, condition)

    model = Cooler(network(1).config).eval()
    assert model.new_cache(2, L) is None
    assert m2s.sample(model, HEAD, (2, L), sampler="autoregressive", seed=0).shape == (2, L)


def test_autocast_does_not_change_a_float64_network() -> None:
    model = network(1).double()
    wanted = m2s.sample(model, HEAD, (2, L), sampler="autoregressive", seed=0)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(m2s.sample(model, HEAD, (2, L), sampler="autoregressive", seed=0), wanted)


def test_a_cache_has_the_dtype_of_the_computation() -> None:
    model, x_t = network(16, length=L), torch.randint(K + 1, (3, L))
    cache = model.new_cache(3, L)
    assert cache.dtype == torch.float32 and model.to(torch.bfloat16).new_cache(3, L).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert model.float().new_cache(3, L).dtype == torch.float16
    with pytest.raises(ValueError, match="has 5 sites, but the network was made for at most 4"):
        model.new_cache(1, 5)
    for given in ({"cache": cache}, {"at": x_t}):
        with pytest.raises(ValueError, match="give cache and at together"):
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


def test_one_compiled_graph_serves_all_sites() -> None:
    """In another process, because the shape checks of the tests cannot be compiled."""
    done = run_script(COMPILED)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------------------------------------------


def test_sequences_longer_than_the_network() -> None:
    trajectory = Trajectory()
    found = m2s.sample(
        network(8, length=L), HEAD, (2, 10), sampler="autoregressive", window=L, overlap=2, callback=trajectory, seed=0
    )
    assert found.shape == (2, 10) and (found < K).all()
    kept = trajectory.states
    assert torch.equal(kept[-1], found)
    assert (((kept[1:] != kept[:-1]) & (kept[:-1] >= 0) & (kept[:-1] < K)).sum()) == 0  # drawn tokens do not change


@pytest.mark.parametrize("sampler", ["bayes", "euler", "tau_leaping", "predictor_corrector", "analytic", "first_hitting"])
def test_other_samplers_raise(sampler: str) -> None:
    with pytest.raises(TypeError, match=rf"sampler {sampler!r} simulates a reverse process.*use sampler='autoregressive'"):
        m2s.sample(network(), HEAD, (1, L), sampler=sampler, seed=0)


def test_head_process_loss_and_sampler_belong_together() -> None:
    x, t = torch.zeros(1, 2, dtype=torch.long), torch.tensor([0.5])
    posterior = m2s.Posterior(m2s.Uniform(K, m2s.Linear()))
    for loss in (next_token_nll, zero_integral):
        with pytest.raises(TypeError, match=r"m2s\.heads\.NextToken"):
            loss(posterior, torch.zeros(1, 2, K), x, x, t)
    with pytest.raises(TypeError, match="next-token prediction has no corruption"):
        NextToken(posterior.process)
    with pytest.raises(TypeError, match="has no score"):
        m2s.score_entropy(HEAD, torch.zeros(1, 2, K + 1), x, HEAD.process.corrupt(x, t), t)
    with pytest.raises(TypeError, match="draws the next token"):
        m2s.sample(network(states=K), posterior, (1, 2), sampler="autoregressive", seed=0)
    with pytest.raises(ValueError, match="autoregressive"):
        m2s.sample(network(), HEAD, (1, 2), sampler="autoregresive", seed=0)


def test_head_from_its_description() -> None:
    again = from_dict(to_dict(HEAD))
    assert isinstance(again, NextToken) and repr(again) == repr(HEAD) == "NextToken(Shifted(3))"


def test_validation_is_the_exact_likelihood(tmp_path) -> None:
    """What a run reports of the weights it publishes, against the network called prefix by prefix."""
    source = random_rows(count=12, length=3)
    train(small(tmp_path / "run", method="ar", validation_passes=3, network__dropout=0.0), source)
    model, head = m2s.load(tmp_path / "run")
    assert isinstance(head, NextToken) and model.config.causal and not model.config.time
    exact = -np.mean([log_likelihood_by_prefixes(model, row, source.vocab) for row in source.rows.tolist()]) / source.length
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    last = [line for line in lines if "validation_bits" in line][-1]
    assert last["validation_bits"] == pytest.approx(exact / math.log(2), rel=1e-5)
    assert last["validation_perplexity"] == pytest.approx(math.exp(exact), rel=1e-5)
    assert last["validation_integral"] == last["validation_prior"] == 0


def test_a_transformer_replaces_the_u_net() -> None:
    for size, instead in (("tiny", "tiny"), ("mnist", "tiny"), ("md4", "small")):
        found = resolve(small(Path("x"), method="ar", network__kind="unet", network__size=size)).network
        assert (found.kind, found.size, found.time) == ("dit", instead, "no")
    assert resolve(small(Path("x"), method="m2s", network__kind="unet")).network.kind == "unet"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"network__time": "yes"}, "an autoregressive model has no time"),
        ({"process__kind": "uniform"}, "next-token prediction has no corruption"),
        ({"head__kind": "posterior"}, "head.loss is 'likelihood', but the exact likelihood is for m2s.heads.NextToken"),
        ({"head__loss": "score-entropy"}, "has no score"),
        ({"network__clock": "sigma"}, "has no schedule"),
        ({"head__offset": "exact"}, "head.offset is 'exact', but it is for head.kind posterior or ordinal, not next-token"),
    ],
)
def test_invalid_combinations_raise(tmp_path, changes, word) -> None:
    with pytest.raises(UserError, match=word):
        train(small(tmp_path / "run", method="ar", **changes), random_rows())
    assert not (tmp_path / "run").exists()


def test_train_sample_and_evaluate_on_the_command_line(tmp_path, capsys) -> None:
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
    direct = -np.mean([log_likelihood_by_prefixes(model, row, 17) for row in chosen.tolist()]) / 64 / math.log(2)
    assert result["nelbo"]["bits"]["value"] == pytest.approx(direct, rel=1e-5)


def test_training_loss_is_the_likelihood(tmp_path) -> None:
    """For any density of times, the first loss of a network with a zero last layer is log K at every site."""
    source = random_rows()
    train(small(tmp_path / "run", method="ar", importance=0.1, steps=1, log_every=1), source)
    line = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(math.log(source.vocab), rel=1e-6)
