"""`m2s benchmark`: what it promises to print and write, its instruments held to numbers known beforehand. No time is judged."""

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
from m2s.benchmark.comparison import Comparison, Watch
from m2s.benchmark.format import bar_words
from m2s.benchmark.inputs import Inputs
from m2s.benchmark.projection import bisection, scores
from m2s.benchmark.train import operations_a_token
from m2s.cli import main
from m2s.models import DiT, DiTConfig

with contextlib.suppress(ImportError):  # now, as tests/conftest.py wants it, and not while a machine without it is played
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
    """A machine without a C++ compiler and an interpreter of kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def run(tmp_path, *arguments: str, device: str = "cpu") -> dict:
    out = tmp_path / "benchmark.json"
    main(["benchmark", *arguments, *SMALL, "--device", device, "--out", str(out)])
    return json.loads(out.read_text())


def test_all_parts_on_a_bare_machine(tmp_path, capsys, bare):
    found = run(tmp_path)
    printed = capsys.readouterr().out
    assert list(found["parts"]) == list(PARTS)
    assert {"command", "device", "versions", "setting", "parts", "bars"} <= found.keys()
    assert found["setting"] | {"rows": 8, "vocab": 50, "width": 16, "columns": 64, "length": 1, "batch": 8} == found["setting"]
    for part in found["parts"].values():
        assert {"what", "contenders", "ratios", "bars", "skipped"} <= part.keys()
        assert part["what"] in printed
        assert "failed" not in part
        assert not any("failed" in line for line in part["skipped"])
        assert any("fused" in line for line in part["skipped"])
        for line in part["skipped"]:
            assert line in printed
        for contender in part["contenders"].values():
            assert 0 < contender["best_ms"] <= contender["median_ms"]
            assert contender["peak_gib"] is None
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


SEEN = """1980, 1980, 118.54, 700.00, 0x0000000000000000
1410, 1980, 650.67, 700.00, 0x0000000000000004
1710, 1980, 695.12, 700.00, 0x0000000000000004
1755, 1980, 691.64, 700.00, 0x0000000000000000
[N/A], 1980, 691.64, 700.00, 0x0000000000000004
1755, 1980, 69"""


def test_what_a_clock_did():
    """As nvidia-smi tells it, cut off at the end; a GPU that waits does not count."""
    found = gpu_clock.summary(SEEN)
    assert found.pop("share_at_the_power_limit") == pytest.approx(2 / 3)
    assert found == {"mhz": 1710, "mhz_at_most": 1980, "watt": 691.64, "watt_at_most": 700}
    assert gpu_clock.summary("") == gpu_clock.summary("[N/A], 1980, 1, 2, 0x4") == {}


def test_a_clock_is_watched_by_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    told = tmp_path / "told"
    lines = (
        "import sys, time",
        "fields = 'clocks.sm,clocks.max.sm,power.draw,power.limit,clocks_throttle_reasons.active'",  # as it names them
        "assert sys.argv[1:] == ['--query-gpu=' + fields, '--format=csv,noheader,nounits', '-lms', '50', '-i', '3']",
        f"print({SEEN!r}, flush=True)",
        f"open({str(told)!r}, 'w').close()",
        "time.sleep(300)",
    )
    program.write_text("\n".join([f"#!{sys.executable}", *lines]))
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: 3)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with gpu_clock.watched(torch.device("cuda")) as found:
        deadline = time.monotonic() + 60
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == {}
    assert found["mhz"] == 1710
    monkeypatch.setenv("PATH", "")
    with gpu_clock.watched(torch.device("cuda")) as found:
        pass
    assert found == {}
    with gpu_clock.watched(torch.device("cpu")) as found:
        pass
    assert found == {}


def test_fused_forms(tmp_path, uncompiled, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("m2s.benchmark.sample.ROUNDS", 1)
    parts = ("loss", "projection", "audit", "draw", "sample")
    found = run(tmp_path, *parts, "--against-step", "66", device=DEVICE)["parts"]
    assert not any("failed" in line for part in found.values() for line in part["skipped"])
    fused = found["loss"]["accuracy"]["m2s, fused"]
    assert fused["mean_error"] < 1e-5
    assert max(fused["hidden_gradient_error"], fused["weight_gradient_error"]) < 1e-2
    assert found["projection"]["greatest_error"]["m2s, fused"] < 1e-5
    assert found["audit"]["rows_of_the_same_class"] == 1
    assert found["draw"]["tokens_the_same_as_the_reference"] == {"bayes": 1, "euler": 1}
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
    assert table.keys() == {"bridged", "free", "masked", "project"}
    assert all(row["512"]["8"] > 0 and row["512"]["32"] is None for row in table.values())  # 512 is less than 32 warps have
    assert "bridged: median ms by block (rows) and warps (columns)" in capsys.readouterr().out


def test_a_part_that_fails_leaves_the_others_alone(tmp_path, bare, monkeypatch, capsys):
    def broken(_):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(PARTS, "projection", broken)
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, "projection", "audit")
    assert exit_.value.code == 1
    parts = json.loads((tmp_path / "benchmark.json").read_text())["parts"]
    assert parts["projection"]["failed"] == "RuntimeError: out of luck"
    assert parts["audit"]["contenders"]
    assert "projection failed: RuntimeError: out of luck" in capsys.readouterr().out


def test_a_contender_that_fails_is_left_out_and_named(bare):
    contest = Comparison(TINY)
    contest.enter("good", lambda: 1)
    contest.enter("bad", lambda: 1 / 0)
    contest.enter("absent", lambda: 1, "compiled")
    contest.run()
    assert contest.found.keys() == {"good"}
    assert contest.skipped == ["absent: there is no C++ compiler", "bad: failed, ZeroDivisionError: division by zero"]
    assert contest.ratio("good", "good") == 1
    assert contest.ratio("good", "good", "good") == 0.5
    assert contest.ratio("good", "bad") is None
    assert contest.once("bad") is None


def test_bars_are_judged_at_their_own_size_only():
    there, elsewhere = Comparison(BARS), Comparison(TINY)
    assert there.bar("a", 1.6, at_most=1.6)["met"] is True
    assert there.bar("a", 1.61, at_most=1.6)["met"] is False
    assert there.bar("a", 3.2, at_least=3.3)["met"] is False
    assert there.bar("a", None, at_least=3.3)["met"] is None
    assert elsewhere.bar("a", 1.0, at_most=1.6)["met"] is None
    assert bar_words(there.bar("claim", 1.61, at_most=1.6)) == "MISSED    claim: 1.61 (at most 1.6)"


def test_a_watch_measures_between_its_moments(monkeypatch):
    moments = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    watch = Watch(CPU)
    for _ in range(3):
        watch.tick()
    assert watch.gaps() == [500, 2000]


def test_errors_that_were_put_in_are_the_errors_found():
    given = Inputs.draw(TINY)
    head = m2s.Posterior(m2s.Uniform(TINY.vocab, m2s.Linear()))
    x_t = given.corrupt(head.process)
    hidden, weight = (value.double().requires_grad_() for value in given.halves)

    def off_by(losses: float, gradients: float):
        def call(weights):
            output = m2s.Unprojected(hidden, weight, given.bias.double())
            terms = weights * m2s.score_entropy(head, output, given.x_0, x_t, given.t)
            found = torch.autograd.grad(terms.sum(), (hidden, weight))
            return terms.detach() * (1 + losses), (*(value * (1 + gradients) for value in found), None)

        return call

    found = accuracy(Comparison(TINY), given, head, x_t, {"exact": off_by(0, 0), "off": off_by(-1e-3, 1e-2)})
    assert max(abs(found["exact"][name]) for name in found["exact"] if "standard" not in name) < 1e-12
    assert found["off"]["mean_error"] == pytest.approx(1e-3)
    assert found["off"]["signed_error"] == pytest.approx(-1e-3)
    assert found["off"]["hidden_gradient_error"] == pytest.approx(1e-2)
    assert found["off"]["weight_gradient_error"] == pytest.approx(1e-2)


def test_bisection_finds_the_nearest_posterior():
    score, x_t, t, process = scores(Setting(CPU, rows=256, vocab=97, width=16, repeats=1, depth=1))
    truth = m2s.project(score.double(), x_t, t, process)
    assert (bisection(score, x_t, t).double() - truth).abs().max() < 1e-5


def test_operations_of_the_papers_text_model():
    with torch.device("meta"):
        model = DiT(DiTConfig.preset("small", 50_257))
    parameters = 169_697_920 - 50_304 * 768  # as the paper counts them, without the embedding table
    assert operations_a_token(model, 512) == 6 * parameters + 12 * 12 * 768 * 512


@pytest.mark.parametrize(
    ("arguments", "said"),
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
        (["--device", "meta"], "only cpu and cuda"),
        (["--out", "new/x.txt"], ".json"),
        (["--out", "taken.json"], "taken.json is there already"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").write_text("kept")
    for name in PARTS:
        monkeypatch.setitem(PARTS, name, lambda _: pytest.fail("measured before it looked"))
    with pytest.raises(SystemExit) as exit_:
        main(["benchmark", *arguments])
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]
    assert (tmp_path / "taken.json").read_text() == "kept"


def test_another_method(tmp_path, bare, capsys):
    part = run(tmp_path, "train", "--method", "mdlm")["parts"]["train"]
    assert part["what"].endswith("method mdlm") and part["contenders"]["kernels reference"]["tokens_per_second"] > 0
    assert part["contenders"]["kernels reference"]["mfu"] is None and any(
        "only sites with a mask" in s for s in part["skipped"]
    )
    assert not dataclasses.replace(BARS, method="mdlm").full and BARS.full


def test_nothing_else_imports_it():
    heavy = ("m2s.benchmark", "triton", "torch.distributed.checkpoint")
    code = f"import sys, m2s, m2s.cli; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
