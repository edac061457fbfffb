"""`m2s benchmark`: what it prints and writes, and its instruments against known numbers. No time is judged."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch

import m2s
from m2s.benchmark import PARTS, Setting, gpu_clock
from m2s.benchmark.accuracy import accuracy
from m2s.benchmark.bisection import blocked_bisection, residual, score_cases
from m2s.benchmark.comparison import Comparison, Stopwatch, peak_gib
from m2s.benchmark.dense_step import dense_step
from m2s.benchmark.direct_loss import direct_score_entropy
from m2s.benchmark.format import format_bar
from m2s.benchmark.inputs import Inputs
from m2s.benchmark.projection import bisection, scores
from m2s.benchmark.train import operations_per_token
from m2s.cli import main
from m2s.models import DiT, DiTConfig

with contextlib.suppress(ImportError):  # before a test removes TRITON_INTERPRET, which triton reads when it is imported
    import triton  # noqa: F401

SMALL = ["--quick", "--rows", "8", "--vocab", "50", "--width", "16", "--repeats", "1"]
CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Setting(CPU, rows=16, vocab=50, width=16, repeats=2, depth=1)
BARS = Setting(torch.device("cuda"), rows=16_384, vocab=50_257, width=768, repeats=1, depth=12)


@pytest.fixture
def uncompiled(monkeypatch):
    """A machine without a C++ compiler."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)


