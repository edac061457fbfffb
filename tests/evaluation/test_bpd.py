"""The NELBO of a data set: the estimate and both of its errors against an oracle with exact terms, and the command."""

import json
import math
import sys
import types
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom
from scipy.stats import t as student_distribution
from test_elbo import ELBO, T_MIN, clipped, exact_terms

import m2s
from exact_steps import unchecked
from m2s.cli import main
from m2s.data import DATASETS, GPT2, Bytes, Characters, prepare_text
from m2s.data.documents import find_sources
from m2s.distributed import World
from m2s.errors import UserError
from m2s.evaluation import bpd
from m2s.evaluation.bpd import (
    TERMS,
    Shard,
    dataset_nelbo,
    example_sizes,
    integrand_curve,
    student_t_quantile,
    summarize,
    token_sizes,
    token_windows,
)
from m2s.heads import NextToken, Shifted
from m2s.hub import save
from m2s.models import DiT, DiTConfig
from m2s.training.run_folder import RECORD
from oracle import Network, Oracle
from small_runs import finish, launch

PNG = b"\x89PNG\r\n\x1a\n"


class Known:
    """The network that knows the data distribution: Bayes' rule over every clean sequence, at the time of each example."""

    def __init__(self, name: str) -> None:
        self.process, self.oracle = ELBO[name].process, ELBO[name].oracle()
        self.clean, self.distribution, self.indicator = map(
            torch.from_numpy, (self.oracle.clean, self.oracle.distribution, self.oracle.indicator)
        )

    def posterior(self, x: np.ndarray, t: float) -> np.ndarray:
        return self.oracle.posterior(x, t)

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        assert t.min() > 0.999e-3 and t.max() < 1 - 0.999e-3, "a network never sees the ends of time"
        kernel = self.process.transition_matrix(t.double())
        joint = self.distribution * kernel[torch.arange(len(x_t))[:, None, None], self.clean, x_t[:, None, :]].prod(-1)
        return torch.log(torch.einsum("bc,clz->blz", joint, self.indicator) / joint.sum(-1)[:, None, None])


def drawn(oracle: Oracle, count: int, seed: int) -> np.ndarray:
    """Return the indices of `count` clean sequences drawn from the data distribution."""
    return np.random.default_rng(seed).choice(len(oracle.clean), size=count, p=oracle.distribution)


def error_line(capsys, *arguments: object) -> str:
    """Return the one line that invalid input prints."""
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", "bpd", *map(str, arguments)])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("m2s: ")
    return err


# -- the estimate --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "passes", "runs"), [("uniform-linear", 4, 160), ("absorbing-linear", 2, 120)])
def test_both_errors_cover_the_exact_bound_at_the_right_rate(name, passes, runs):
    """With the exact posterior as the model, intervals cover the exact NELBO in 95 of 100 cases.

    Student's interval over passes covers that of the given examples, also for the integral alone; the interval over examples
    covers that of the distribution they were drawn from."""
    model, count, t_min = Known(name), 64, 1e-3
    oracle, head = model.oracle, m2s.Posterior(model.process)
    x = oracle.noisy[:5]
    np.testing.assert_allclose(
        model(torch.from_numpy(x), torch.full((5,), 0.3)).exp(), oracle.posterior(x, float(np.float32(0.3))), rtol=1e-9
    )
    integral, prior, reconstruction = exact_terms(name, model, oracle, t_min)
    total = integral + prior + reconstruction
    entropy = -float(oracle.distribution @ np.log(oracle.distribution))
    assert entropy <= oracle.distribution @ total
    inside, off = np.zeros(3, dtype=int), []
    for seed in range(runs):
        chosen = drawn(oracle, count, seed)
        with unchecked() if seed else nullcontext():
            found = dataset_nelbo(model, head, torch.from_numpy(oracle.clean[chosen]), passes, t_min, seed, count)
        full, alone = found.estimate("nelbo"), found.estimate("integral")
        sites = oracle.length
        inside[0] += full.low < total[chosen].mean() / sites < full.high
        inside[1] += alone.low < integral[chosen].mean() / sites < alone.high
        inside[2] += abs(full.value - oracle.distribution @ total / sites) < 1.96 * full.rows_error
        off.append(full.value * sites - total[chosen].mean())
    for covered in inside.tolist():
        assert binom.cdf(covered, runs, 0.95) > 1e-3 and binom.sf(covered - 1, runs, 0.95) > 1e-3, inside
    assert abs(np.mean(off)) < 4 * np.std(off) / math.sqrt(runs) < 0.1 * entropy


