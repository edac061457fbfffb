"""Several processes: the same batch, the same curve and the same weights as one."""

import errno
import functools
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing import ProcessExitedException

from m2s import Absorbing, Hybrid, Linear, RateMatrix, Uniform, load
from m2s.cli import main
from m2s.distributed import World
from m2s.errors import UserError
from m2s.hub import folder as hub_folder
from m2s.losses.noise import corrupt_by_counter, sample_times
from m2s.training import Config, loop, save, state, train
from m2s.training.config import replace
from m2s.training.parallel import gather_full
from small_runs import bits, exit_codes, finish, launch, losses, outcome, random_rows, small, tensors, together, weighted_rows


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_and_two_have_the_same_curve_and_weights(tmp_path, parallel):
    changes = {"steps": 20, "log_every": 1, "network__labels": True, "precision": "float32"}
    train(small(tmp_path / "one", **changes), weighted_rows())
    together(2, small(tmp_path / "two", parallel=parallel, **changes), weighted_rows())
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 20
    assert two == pytest.approx(one, rel=1e-6)
    ours, theirs = outcome(tmp_path / "one")["log"][-1], outcome(tmp_path / "two")["log"][-1]
    assert theirs["validation_bits"] == pytest.approx(ours["validation_bits"], rel=1e-5)
    expected, found = (tensors(state.place(tmp_path / name / "state", 20)) for name in ("one", "two"))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_only_the_first_of_two_processes_prints(tmp_path, parallel, capfd):
    out = tmp_path / "run"
    less = ["--batch", "8", "--network.width", "8", "--validation-samples", "4", "--device", "cpu", "--parallel", parallel]
    finish(launch(2, main, ["train", "digits", "--steps", "2", "--out", str(out), *less]))
    parameters = sum(weight.numel() for weight in load(out).model.parameters())
    said = capfd.readouterr()
    assert said.out.count("2 steps, upper bound on the NLL of held-out data") == 1 and said.out.count("\n") == 1
    assert said.err.count(f"m2s-offset: unet tiny ({parameters:,} parameters), 2 processes on cpu, float32; digits") == 1


def run_as(how: str, config: Config) -> None:
    """Run on one process, or on two with DDP or FSDP."""
    if how == "one":
        train(config, random_rows())
    else:
        together(2, replace(config, "parallel", how), random_rows())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The outcome of the small run on one process, with DDP and with FSDP."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    @functools.cache
    def of(how: str) -> dict[str, object]:
        run_as(how, small(folder / how))
        return outcome(folder / how)

    return of


def test_a_state_is_resumed_bit_for_bit_by_any_number_of_processes(tmp_path, monkeypatch):
    """One run that changes between one process, two of DDP and two of FSDP: each loads exactly what the last one saved."""
    config = small(tmp_path / "run", steps=14, keep=99)
    train(small(tmp_path / "uninterrupted", steps=14), random_rows())
    resume, gradient, stop = loop.resume, loop.Trainer.gradient, [0]

    def resume_and_write(trainer, quiet):
        resume(trainer, quiet)
        state.write(tmp_path / "loaded", trainer.progress.step, save.tensors(trainer), {}, 99)

    def stopping(trainer, batch):
        if trainer.progress.step == stop[0] - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return gradient(trainer, batch)

    ways = ["one", "ddp", "one", "fsdp", "ddp", "fsdp"]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "resume", resume_and_write)
        patch.setattr(loop.Trainer, "gradient", stopping)
        for number, how in enumerate(ways, 1):
            stop[0] = 2 * number
            with pytest.raises((SystemExit, ProcessExitedException), match="143"):
                run_as(how, config)
        stop[0] = -1
        run_as("one", config)
    for number, how in enumerate(ways, 1):
        path = state.place(tmp_path / "run" / "state", 2 * number)
        assert len(list(path.glob("*.safetensors"))) == (1 if how == "one" else 2)
        saved, loaded = tensors(path), tensors(state.place(tmp_path / "loaded", 2 * number))
        assert saved.keys() == loaded.keys()
        assert all(bits(saved[name]) == bits(loaded[name]) for name in saved)
        assert {float(saved[name]) for name in saved if name.startswith("optimizer.step/")} == {2.0 * number}
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "uninterrupted"), rel=1e-6)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_each_process_writes_its_half_of_a_state(tmp_path, parallel):
    together(2, small(tmp_path / "run", steps=4, parallel=parallel), random_rows())
    path = state.place(tmp_path / "run" / "state", 4)
    names = ["shard-00001-of-00002.safetensors", "shard-00002-of-00002.safetensors"]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *names, "state.json"]
    info = json.loads((path / "state.json").read_text())
    assert info["files"] == {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names}
    shards = [load_file(path / name) for name in names]
    total = sum(value.nbytes for value in tensors(path).values())
    for shard in shards:
        assert sum(value.nbytes for value in shard.values()) == pytest.approx(total / 2, rel=0.1)
    both = shards[0].keys() & shards[1].keys()
    if parallel == "ddp":
        assert not both
    else:
        assert both == {name for name in shards[0].keys() | shards[1].keys() if not name.startswith("optimizer.step/")}


