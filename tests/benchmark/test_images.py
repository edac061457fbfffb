"""`m2s benchmark images` and `image-ablation`: what is left out is left out, and the loss is the same."""

import math
import sys

import pytest
import torch

from m2s.benchmark import PARTS, Setting, images
from m2s.benchmark.image_ablation import REPLACEMENTS, make_without
from m2s.benchmark.images import SAMPLED, STEPS, TRAINED, configuration
from m2s.heads import Posterior
from m2s.ops import group_norm
from m2s.training import trainer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = Setting.of(DEVICE, True, repeats=2)


def test_images_per_second(monkeypatch) -> None:
    for table, name in (("TRAINED", "train mnist"), ("SAMPLED", "sample mnist")):
        monkeypatch.setattr(images, table, {name: getattr(images, table)[name]})
    found = PARTS["images"](TINY)
    assert found["contenders"].keys() == {"train mnist", "sample mnist"}
    assert all(line.startswith("kernels fused") for line in found["skipped"])
    for name, result in found["contenders"].items():
        count = result["images_per_second"] * result["median_ms"] / 1e3
        assert count == pytest.approx(2 / STEPS if name in SAMPLED else 2)


def test_the_sizes_are_those_of_the_presets() -> None:
    full = Setting.of(torch.device("cuda"), False)
    config = configuration(full, TRAINED["train cifar10"])
    assert (config.network.kind, config.network.size, config.run.batch, config.run.micro_batch) == ("unet", "md4", 128, None)
    chain = configuration(full, TRAINED["train mnist, d3pm-gaussian"])
    assert (chain.network.size, chain.run.batch, chain.process.kind) == ("mnist", 256, "chain-gaussian")


@pytest.mark.parametrize(("case", "what"), [(case, what) for case, found in REPLACEMENTS.items() for what in found])
def test_what_is_left_out(case: str, what: str, monkeypatch) -> None:
    """In its own trainer, and nowhere else. The losses of two steps agree."""
    seen: set[object] = set()
    divergence = sys.modules["m2s.losses.d3pm"]  # the package has a function of the same name
    terms, norm = divergence.log_leave_one_out, group_norm.is_fused

    def noting_terms(head, values, *given):
        seen.add(values.dtype)
        return terms(head, values, *given)

    def noting_norm(*given):
        seen.add("norm")
        return norm(*given)

    monkeypatch.setattr(divergence, "log_leave_one_out", noting_terms)
    monkeypatch.setattr(group_norm, "is_fused", noting_norm)
    monkeypatch.setattr(trainer, "uses_channels_last", lambda *_: True)  # as on a GPU
    losses, noted = {}, {}
    for name, replacement in (("all", None), (what, REPLACEMENTS[case][what])):
        seen.clear()
        torch.manual_seed(0)  # of the random images
        step, model = make_without(TINY, TRAINED[case], replacement)
        losses[name] = [step(), step()]
        if all(w.is_contiguous(memory_format=torch.channels_last) for w in model.parameters() if w.ndim == 4):
            seen.add("channels-last")
        noted[name] = set(seen)
    assert losses[what] == pytest.approx(losses["all"], rel=1e-4) and all(map(math.isfinite, losses["all"]))
    dtypes = {torch.float32} if "d3pm" in case else set()
    assert noted["all"] == {"norm", "channels-last", *dtypes}
    left = {"group norm": {"channels-last"}, "channels-last weights": {"norm"}, "autotuning": {"norm", "channels-last"}}
    assert noted[what] == left.get(what, {"norm", "channels-last", torch.float64})
    assert Posterior.softmax_is_leave_one_out is not False
