"""The golden vectors of the networks in the lab are what the library computes, and its float32 is within 1e-5 of them."""

import base64
import hashlib
import json
import re
from typing import Any

import pytest
import torch
from lab_net_golden import FOLDER, LENGTHS, header, outputs, samples, tokens

import m2s
from m2s.hub import builtin
from m2s.report.lab.weights import container, weights_script


def stored(name: str) -> dict[str, Any]:
    """The golden vectors of a network in its file."""
    return json.loads((FOLDER / f"net-{name}.json").read_text())


@pytest.mark.parametrize("name", LENGTHS)
def test_outputs_are_those_of_the_file(name: str) -> None:
    assert stored(name)["container"] == hashlib.sha256(container(name)).hexdigest()
    for now, then in zip(outputs(name), stored(name)["outputs"], strict=True):
        assert (now["t"], now["tokens"]) == (then["t"], then["tokens"])
        for key in ("posterior", "log_score"):  # torch's exponential may differ in the last bit of float32
            assert now[key] == pytest.approx(then[key], rel=0, abs=1e-6)


@pytest.mark.docs
@pytest.mark.parametrize("name", LENGTHS)
def test_samples_are_those_of_the_file(name: str) -> None:
    if stored(name)["header"] != header():
        pytest.skip("the file was written with another torch or CPU, so that a token may differ")
    for now, then in zip(samples(name), stored(name)["samples"], strict=True):
        dropped = [torch.tensor(each.pop("dropped")) for each in (now, then)]
        assert now == then
        assert dropped[0].allclose(dropped[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", LENGTHS)
def test_float32_rounding_of_the_library(name: str) -> None:
    model, head = m2s.load(f"builtin:{name}")
    for output in stored(name)["outputs"]:
        x_t, t = torch.tensor([tokens(output["tokens"])]), torch.tensor([output["t"]])
        with torch.no_grad():
            rounded = head.log_score(model(x_t, t), x_t, t)
        assert rounded.flatten().double().sub(torch.tensor(output["log_score"])).abs().max() < 1e-5


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