def test_a_state_with_a_damaged_shard_is_skipped_by_all(tmp_path, uninterrupted, capfd):
    out = tmp_path / "run"
    together(2, small(out, parallel="fsdp"), random_rows())
    shard = state.place(out / "state", 12) / "shard-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    capfd.readouterr()
    together(2, small(out, parallel="fsdp"), random_rows())
    said = capfd.readouterr().err
    assert "the state of step 12 is damaged" in said and "resuming from step 8" in said
    assert outcome(out) == uninterrupted("fsdp")


def tensors_of_any_shape(mesh: DeviceMesh | None, empty: bool = False) -> dict[str, Tensor]:
    """Fewer rows than processes, rows that do not divide, non-contiguous memory, a number, and bits that arithmetic loses."""
    words = torch.arange(-30, 30, dtype=torch.int32) * 71582788
    sizes = {"one row": (1, 4), "odd": (5, 3), "line": (7,), "turned": (4, 6)}
    values = {name: words[: math.prod(size)].clone().view(torch.float32).reshape(size) for name, size in sizes.items()}
    values["turned"] = values["turned"].T
    values |= {"half": words[:8].clone().view(torch.bfloat16).reshape(8, 2), "uninterrupted": words.long()}
    if empty:
        values = {name: torch.zeros_like(value) for name, value in values.items()}
    if mesh is not None:
        values = {name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for name, value in values.items()}
    return values | {"number": torch.tensor(0.0 if empty else -0.0)}


def write_and_read(folder: Path) -> None:
    World.start("cpu")
    mesh = init_device_mesh("cpu", (2,))
    expected = {name: bits(value) for name, value in tensors_of_any_shape(None).items()}
    for step, writer in enumerate((mesh, None)):
        state.write(folder, step, tensors_of_any_shape(writer), {}, 2)
        assert {name: bits(value) for name, value in tensors(state.place(folder, step)).items()} == expected
        for reader in (mesh, None):
            found = tensors_of_any_shape(reader, empty=True)
            state.read(folder, step).load(found)
            assert {name: bits(gather_full(value)) for name, value in found.items()} == expected


def test_tensors_of_any_shape_survive_bit_for_bit(tmp_path):
    finish(launch(2, write_and_read, tmp_path))
    found = tensors_of_any_shape(None, empty=True)
    state.read(tmp_path, 0).load(found)
    assert {name: bits(value) for name, value in found.items()} == {
        name: bits(value) for name, value in tensors_of_any_shape(None).items()
    }


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("parallel", "rank", "module", "name"),
    [
        ("fsdp", 1, state, "save_file"),
        ("ddp", 1, state, "fsync"),
        ("fsdp", 0, os, "replace"),
        ("ddp", 0, hub_folder, "save_file"),
    ],
)
def test_a_full_disk_of_one_process_stops_all_with_the_same_message(
    tmp_path, monkeypatch, uninterrupted, parallel, rank, module, name
):
    """No process waits forever, the last good state is intact, and the run resumes from it."""
    out = tmp_path / "run"
    save = loop.save

    def save_on_a_full_disk(trainer):
        if trainer.progress.step == 8 and trainer.world.rank == rank:
            setattr(module, name, full)
        try:
            save(trainer)
        except OSError as error:
            (tmp_path / f"said-{trainer.world.rank}").write_text(str(error))
            raise

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save", save_on_a_full_disk)
        assert exit_codes(2, small(out, parallel=parallel), random_rows()) == [1, 1]
    said = [(tmp_path / f"said-{process}").read_text() for process in range(2)]
    assert said[0] == said[1] and "No space left on device" in said[0]
    assert not list((out / "state").glob(".writing*"))
    if module is hub_folder:  # the state was written before the checkpoint
        assert state.steps(out / "state") == [4, 8]
    else:
        assert state.steps(out / "state") == [4] and said[0].endswith("the state of step 4 is intact")
    together(2, small(out, parallel=parallel), random_rows())
    assert outcome(out) == uninterrupted(parallel)