def integrand(model: Network, oracle: Oracle, t: float) -> float:
    """The expected loss at time t, mean over all clean sequences."""
    score = oracle.bridge(model.posterior(oracle.noisy, clipped(t, T_MIN)), oracle.noisy, t)
    return oracle.expected(oracle.losses(score, oracle.noisy, t), t).mean()


@pytest.mark.parametrize("name", ["uniform-linear", "gaussian", "absorbing-loglinear", "hybrid-0.6"])
def test_terms_and_curve_of_any_network(name):
    """Every term, and the integrand in every bin of t, estimates its exact value; the terms add up."""
    oracle, process = ELBO[name].oracle(), ELBO[name].process
    model, bins = Network(oracle, 11), 6
    rows = torch.from_numpy(oracle.clean)
    found = dataset_nelbo(model, m2s.Posterior(process), rows.repeat(12, 1), 8, T_MIN, 3, 4096)
    exact = dict(zip(("integral", "prior", "reconstruction"), exact_terms(name, model, oracle, T_MIN), strict=True))
    exact["nelbo"] = sum(exact.values())
    for term in TERMS:
        estimate, value = found.estimate(term), exact[term].mean() / oracle.length
        assert estimate.value == pytest.approx(value, abs=5 * estimate.error + 1e-7 * value), term
        assert estimate.error < 0.05 * exact["nelbo"].mean() / oracle.length
        assert estimate.low <= estimate.value <= estimate.high
    torch.testing.assert_close(found.term("nelbo"), sum(found.term(term) for term in TERMS[1:]))

    points = integrand_curve(found, bins)
    assert sum(point["samples"] for point in points) == found.t.numel()
    assert points[0]["from"] == T_MIN and points[-1]["to"] == pytest.approx(found.end)
    node, weight = np.polynomial.legendre.leggauss(8)
    for point in points:
        t = (point["from"] + point["to"] + (point["to"] - point["from"]) * node) / 2
        value = weight @ [integrand(model, oracle, time) for time in t] / 2 / oracle.length / math.log(2)
        assert point["bits"] == pytest.approx(value, abs=4.5 * point["error"])
        assert point["error"] < 0.2 * value
    area = sum(point["bits"] * (point["to"] - point["from"]) for point in points)
    assert area == pytest.approx(found.estimate("integral").value / math.log(2), rel=0.02)


def test_batch_size_and_passes_do_not_change_an_example():
    model = Known("uniform-linear")
    head, rows = m2s.Posterior(model.process), torch.from_numpy(model.oracle.clean[drawn(model.oracle, 23, 0)])
    full = dataset_nelbo(model, head, rows, 3, seed=5, batch_size=100)
    for size, passes in ((1, 3), (7, 3), (23, 2)):
        other = dataset_nelbo(model, head, rows, passes, seed=5, batch_size=size)
        for term in TERMS:
            torch.testing.assert_close(other.term(term), full.term(term)[:passes], rtol=1e-9, atol=1e-12)
        assert torch.equal(other.t, full.t[:passes])
    assert not torch.equal(dataset_nelbo(model, head, rows, 3, seed=6).t, full.t)
    assert len(full.t.unique()) == full.t.numel()
    quantile = torch.log((full.t + 0.01) / (1e-3 + 0.01)) / math.log((full.end + 0.01) / (1e-3 + 0.01))
    assert torch.equal((quantile.sort(1).values * 23).floor(), torch.arange(23.0, dtype=torch.float64).expand(3, 23))


def evaluate_in_process(path) -> None:
    """Evaluate in one of several processes, and save the terms."""
    model = Known("uniform-linear")
    rows = torch.from_numpy(model.oracle.clean[drawn(model.oracle, 23, 0)])
    world = World.start("cpu")
    found = dataset_nelbo(model, m2s.Posterior(model.process), rows, 2, seed=5, batch_size=4, world=world)
    torch.save([found.term(term).clone() for term in TERMS], path / f"{world.rank}.pt")