@pytest.fixture
def bare(monkeypatch, uncompiled):
    """A machine without a C++ compiler and without Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def run(tmp_path, *arguments: str, device: str = "cpu") -> dict:
    """Run `m2s benchmark` with small sizes and return what it wrote."""
    out = tmp_path / "benchmark.json"
    main(["benchmark", *arguments, *SMALL, "--device", device, "--out", str(out)])
    return json.loads(out.read_text())


def test_all_parts_on_a_bare_machine(tmp_path, capsys, bare):
    found = run(tmp_path)
    printed = capsys.readouterr().out
    assert list(found["parts"]) == list(PARTS)
    assert {"command", "device", "versions", "setting", "parts", "bars"} <= found.keys()
    assert found["setting"] | {"rows": 8, "vocab": 50, "width": 16, "columns": 64, "length": 1, "batch": 8} == found["setting"]
    for name, part in found["parts"].items():
        assert {"what", "contenders", "ratios", "bars", "skipped"} <= part.keys()
        assert part["what"] in printed
        assert "failed" not in part
        assert not any("failed" in line for line in part["skipped"])
        others = {"direct-loss": "compiled", "bisection": "compiled", **dict.fromkeys(("dense-step", "expm", "plain-loop"))}
        variant = others.get(name, "fused")
        assert variant is None or any(variant in line for line in part["skipped"])
        for line in part["skipped"]:
            assert line in printed
        for contender in part["contenders"].values():
            assert 0 < contender["best_ms"] <= contender["median_ms"]
            assert contender["peak_gib"] is None or contender["peak_gib"] < 1
    assert [bar["met"] for bar in found["bars"]] == [None] * len(found["bars"])
    assert len(found["bars"]) == sum(len(part["bars"]) for part in found["parts"].values())
    skipped = " ".join(found["parts"]["loss"]["skipped"])
    assert "m2s, compiled: there is no C++ compiler" in skipped
    assert "Liger" in skipped
    assert "CCE" in skipped
    train = found["parts"]["train"]["contenders"]["kernels reference"]
    assert train["tokens_per_second"] == pytest.approx(8e3 / train["median_ms"])
    rate, operations = (found["parts"]["train"][name] for name in ("matrix_rate", "operations_a_token"))
    assert train["mfu"] == pytest.approx(train["tokens_per_second"] * operations / rate)


def test_both_audits_find_the_same_classes(tmp_path):
    """Both forms of the audit, of the kernels and in float64, count the same call; the kernels where they run."""
    part = run(tmp_path, "audit")["parts"]["audit"]
    found = list(part["classes"].values())
    assert found and all(sum(classes) == 8 and classes == found[0] for classes in found)
    assert len(found) == (1 if any("fused" in line for line in part["skipped"]) else 2)
    assert {"network body", "step, not audited", "audit of one call, float64 scores"} <= part["contenders"].keys()


READINGS = """1980, 1980, 118.54, 700.00, 0x0000000000000000
1410, 1980, 650.67, 700.00, 0x0000000000000004
1710, 1980, 695.12, 700.00, 0x0000000000000004
1755, 1980, 691.64, 700.00, 0x0000000000000000
[N/A], 1980, 691.64, 700.00, 0x0000000000000004
1755, 1980, 69"""


def test_clock_is_summarized_over_busy_readings():
    """Output of nvidia-smi that is cut off at the end. Readings of an idle GPU do not count."""
    found = gpu_clock.summarize_readings(READINGS)
    assert found.pop("share_at_the_power_limit") == pytest.approx(2 / 3)
    assert found == {"mhz": 1710, "mhz_at_most": 1980, "watt": 691.64, "watt_at_most": 700}
    assert gpu_clock.summarize_readings("") == gpu_clock.summarize_readings("[N/A], 1980, 1, 2, 0x4") == {}


def test_clock_is_read_by_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    written = tmp_path / "written"
    lines = (
        "import sys, time",
        "fields = 'clocks.sm,clocks.max.sm,power.draw,power.limit,clocks_throttle_reasons.active'",  # as it names them
        "assert sys.argv[1:] == ['--query-gpu=' + fields, '--format=csv,noheader,nounits', '-lms', '50', '-i', '3']",
        f"print({READINGS!r}, flush=True)",
        f"open({str(written)!r}, 'w').close()",
        "time.sleep(300)",
    )
    program.write_text("\n".join([f"#!{sys.executable}", *lines]))
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: 3)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with gpu_clock.monitor_clock(torch.device("cuda")) as found:
        deadline = time.monotonic() + 60
        while not written.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == {}
    assert found["mhz"] == 1710
    monkeypatch.setenv("PATH", "")
    with gpu_clock.monitor_clock(torch.device("cuda")) as found:
        pass
    assert found == {}
    with gpu_clock.monitor_clock(torch.device("cpu")) as found:
        pass
    assert found == {}


def test_a_quick_run_on_a_cpu_compiles_nothing(tmp_path, monkeypatch):
    """With compilation a quick run takes minutes, and with 256 levels the transition matrices alone take one."""
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch._dynamo.utils.counters.clear()
    found = run(tmp_path, "loss", "sample", "direct-loss", "bisection", "expm")
    assert not torch._dynamo.utils.counters["frames"]
    for name in ("loss", "sample", "direct-loss", "bisection"):
        assert any("takes longer than a rehearsal: leave out --quick" in line for line in found["parts"][name]["skipped"])
    assert Setting.of(CPU, False).why_unavailable("compiled") is None
    monkeypatch.setattr("m2s.benchmark.transition_matrices.ExpmTable.of", lambda rates: pytest.fail(str(len(rates))))
    with pytest.raises(pytest.fail.Exception, match=r"^32$"):
        PARTS["expm"](Setting.of(CPU, True))


def test_fused_forms(tmp_path, uncompiled, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("m2s.benchmark.sample.ROUNDS", 1)
    parts = ("loss", "projection", "classify", "reverse-step", "sample")
    found = run(tmp_path, *parts, "--against-step", "66", device=DEVICE)["parts"]
    assert not any("failed" in line for part in found.values() for line in part["skipped"])
    fused = found["loss"]["accuracy"]["m2s, fused"]
    assert fused["mean_error"] < 1e-5
    assert max(fused["hidden_gradient_error"], fused["weight_gradient_error"]) < 1e-2
    assert found["projection"]["greatest_error"]["m2s, fused"] < 1e-5
    assert found["classify"]["rows_of_the_same_class"] == 1
    assert found["reverse-step"]["tokens_the_same_as_the_reference"] == {"bayes": 1, "euler": 1}
    bars = {bar["claim"]: bar["measured"] for part in found.values() for bar in part["bars"]}
    loss = found["loss"]["contenders"]
    expected = loss["m2s, fused"]["median_ms"] / loss["three GEMMs (floor)"]["median_ms"]
    assert bars["fused M2S loss over the GEMM floor"] == pytest.approx(expected)
    step = found["sample"]["contenders"]["m2s.sample, fused"]["median_ms"]
    assert bars["66 ms over the fused sampler step"] == pytest.approx(66 / step)
    alone = sum(found["sample"]["contenders"][name]["median_ms"] for name in ("network body", "head GEMM"))
    assert bars["fused sampler step over compiled body and head GEMM"] == pytest.approx(step / alone)


def test_kernels_are_tuned_over_blocks_and_warps(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr("m2s.benchmark.tune.BLOCKS", (512,))
    monkeypatch.setattr("m2s.benchmark.tune.WARPS", (8, 32))
    table = run(tmp_path, "loss", "projection", "--tune", device=DEVICE)["parts"]["tune"]["tables"]
    assert table.keys() == {"posterior_entropy", "score_entropy", "factorized_entropy", "cross_entropy", "project"}
    assert all(row["512"]["8"] > 0 and row["512"]["32"] is None for row in table.values())  # 512 is less than 32 warps have
    assert "posterior_entropy: median ms by block (rows) and warps (columns)" in capsys.readouterr().out


@pytest.mark.parametrize(("met", "word"), [(True, "met"), (False, "MISSED"), (None, "not checked")])
def test_a_target_is_met_missed_or_not_checked(met, word):
    bar = {"met": met, "claim": "time over copies", "measured": 1.25, "at_most": 2.0}
    assert format_bar(bar) == f"{word:11s}  time over copies: 1.25 (at most 2)"


def test_part_that_fails_does_not_stop_the_others(tmp_path, bare, monkeypatch, capsys):
    def broken(_):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(PARTS._entries, "projection", broken)
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, "projection", "classify")
    assert exit_.value.code == 1
    parts = json.loads((tmp_path / "benchmark.json").read_text())["parts"]
    assert parts["projection"]["failed"] == "RuntimeError: out of luck"
    assert parts["classify"]["contenders"]
    assert "projection failed: RuntimeError: out of luck" in capsys.readouterr().out


def test_call_that_fails_is_left_out_and_listed(bare):
    comparison = Comparison(TINY)
    comparison.add("good", lambda: 1)
    comparison.add("bad", lambda: 1 / 0)
    comparison.add("absent", lambda: 1, "compiled")
    comparison.run()
    assert comparison.results.keys() == {"good"}
    assert comparison.skipped == ["absent: there is no C++ compiler", "bad: failed, ZeroDivisionError: division by zero"]
    assert comparison.ratio("good", "good") == 1
    assert comparison.ratio("good", "good", "good") == 0.5
    assert comparison.ratio("good", "bad") is None
    assert comparison.output("bad") is None


def test_bars_are_judged_at_their_sizes_only():
    there, elsewhere = Comparison(BARS), Comparison(TINY)
    assert there.bar("a", 1.6, at_most=1.6)["met"] is True
    assert there.bar("a", 1.61, at_most=1.6)["met"] is False
    assert there.bar("a", 3.2, at_least=3.3)["met"] is False
    assert there.bar("a", None, at_least=3.3)["met"] is None
    assert elsewhere.bar("a", 1.0, at_most=1.6)["met"] is None
    assert elsewhere.bar("a", 1.0, at_most=1.6, judged=True)["met"] is True
    assert TINY.is_cpu_of(16, 50) and not TINY.is_cpu_of(16, 51) and not BARS.is_cpu_of(16_384, 50_257)
    assert format_bar(there.bar("claim", 1.61, at_most=1.6)) == "MISSED       claim: 1.61 (at most 1.6)"


def test_stopwatch_measures_between_its_stamps(monkeypatch):
    moments = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    watch = Stopwatch(CPU)
    for _ in range(3):
        watch.stamp()
    assert watch.intervals() == [500, 2000]


def test_accuracy_finds_known_errors():
    inputs = Inputs.random(TINY)
    head = m2s.Posterior(m2s.Uniform(TINY.vocab, m2s.Linear()))
    x_t = inputs.corrupt(head.process)
    hidden, weight = (value.double().requires_grad_() for value in inputs.operands)

    def off_by(losses: float, gradients: float):
        def call(weights):
            output = m2s.Unprojected(hidden, weight, inputs.bias.double())
            terms = weights * m2s.score_entropy(head, output, inputs.x_0, x_t, inputs.t)
            found = torch.autograd.grad(terms.sum(), (hidden, weight))
            return terms.detach() * (1 + losses), (*(value * (1 + gradients) for value in found), None)

        return call

    found = accuracy(Comparison(TINY), inputs, head, x_t, {"exact": off_by(0, 0), "off": off_by(-1e-3, 1e-2)})
    assert max(abs(found["exact"][name]) for name in found["exact"] if "standard" not in name) < 1e-12
    assert found["off"]["mean_error"] == pytest.approx(1e-3)
    assert found["off"]["signed_error"] == pytest.approx(-1e-3)
    assert found["off"]["hidden_gradient_error"] == pytest.approx(1e-2)
    assert found["off"]["weight_gradient_error"] == pytest.approx(1e-2)


def test_bisection_finds_the_nearest_posterior():
    score, x_t, t, process = scores(Setting(CPU, rows=256, vocab=97, width=16, repeats=1, depth=1))
    truth = m2s.project(score.double(), x_t, t, process)
    assert (bisection(score, x_t, t).double() - truth).abs().max() < 1e-5


def test_blocked_bisection_is_the_same_and_its_residual_small():
    for score, x_t, t in score_cases(20, 60, 0, CPU).values():
        mu = bisection(score, x_t, t)
        assert torch.equal(blocked_bisection(score, x_t, t), mu) or (blocked_bisection(score, x_t, t) - mu).abs().max() < 1e-6
        process = m2s.Uniform(60, m2s.Linear())
        exact = m2s.project(score.double(), x_t, t, process)
        assert residual(exact, score, x_t, t) < 1e-12
        assert residual(mu, score, x_t, t) < 1e-4
        assert residual(torch.full_like(mu, 1 / 60), score, x_t, t) > 1e-3


def test_direct_score_entropy_is_score_entropy():
    process = m2s.Uniform(11, m2s.Linear())
    x_0, t = torch.randint(11, (3, 5)), torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    x_t, logits = process.corrupt(x_0, t), torch.randn(3, 5, 11, dtype=torch.float64)
    expected = m2s.score_entropy(m2s.Posterior(process), logits, x_0, x_t, t)
    torch.testing.assert_close(direct_score_entropy(logits, x_0, x_t, t), expected)


def test_dense_step_has_the_analytic_probabilities():
    process = m2s.Uniform(4, m2s.Linear())
    t, s, count = torch.tensor([0.6]), torch.tensor([0.3]), 200_000
    x_t = torch.full((1, count), 2)
    score = m2s.score_from_posterior(torch.tensor([[0.1, 0.5, 0.3, 0.1]]), x_t[0, :1], t, process)
    drawn = dense_step(score.log().expand(1, count, 4), x_t, t, s)
    weights = m2s.analytic_weights(score.double(), x_t[0, :1], s.double(), t.double(), process)[0]
    frequencies = drawn.flatten().bincount(minlength=4) / count
    assert (frequencies - weights / weights.sum()).abs().max() < 5 * 0.5 / count**0.5


def test_peak_memory_counts_tensors():
    """A call that holds two of three tensors of 64 MiB at once."""

    def call():
        first = torch.ones(1 << 24)
        second = first + 1
        del first
        return second * 2

    call()
    gib = peak_gib(call, CPU)
    assert gib is None or gib == pytest.approx(1 / 8, rel=0.1)
    assert peak_gib(lambda: None, CPU) in (None, pytest.approx(0, abs=0.01))


def test_operations_of_the_text_model():
    with torch.device("meta"):
        model = DiT(DiTConfig.preset("small", 50_257))
    parameters = 169_697_920 - 50_304 * 768  # as the paper counts them, without the embedding table
    assert operations_per_token(model, 512) == 6 * parameters + 12 * 12 * 768 * 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lsos"], "did you mean loss?"),
        (["--rows", "7"], "--rows is 7"),
        (["--rows", "4104"], "--rows is 4104"),
        (["--width", "48"], "--width is 48"),
        (["--method", "mldm"], "there is no method 'mldm': did you mean mdlm"),
        (["--vocab", "2"], "--vocab is 2"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--against", "-1"], "--against is -1"),
        (["--against-step", "nan"], "--against-step is nan"),
        (["--device", "nowhere"], "nowhere"),
        (["--device", "meta"], "it has no values"),
        (["--out", "new/x.txt"], ".json"),
        (["--out", "taken.json"], "taken.json is there already"),
    ],
    ids=" ".join,
)
def test_invalid_arguments_are_one_line_and_write_nothing(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").write_text("kept")
    for name in PARTS:
        monkeypatch.setitem(PARTS._entries, name, lambda _: pytest.fail("measured before the arguments were checked"))
    with pytest.raises(SystemExit) as exit_:
        main(["benchmark", *arguments])
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]
    assert (tmp_path / "taken.json").read_text() == "kept"


def test_training_of_another_method(tmp_path, bare, capsys):
    part = run(tmp_path, "train", "--method", "mdlm")["parts"]["train"]
    assert part["what"].endswith("method mdlm") and part["contenders"]["kernels reference"]["tokens_per_second"] > 0
    assert part["contenders"]["kernels reference"]["mfu"] is None and any(
        "only sites with a mask" in s for s in part["skipped"]
    )
    assert not dataclasses.replace(BARS, method="mdlm").full and BARS.full


def test_importing_the_library_does_not_import_benchmarks():
    heavy = ("m2s.benchmark", "triton", "torch.distributed.checkpoint")
    code = f"import sys, m2s, m2s.cli; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