def test_killed_while_two_processes_write_a_state(tmp_path, monkeypatch):
    """kill -9 of one of them at each moment of the writing of its second state, repeatedly, in one run."""
    changes = {"steps": 16, "save_every": 2, "parallel": "fsdp"}
    together(2, small(tmp_path / "uninterrupted", **changes), random_rows())
    moments = [
        (0, state, "save_file", "shard-00001-*"),
        (1, state, "fsync", "shard-00002-*"),
        (0, state, "fsync", "state.json"),
        (0, os, "replace", ".writing-*"),
        (0, state, "fsync", "state"),  # after the renaming
    ]
    for number, (rank, module, name, pattern) in enumerate(moments, 1):
        call, seen = getattr(module, name), []

        def mortal(*given, call=call, seen=seen, rank=rank, pattern=pattern):
            if os.environ["RANK"] == str(rank) and any(isinstance(x, Path) and fnmatch(x.name, pattern) for x in given):
                seen.append(given)
                if len(seen) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*given)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, mortal)
            codes = exit_codes(2, small(tmp_path / "run", **changes), random_rows())
        assert codes[rank] == -signal.SIGKILL and codes[1 - rank] not in (0, None)
        assert state.steps(tmp_path / "run" / "state")[-1] == 2 * number + (2 if pattern == "state" else 0)
    together(2, small(tmp_path / "run", **changes), random_rows())
    assert outcome(tmp_path / "run") == outcome(tmp_path / "uninterrupted")
    assert not list((tmp_path / "run" / "state").glob(".writing*"))


def test_activations_computed_again_change_nothing(tmp_path):
    train(small(tmp_path / "one"), random_rows())
    train(small(tmp_path / "two", recompute=True), random_rows())
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    together(2, small(tmp_path / "three", recompute=True, parallel="fsdp"), random_rows())
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_the_noise_of_an_example_does_not_depend_on_the_process_that_draws_it():
    rates = torch.rand(5, 5, dtype=torch.float64)
    rates -= torch.diag(rates.sum(-1))
    x_0 = torch.randint(5, (12, 7))
    rows = torch.arange(12)
    times, weights = sample_times(rows, 12, 3, 8, 1e-3, 1.0)
    for process in (Uniform(5, Linear()), Absorbing(5, Linear()), Hybrid(5, 0.2), RateMatrix(rates, Linear())):
        x_t = corrupt_by_counter(process, x_0, times, rows, 3, 8)
        for part in (slice(0, 4), slice(4, 12)):
            t, weight = sample_times(rows[part], 12, 3, 8, 1e-3, 1.0)
            assert torch.equal(t, times[part]) and torch.equal(weight, weights[part])
            assert torch.equal(corrupt_by_counter(process, x_0[part], t, rows[part], 3, 8), x_t[part])
    assert not torch.equal(sample_times(rows, 12, 3, 9, 1e-3, 1.0)[0], times)


def test_a_batch_that_cannot_be_divided_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(World, "start", classmethod(lambda cls, device: cls(0, 3, torch.device("cpu"))))
    with pytest.raises(UserError, match="batch is 8, but it must be a multiple of 12"):
        train(small(tmp_path / "run"), random_rows())
    assert not (tmp_path / "run").exists()


SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, {tests!r})
    from small_runs import random_rows, small
    from m2s.training import loop, train

    out = Path({out!r})
    gradient = loop.Trainer.gradient

    def ending(trainer, batch):
        if trainer.progress.step == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(7)
        return gradient(trainer, batch)

    loop.Trainer.gradient = ending
    for name in ("run", "again"):
        train(small(out / name, parallel={parallel!r}), random_rows())
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        assert not [name for name in names if "gloo" in name], names
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_dies_is_restarted_and_the_run_ends_the_same(tmp_path, uninterrupted, parallel):
    script = tmp_path / "script.py"
    text = SCRIPT.format(tests=str(Path(__file__).parents[1]), out=str(tmp_path), parallel=parallel)
    script.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from step 4 of 12" in done.stderr
    for name, starts in (("run", 2), ("again", 1)):
        assert outcome(tmp_path / name) == uninterrupted("one" if parallel == "ddp" else "fsdp")
        assert len(json.loads((tmp_path / name / "train.json").read_text())["starts"]) == starts


def test_a_network_that_cannot_be_compiled_is_trained_without(tmp_path, monkeypatch, capsys):
    train(small(tmp_path / "one"), random_rows())

    def failing(*_):
        raise torch._dynamo.exc.TorchDynamoException("no such device")

    monkeypatch.setattr("m2s.training.compilation.COMPILED", ("cpu",))
    monkeypatch.setattr(torch, "compile", lambda function, **_: failing)
    train(small(tmp_path / "two"), random_rows())
    assert "cannot be compiled here (no such device): continuing without" in capsys.readouterr().err
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="no such device"):
        train(small(tmp_path / "three", compile="yes"), random_rows())