def test_processes_share_the_rows(tmp_path):
    finish(launch(2, evaluate_in_process, tmp_path))
    model = Known("uniform-linear")
    rows = torch.from_numpy(model.oracle.clean[drawn(model.oracle, 23, 0)])
    alone = dataset_nelbo(model, m2s.Posterior(model.process), rows, 2, seed=5)
    for rank in range(2):
        for found, term in zip(torch.load(tmp_path / f"{rank}.pt"), TERMS, strict=True):
            torch.testing.assert_close(found, alone.term(term), rtol=1e-9, atol=1e-12)


def test_student_is_scipys():
    for freedom in (1, 2, 3, 4, 5, 8, 31, 200):
        assert student_t_quantile(freedom) == pytest.approx(student_distribution.ppf(0.975, freedom), rel=1e-9)
    assert student_t_quantile(7, 0.5) == pytest.approx(student_distribution.ppf(0.75, 7), rel=1e-9)


def test_a_single_pass_or_example_has_no_error():
    model = Known("uniform-linear")
    one = dataset_nelbo(model, m2s.Posterior(model.process), torch.from_numpy(model.oracle.clean[:40]), 1, seed=0).estimate(
        "nelbo"
    )
    assert one.error is one.low is one.high is None and one.rows_error > 0
    row = dataset_nelbo(model, m2s.Posterior(model.process), torch.from_numpy(model.oracle.clean[:1]), 2, seed=0).estimate(
        "nelbo"
    )
    assert row.rows_error is None and row.error > 0
    assert one.exp().value == pytest.approx(math.exp(one.value)) and one.exp().low is None


