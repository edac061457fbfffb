"""One training step: the same in the benchmark as in the loop; a GPU waits for nothing but its numbers; what a run restores."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from m2s.benchmark.train import trainer
from m2s.distributed import World
from m2s.training import Config, loop, resolve, train
from m2s.training.build import make_objects
from m2s.training.cuda_graph import CUDAGraphRunner
from m2s.training.loop import Stopper, finish_step
from m2s.training.trainer import Trainer
from small_runs import InMemorySource, random_rows, small, tensors


def test_the_benchmark_makes_the_steps_of_the_loop(tmp_path):
    config, rows = small(tmp_path / "run", steps=3), random_rows()
    train(config, rows)
    call, model = trainer(resolve(config), rows)
    for _ in range(3):
        call()
    saved = tensors(max((tmp_path / "run" / "state").glob("step-*")))
    for name, weight in model.named_parameters():
        assert torch.equal(weight.detach(), saved[f"model/{name}"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU works asynchronously")
@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize("method", ["m2s", "mdlm", "sedd-absorb"])
def test_a_step_waits_for_nothing_but_its_numbers(tmp_path: Path, method: str, kernels: str, micro_batch: int) -> None:
    """An event waits for them, which is not an operation that waits for all work."""
    given = {"method": method, "device": "cuda", "kernels": kernels, "compile": "no", "micro_batch": micro_batch, "steps": 20}
    config, rows = resolve(small(tmp_path, **given)), random_rows()
    trainer_ = Trainer(config, rows, World.start("cuda"), *make_objects(config, rows))
    batch = trainer_.local_batch(0)
    for _ in range(6):
        batch = finish_step(trainer_, *trainer_.gradient(batch), Stopper()).next_batch
    graph = trainer_.backward_pass.plain
    assert isinstance(graph, CUDAGraphRunner) and graph.recorded
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            finish_step(trainer_, *trainer_.gradient(batch), Stopper())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    assert not waits, "\n".join(f"{wait.filename}:{wait.lineno}" for wait in waits)


def attributes(model: torch.nn.Module) -> dict[str, object]:
    """What a trainer may set on a network: forward functions, the last layer."""
    names = ("forward", "unprojected")
    return {f"{path}.{name}": vars(m).get(name) for path, m in model.named_modules() for name in names}


def flags() -> tuple[object, ...]:
    """Torch's global flags that a run may set."""
    return torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch._dynamo.config.recompile_limit


def test_the_random_numbers_of_the_caller_continue(tmp_path: Path) -> None:
    """A run seeds torch's default generators for its weights and its dropout, and neither reads nor changes the caller's."""
    device, draws = "cuda" if torch.cuda.is_available() else "cpu", []
    for name, seed in (("first", 3), ("second", 4)):
        torch.manual_seed(seed)
        train(small(tmp_path / name, steps=2, network__dropout=0.1, device=device, compile="no"), random_rows())
        draws.append(torch.rand(4, device=device))
    for seed, draw in zip((3, 4), draws, strict=True):
        torch.manual_seed(seed)
        assert torch.equal(draw, torch.rand(4, device=device))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert device == "cuda" or all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("ends", ["at its last step", "by an error"])
def test_flags_and_attributes_of_the_network_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Compiled blocks (here: not really), recomputed activations, fused last layer, float32: all undone after the run."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *given: function(*given))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert flags() == (True, True, 8)
    seen: list[torch.nn.Module] = []
    make = loop.make_objects

    def made(config: Config, source: InMemorySource) -> tuple[object, ...]:
        objects = make(config, source)
        seen.append(objects[0])
        before.update(attributes(objects[0]))
        return objects

    def inside(trainer_: Trainer, batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        assert flags() == (False, False, 64) and attributes(seen[0]) != before and trainer_.model.unprojected
        if ends == "by an error" and trainer_.progress.step == 1:
            raise OSError("the disk is full")
        return gradient(trainer_, batch)

    before: dict[str, object] = {}
    gradient = loop.Trainer.gradient
    monkeypatch.setattr(loop, "make_objects", made)
    monkeypatch.setattr(loop.Trainer, "gradient", inside)
    config = small(tmp_path / "run", steps=2, compile="yes", recompute=True, precision="float32", network__dropout=0.0)
    if ends == "by an error":
        with pytest.raises(OSError, match="disk"):
            train(config, random_rows())
    else:
        train(config, random_rows())
    assert flags() == (True, True, 8) and attributes(seen[0]) == before and not seen[0].unprojected


def test_a_loss_without_a_fused_form_is_noted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    few = {"steps": 1, "batch": 1, "micro_batch": None, "validate_every": 0, "compile": "no", "precision": "float32"}
    few |= {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    for loss, noted in (("score-entropy", 0), ("udlm", 0), ("ct-elbo", 1)):
        config = small(tmp_path / loss, method="udlm", head__loss=loss, kernels="fused", **few)
        train(config, random_rows(length=2))
        assert capsys.readouterr().err.count(f"the loss {loss} has no fused form for Posterior") == noted
    train(small(tmp_path / "reference", method="udlm", head__loss="ct-elbo", kernels="reference", **few), random_rows(length=2))
    assert "has no fused form" not in capsys.readouterr().err
