"""The golden vectors of the networks in the lab are what the library computes, and its float32 is within 1e-5 of them."""

import base64
import json
import re
from typing import Any

import pytest
import torch
from lab_net_golden import FOLDER, NAMES, TIMES, exact_output, header, vectors

import m2s
from m2s.hub import builtin
from m2s.report.lab.weights import container, weights_script


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """The golden vectors of a network as they are computed now, and those of its file."""
    stored = json.loads((FOLDER / f"net-{request.param}.json").read_text())
    return json.loads(json.dumps(vectors(request.param))), stored


def test_outputs_are_those_of_the_file(golden: tuple[dict[str, Any], dict[str, Any]]) -> None:
    computed, stored = golden
    assert computed["container"] == stored["container"]
    for now, then in zip(computed["outputs"], stored["outputs"], strict=True):
        assert (now["t"], now["tokens"]) == (then["t"], then["tokens"])
        for key in ("posterior", "log_score"):  # torch's exponential may differ in the last bit of float32
            assert now[key] == pytest.approx(then[key], rel=0, abs=1e-6)


def test_samples_are_those_of_the_file(golden: tuple[dict[str, Any], dict[str, Any]]) -> None:
    computed, stored = golden
    if stored["header"] != header():
        pytest.skip("the file was written with another torch or CPU, so that a token may differ")
    masses = [[(sample.pop("dropped"), sample)[0] for sample in each["samples"]] for each in (computed, stored)]
    assert computed["samples"] == stored["samples"]
    for now, then in zip(*masses, strict=True):
        assert torch.tensor(now).allclose(torch.tensor(then), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_float32_rounding_of_the_library(name: str) -> None:
    model, head = m2s.load(f"builtin:{name}")
    x_t = m2s.sample(model, head, (1, model.config.length if name == "chars" else 64), steps=2, seed=1)
    for time in TIMES:
        t = torch.tensor([time])
        with torch.no_grad():
            rounded = head.log_score(model(x_t, t), x_t, t)
        exact = head.log_score(exact_output(model, x_t, t), x_t, t.double())
        assert rounded.double().sub(exact).abs().max() < 1e-5


def test_script_holds_the_container() -> None:
    script = weights_script("digits-sedd")
    found = re.fullmatch(r'\(globalThis\.m2sWeights \?\?= \{\}\)\["digits-sedd"\] = "([A-Za-z0-9+/=]+)";\n', script)
    assert found is not None
    data = base64.b64decode(found[1])
    assert data == container("digits-sedd")
    folder = builtin.locate("builtin:digits-sedd")
    config = int.from_bytes(data[:4], "little")
    assert data[4 : 4 + config] == (folder / "config.json").read_bytes()
    assert data[4 + config :] == (folder / "model.safetensors").read_bytes()


def test_script_of_unknown_weights_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="no built-in weights builtin:digits"):
        weights_script("digits")