# -- text ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [Bytes(), Characters("abcé ☃"), GPT2()], ids=lambda t: type(t).__name__)
def test_bytes_and_characters_are_those_of_the_text(tokenizer):
    """The counts do not depend on where windows cut the text; an end token has neither."""
    text = "é☃ abc ☃☃ éa " * 30
    try:
        ids = tokenizer.encode(text)
    except FileNotFoundError:
        pytest.skip("GPT-2's merges are not on this machine")
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    with pytest.raises(ValueError, match=f"0..{tokenizer.vocab - 1}"):
        tokenizer.token_bytes(tokenizer.vocab)
    if tokenizer.end is not None:
        assert tokenizer.token_bytes(tokenizer.end) == b""
        ids = [*ids[:10], tokenizer.end, *ids[10:]]
    for length in (1, 7):
        rows = torch.tensor(ids[: len(ids) // length * length]).reshape(-1, length)
        size, characters = example_sizes(rows, tokenizer, chunk=5).values()
        kept = [i for i in rows.flatten().tolist() if i != tokenizer.end]
        if length == 1:
            assert (int(size.sum()), int(characters.sum())) == (len(text.encode()), len(text))
        sizes = token_sizes(tokenizer)
        assert int(size.sum()) == sum(int(sizes[i, 0]) for i in kept)


def test_windows_are_the_documents_joined_by_their_end(tmp_path):
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\n \n<|endoftext|>\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n')
    rows, left = token_windows(find_sources(tmp_path, ""), Bytes(), 4)
    stream = [*b"one", 256, *b"two", 256, *b"three", 256]
    assert rows.flatten().tolist() == stream[:12] and left == 2
    with pytest.raises(UserError, match=r"a\.txt, b\.jsonl holds 14 tokens, too few for one window of 15"):
        token_windows(find_sources(tmp_path, ""), Bytes(), 15)
    with pytest.raises(UserError, match=r"a\.txt, document at line 1 cannot be encoded"):
        token_windows(find_sources(tmp_path, ""), Characters("ab"), 4)


def test_measures_are_one_number_in_several_units():
    model = Known("uniform-linear")
    rows = torch.from_numpy(model.oracle.clean[drawn(model.oracle, 32, 0)])
    found = dataset_nelbo(model, m2s.Posterior(model.process), rows, 3, seed=0)
    result = summarize(found, {"byte": 2 * found.sites, "character": found.sites / 2})
    for term in TERMS:
        nats = result[term]["nats"]
        for measure, factor in (("bits", 1), ("bits_per_byte", 1 / 2), ("bits_per_character", 2)):
            for key, value in result[term][measure].items():
                assert value == pytest.approx(nats[key] * factor / math.log(2), rel=1e-9, abs=1e-15), (term, measure, key)
    assert result["nelbo"]["perplexity"]["value"] == pytest.approx(math.exp(result["nelbo"]["nats"]["value"]))
    assert result["nelbo"]["perplexity"]["high"] == pytest.approx(math.exp(result["nelbo"]["nats"]["high"]))
    assert "perplexity" not in result["prior"] and "perplexity" in result["integral"]
    assert set(summarize(found)["nelbo"]) == {"bits", "nats"} and "perplexity" in summarize(found, {})["nelbo"]


# -- the command ---------------------------------------------------------------------------------------------------------------


def checkpoint(folder, process, data, tokenizer=None, classes=None):
    """Save an untrained network."""
    torch.manual_seed(0)
    model = DiT(DiTConfig(process.states, width=16, depth=1, heads=2, condition_width=8, classes=classes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    save(folder, model, m2s.Posterior(process, "exact"), data, tokenizer)
    return folder


@pytest.fixture
def digits(tmp_path):
    """Return a folder like that of a run on digits."""
    run = checkpoint(tmp_path / "run", m2s.Uniform(17, m2s.Linear()), {"kind": "image", "shape": [8, 8], "levels": 17})
    (run / RECORD).write_text(json.dumps({"config": {"data": {"name": "digits"}}}))
    return run


@pytest.fixture
def speaker(tmp_path):
    """Return a checkpoint for bytes in windows of 16."""
    return checkpoint(tmp_path / "text", m2s.Absorbing(257, m2s.Linear()), {"kind": "text", "length": 16}, Bytes())


def test_digits_through_the_command(digits, tmp_path, capsys):
    out = tmp_path / "results" / "bpd.json"
    main(["evaluate", "bpd", str(digits), "--limit", "60", "--passes", "3", "--seed", "4", "--bins", "5", "--out", str(out)])
    text, result = capsys.readouterr().out, json.loads(out.read_text())
    assert out.with_suffix(".png").read_bytes().startswith(PNG)
    model, head = m2s.load(digits)
    rows = m2s.data.load("digits").test
    found = dataset_nelbo(model, head, Shard(rows, 60), 3, seed=4, batch_size=17)
    assert torch.equal(Shard(rows, 60)[torch.tensor([0, 59])], rows[[0, 59 * len(rows) // 60]])
    for term in TERMS:
        assert result[term]["bits"]["value"] == pytest.approx(found.estimate(term).value / math.log(2), rel=1e-5, abs=1e-12)
        assert f"{result[term]['bits']['value']:.5f}" in text
    assert np.mean(result["passes"]) == pytest.approx(result["nelbo"]["bits"]["value"])
    assert (result["rows"], result["sites"], result["unit"]) == (60, 3840, "dimension")
    assert len(result["curve"]) == 5 and result["data"]["split"] == "test" and result["options"]["seed"] == 4
    assert "perplexity" not in result["nelbo"] and result["checkpoint"]["head"]["offset"] == "exact"
    main(["evaluate", "bpd", str(digits), "--limit", "3", "--passes", "1", "--split", "train"])
    assert "digits (train): 3 images of 8 x 8, 1 pass\n" in capsys.readouterr().out


@pytest.mark.parametrize("allowed", [True, False])
def test_the_command_restores_the_flags_of_torch(digits, monkeypatch, allowed):
    seen = []

    def watched(*arguments, **options):
        seen.append(torch.backends.cudnn.allow_tf32)
        return dataset_nelbo(*arguments, **options)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    monkeypatch.setattr(bpd, "dataset_nelbo", watched)
    for precision in ("float32", "bf16"):
        main(["evaluate", "bpd", str(digits), "--limit", "2", "--passes", "1", "--device", "cpu", "--precision", precision])
        assert torch.backends.cudnn.allow_tf32 is allowed
    assert seen == [False, True]


def test_labels_are_given_to_a_network_that_takes_them(tmp_path, capsys):
    data = {"kind": "image", "shape": [8, 8], "levels": 17}
    run = checkpoint(tmp_path / "run", m2s.Uniform(17, m2s.Linear()), data, classes=10)
    out = tmp_path / "bpd.json"
    main(["evaluate", "bpd", str(run), "--data", "digits", "--limit", "20", "--passes", "2", "--out", str(out)])
    assert "given the labels" in capsys.readouterr().out
    (model, head), images = m2s.load(run), m2s.data.load("digits")
    at = torch.arange(20) * len(images.test) // 20
    found = dataset_nelbo(model, head, images.test[at], 2, labels=images.test_labels[at], seed=0).estimate("nelbo")
    other = dataset_nelbo(model, head, images.test[at], 2, seed=0).estimate("nelbo")
    assert json.loads(out.read_text())["nelbo"]["nats"]["value"] == pytest.approx(found.value, rel=1e-5) != other.value


def test_zero_shot_text_through_the_command(speaker, tmp_path, monkeypatch, capsys):
    """The same text gives the same figures as a file, as a prepared folder and as a split of a hub data set."""
    documents = [f"Schnee ☃ number {i}, fällt." for i in range(30)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "snow-test.jsonl").write_text(lines)
    prepare_text(tmp_path / "docs", tmp_path / "packed", Bytes())

    class Hub(list):
        column_names, _fingerprint = ("text",), "f"

    data = {"train": Hub([{"text": "other"}]), "test": Hub({"text": text} for text in documents)}
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: data))
    found = {}
    for number, source in enumerate(
        (tmp_path / "docs" / "snow-test.jsonl", tmp_path / "docs", tmp_path / "packed", "some/snow")
    ):
        out = tmp_path / f"out-{number}.json"
        main(["evaluate", "bpd", str(speaker), "--data", str(source), "--passes", "2", "--out", str(out)])
        found[str(source)] = result = json.loads(out.read_text())
        text = capsys.readouterr().out
        assert "perplexity, NELBO" in text and "bits per character, integral" in text and "tokens, less than a window" in text
        stream = [i for text in documents for i in (*text.encode(), 256)]
        kept = stream[: len(stream) // 16 * 16]
        assert (result["rows"], result["sites"]) == (len(kept) // 16, len(kept))
        assert result["data"]["left_out"] == len(stream) % 16
        assert result["bytes"] == sum(i != 256 for i in kept)
        assert result["characters"] == len(bytes(i for i in kept if i != 256).decode(errors="ignore"))
        nats = result["nelbo"]["nats"]["value"] * len(kept)
        assert result["nelbo"]["bits_per_byte"]["value"] == pytest.approx(nats / math.log(2) / result["bytes"])
        assert result["nelbo"]["perplexity"]["value"] == pytest.approx(math.exp(nats / len(kept)))
        assert result["integral"]["bits"]["value"] < result["nelbo"]["bits"]["value"]
    values = [result["nelbo"] for result in found.values()]
    assert all(value == values[0] for value in values)
    assert [result["data"]["split"] for result in found.values()] == [None, None, "test", "test"]


def test_the_text_a_run_was_trained_on(speaker, tmp_path, capsys):
    (tmp_path / "docs.txt").write_text("<|endoftext|>\n".join(f"{i} bottles\n" for i in range(40)))
    prepare_text(tmp_path / "docs.txt", tmp_path / "packed", Bytes(), validation_fraction=0.25)
    record = {"config": {"data": {"name": "text", "folder": str(tmp_path / "packed"), "length": 16}}}
    (speaker / RECORD).write_text(json.dumps(record))
    main(["evaluate", "bpd", str(speaker), "--passes", "1"])
    assert f"{tmp_path / 'packed'} (validation)" in capsys.readouterr().out
    main(["evaluate", "bpd", str(speaker), "--passes", "1", "--split", "train", "--limit", "2"])
    assert "(train): 2 windows of 16 tokens" in capsys.readouterr().out
    assert "test holds 0 tokens" in error_line(capsys, speaker, "--split", "test")


def test_invalid_input_is_rejected(digits, speaker, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bpd, "dataset_nelbo", lambda *_: pytest.fail("nothing may be computed"))
    assert "--passes is 0" in error_line(capsys, digits, "--passes", 0)
    assert "--limit is 0" in error_line(capsys, digits, "--limit", 0)
    assert "--t-min is 0.7" in error_line(capsys, digits, "--t-min", 0.7)
    assert "--split is 'tset'" in error_line(capsys, digits, "--split", "tset")
    assert "no validation split" in error_line(capsys, digits, "--split", "validation")
    assert "must end in .json" in error_line(capsys, digits, "--out", tmp_path / "a.txt")
    assert "no folder" in error_line(capsys, tmp_path / "nothing")
    monkeypatch.setitem(DATASETS._entries, "other", replace(DATASETS["digits"], name="other", shape=(4, 16)))
    assert "[8, 8] in 17 levels, but other has [4, 16] in 17" in error_line(capsys, digits, "--data", "other")
    assert "model of images, but" in error_line(capsys, digits, "--data", tmp_path)
    (digits / RECORD).write_text("{}")
    assert "give --data" in error_line(capsys, digits)
    (digits / RECORD).unlink()
    assert "does not say what it was trained on" in error_line(capsys, digits)

    assert "is a model of text, but digits holds images" in error_line(capsys, speaker, "--data", "digits")
    assert "no-such-file: check the path, or give a data set of the Hugging Face hub" in error_line(
        capsys, speaker, "--data", tmp_path / "no-such-file"
    )
    (tmp_path / "short.txt").write_text("short")
    assert "short.txt holds 6 tokens, too few" in error_line(capsys, speaker, "--data", tmp_path / "short.txt")
    assert "leave out --split" in error_line(capsys, speaker, "--data", tmp_path / "short.txt", "--split", "test")
    prepare_text(tmp_path / "short.txt", tmp_path / "chars", Characters("short"), validation_fraction=0.0)
    assert "prepare the text with that tokenizer" in error_line(capsys, speaker, "--data", tmp_path / "chars")
    prepare_text(tmp_path / "short.txt", tmp_path / "bytes", Bytes(), validation_fraction=0.0)
    assert "0 test and 0 validation tokens" in error_line(capsys, speaker, "--data", tmp_path / "bytes")
    rows = type("Rows", (list,), {"column_names": ("text",), "_fingerprint": "f"})
    hub = types.SimpleNamespace(load_dataset=lambda *_, **__: {"train": rows()})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert "neither test nor validation: give --split train" in error_line(capsys, speaker, "--data", "some/thing")

    process = m2s.Uniform(17, m2s.Linear())
    assert "does not describe its data" in error_line(capsys, checkpoint(tmp_path / "bare", process, None), "--data", "digits")
    fitted = checkpoint(tmp_path / "fitted", process, {"kind": "sequence", "length": 4, "vocab": 17})
    assert f"sequences in memory, which a command cannot read: in Python, m2s.load('{fitted}').evaluate(x) estimates" in (
        error_line(capsys, fitted)
    )
    mute = checkpoint(tmp_path / "mute", process, {"kind": "text", "length": 4})
    assert "has no tokenizer" in error_line(capsys, mute, "--data", tmp_path / "short.txt")
    endless = checkpoint(tmp_path / "endless", process, {"kind": "text"})
    assert "does not say how long" in error_line(capsys, endless, "--data", tmp_path / "short.txt")


def test_the_help_has_examples(capsys):
    for arguments, words in (
        (["evaluate", "--help"], ("bpd", "fid", "genppl")),
        (["evaluate", "bpd", "--help"], ("--data", "95%")),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert not exit_.value.code
        text = capsys.readouterr().out
        assert all(word in text for word in (*words, "m2s evaluate bpd runs/digits"))


# --- two models -----------------------------------------------------------------------------------------------------------


def test_a_difference_on_the_same_noise_has_smaller_errors_and_the_right_value():
    """The difference of two similar networks is that of their NELBOs, and both errors are those of paired differences."""
    process = m2s.Uniform(5, m2s.Linear())
    head, x_0 = m2s.Posterior(process), torch.randint(5, (60, 4), generator=torch.Generator().manual_seed(3))
    tables = [torch.randn(5, 5, generator=torch.Generator().manual_seed(1))]
    tables.append(tables[0] + 0.05 * torch.randn(5, 5, generator=torch.Generator().manual_seed(2)))
    one, two = [dataset_nelbo(lambda x_t, t, at=table: at[x_t], head, x_0, passes=6, seed=0) for table in tables]
    gap = one.minus(two)
    for name in TERMS:
        found, both = gap.estimate(name), [each.estimate(name) for each in (one, two)]
        assert found.value == pytest.approx(both[0].value - both[1].value, abs=1e-12)
    found, first = gap.estimate("nelbo"), one.estimate("nelbo")
    each = (one.term("nelbo") - two.term("nelbo")).sum(1) / x_0.numel()
    assert found.error == pytest.approx(float(each.std()) / math.sqrt(6)) and found.error < 0.3 * first.error
    assert found.rows_error < 0.3 * first.rows_error
    none = one.minus(one).estimate("nelbo")
    assert none.value == none.error == none.rows_error == 0
    with pytest.raises(ValueError, match="the same examples, with the same number of passes"):
        one.minus(dataset_nelbo(lambda x_t, t: tables[0][x_t], head, x_0, passes=5, seed=0))
    with pytest.raises(ValueError, match="the same examples"):
        one.minus(dataset_nelbo(lambda x_t, t: tables[0][x_t], head, x_0[:50], passes=6, seed=0))


def test_a_difference_from_an_exact_likelihood():
    """An exact likelihood has one pass, which is compared with every pass of the other."""
    head, x_0 = NextToken(Shifted(5)), torch.randint(5, (60, 4), generator=torch.Generator().manual_seed(3))
    exact = dataset_nelbo(lambda x_t, t: torch.zeros(*x_t.shape, 6), head, x_0, passes=6, seed=0)
    other = dataset_nelbo(
        lambda x_t, t: torch.zeros(*x_t.shape, 5), m2s.Posterior(m2s.Uniform(5, m2s.Linear())), x_0, passes=6, seed=0
    )
    for one, two in ((exact, other), (other, exact)):
        gap = one.minus(two)
        assert gap.t.shape == (6, 60) and not gap.exact
        wanted = one.estimate("nelbo").value - two.estimate("nelbo").value
        assert gap.estimate("nelbo").value == pytest.approx(wanted, abs=1e-12)
    assert exact.minus(exact).exact and exact.minus(exact).estimate("nelbo").value == 0


def test_two_runs_through_the_command(digits, tmp_path, capsys):
    data, out = {"kind": "image", "shape": [8, 8], "levels": 17}, tmp_path / "bpd.json"
    other = checkpoint(tmp_path / "other", m2s.Absorbing(17, m2s.Linear()), data)
    options = ["--data", "digits", "--limit", "12", "--passes", "2", "--device", "cpu"]
    main(["evaluate", "bpd", str(digits), "--against", str(other), *options, "--out", str(out)])
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    alone = tmp_path / "alone.json"
    main(["evaluate", "bpd", str(other), *options, "--out", str(alone)])
    theirs = json.loads(alone.read_text())
    assert result["against"]["nelbo"] == theirs["nelbo"]
    gap = result["against"]["difference"]["nelbo"]["bits"]
    assert gap["value"] == pytest.approx(result["nelbo"]["bits"]["value"] - theirs["nelbo"]["bits"]["value"], abs=1e-9)
    assert f"{gap['value']:.5f}" in printed and result["against"]["checkpoint"]["weights"] == theirs["checkpoint"]["weights"]
    ar = tmp_path / "ar"
    model = DiT(DiTConfig(18, width=16, depth=1, heads=2, time=False, causal=True))
    m2s.hub.save(ar, model, NextToken(Shifted(17)), data)
    for one, two, called in ((ar, digits, "its NELBO"), (digits, ar, "its -log p")):
        out = tmp_path / f"{one.name}.json"
        main(["evaluate", "bpd", str(one), "--against", str(two), *options, "--out", str(out)])
        printed, result = capsys.readouterr().out.split("against")[1], json.loads(out.read_text())["against"]
        assert called in printed and "difference, " not in printed and printed.count("\ndifference ") == 1
        assert set(result["difference"]) == {"nelbo"} and "integral" not in result
    labeled = checkpoint(tmp_path / "labeled", m2s.Uniform(17, m2s.Linear()), data, classes=10)
    with pytest.raises(SystemExit):
        main(["evaluate", "bpd", str(digits), "--against", str(labeled), *options])
    assert "labels is False and True" in capsys.readouterr().err
