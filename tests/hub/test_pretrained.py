"""`save_pretrained`, `from_pretrained` and `push_to_hub` of checkpoints and networks, also without a connection."""

import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import m2s
from m2s.data import Characters
from m2s.errors import UserError
from m2s.hub.card import model_card
from m2s.methods import METHODS
from m2s.models import DiT, DiTConfig, UNet, UNetConfig
from m2s.remote import is_offline

pytestmark = pytest.mark.usefixtures("without_shape_hook")
PAPER = "Mean-to-Score Discrete Diffusion: Posterior-Mean Denoisers for Score Entropy"


def network(states: int = 4) -> DiT:
    model = DiT(DiTConfig(states=states, width=16, depth=1, heads=2, condition_width=8, length=6))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.eval()


def checkpoint() -> m2s.Checkpoint:
    head = m2s.Posterior(m2s.Absorbing(3, m2s.Cosine()))
    extra = {"method": "md4", "step": 70, "seed": 5, "validation_bits": 1.25, "validation_error": 0.5}
    data = {"kind": "text", "length": 6}
    return m2s.Checkpoint(network(), head, Characters("abc"), data, {"extra": extra})


def same(one: nn.Module, other: nn.Module) -> bool:
    weights = other.state_dict()
    return all(torch.equal(value, weights[name]) for name, value in one.state_dict().items())


def header(card: str) -> dict[str, Any]:
    """The YAML header, read without a YAML package: `key: value` and lists."""
    found: dict[str, Any] = {}
    lines = card.split("---\n")[1].splitlines()
    for line in lines:
        if line.startswith("- "):
            found[next(reversed(found))].append(line[2:])
        else:
            key, _, value = line.partition(":")
            found[key] = value.strip() or []
    return found


def test_a_checkpoint_is_saved_with_its_card(tmp_path: Path) -> None:
    given = checkpoint()
    folder = given.save_pretrained(tmp_path / "saved", command="m2s train text8 --method md4")
    for found in (m2s.Checkpoint.from_pretrained(folder), m2s.load(folder)):
        assert same(found.model, given.model) and found.tokenizer == given.tokenizer and found.data == given.data
        assert found.config["extra"] == given.config["extra"]
    card = (folder / "README.md").read_text()
    assert header(card) == {"library_name": "m2s", "tags": ["discrete-diffusion", "m2s", "md4", "absorbing"]}
    assert "m2s train text8 --method md4" in card and PAPER in card and "Absorbing(3, Cosine())" in card
    assert "1.2500 ± 0.5000 bits per token (" in card and "kind text, length 6" in card and "| seed | 5 |" in card
    assert " ".join(METHODS["m2s"].bibtex.split()) in " ".join(card.split()), "the citation is not that of m2s cite m2s"


@pytest.mark.parametrize(
    ("data", "unit"),
    [
        ({"kind": "image", "shape": [8, 8], "levels": 17}, "dimension"),
        ({"kind": "text", "length": 6, "tokenizer": {"kind": "Characters", "alphabet": "abc"}}, "character"),
        ({"kind": "text", "length": 6, "tokenizer": {"kind": "Bytes"}}, "token"),
        ({"kind": "sequence", "length": 6, "vocab": 3}, "position"),
        (None, "position"),
    ],
)
def test_the_card_names_what_the_bits_are_per(data: dict[str, Any] | None, unit: str) -> None:
    given = checkpoint()
    assert f"0.5000 bits per {unit} (" in model_card(given.model, given.head, data, given.config)


def test_the_title_of_the_paper_is_that_of_the_citation_file() -> None:
    assert f'title: "{PAPER}"' in (Path(__file__).parents[2] / "CITATION.cff").read_text()


def test_a_card_does_not_let_values_break_its_form(tmp_path: Path) -> None:
    given = checkpoint()
    given.config["extra"]["method"] = "a|b\n---\ntags: c"
    card = (given.save_pretrained(tmp_path, command="m2s train ``` x") / "README.md").read_text()
    assert header(card)["tags"] == ["discrete-diffusion", "m2s", "a-b-----tags--c", "absorbing"]
    assert card.count("```") % 2 == 0 and r"a\|b --- tags: c" in card


def test_m2s_save_is_read_by_m2s_load(tmp_path: Path) -> None:
    model, head = network(), m2s.Posterior(m2s.Uniform(4, m2s.Linear()))
    found = m2s.load(m2s.save(tmp_path / "mine", model, head, data={"kind": "sequence", "length": 6}))
    assert same(found.model, model) and found.length == 6 and found.sample(2, steps=2).shape == (2, 6)


def test_the_length_must_be_known_or_given(tmp_path: Path) -> None:
    found = m2s.load(m2s.save(tmp_path, network(), m2s.Posterior(m2s.Uniform(4, m2s.Linear()))))
    with pytest.raises(UserError, match="does not say how long"):
        found.sample(2)
    assert found.sample(2, 5, steps=2).shape == (2, 5)


@pytest.mark.parametrize(
    "model",
    [network(), UNet(UNetConfig(states=5, shape=(4, 4), width=8, layers=1, multipliers=(1, 2)))],
    ids=["dit", "unet"],
)
def test_networks_without_a_head(model: Any, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    found = type(model).from_pretrained(model.save_pretrained(tmp_path / "net"))
    assert same(found, model) and found.config == model.config and not found.training
    assert torch.equal(torch.get_rng_state(), state)
    assert header((tmp_path / "net" / "README.md").read_text())["library_name"] == "m2s"
    with pytest.raises(ValueError, match="from_pretrained"):
        m2s.load(tmp_path / "net")


def test_a_network_with_a_clock_is_saved_as_a_checkpoint(tmp_path: Path) -> None:
    model = DiT(DiTConfig(states=4, width=16, depth=1, heads=2, clock=m2s.LogLinear()))
    with pytest.raises(UserError, match=r"clock.*m2s\.save"):
        model.save_pretrained(tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_another_class_or_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    network().save_pretrained(tmp_path / "net")
    checkpoint().save(tmp_path / "all")
    with pytest.raises(UserError, match="holds a DiT"):
        UNet.from_pretrained(tmp_path / "net")
    with pytest.raises(UserError, match=r"m2s\.load"):
        DiT.from_pretrained(tmp_path / "all")


class FakeHub(SimpleNamespace):
    """What `m2s.remote` uses of huggingface_hub, with a folder in place of the network."""

    def create_repo(self, repo: str, private: bool, exist_ok: bool) -> str:
        return f"https://hub/{repo}"

    def upload_folder(self, repo_id: str, folder_path: Path, allow_patterns: list[str]) -> None:
        target = self.place / repo_id
        target.mkdir(parents=True)
        for path in Path(folder_path).iterdir():
            if path.name in allow_patterns:
                (target / path.name).write_bytes(path.read_bytes())

    def snapshot_download(self, repo: str, allow_patterns: list[str]) -> str:
        return str(self.place / repo)


def test_push_and_load_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(place=tmp_path / "hub"))
    given = checkpoint()
    assert given.push_to_hub("me/all") == "https://hub/me/all"
    assert network().push_to_hub("me/net") == "https://hub/me/net"
    assert sorted(path.name for path in (tmp_path / "hub/me/all").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert same(m2s.Checkpoint.from_pretrained("me/all").model, given.model)
    assert DiT.from_pretrained("me/net").config == network().config
    with pytest.raises(ValueError, match='must be "owner/name"'):
        given.push_to_hub("me")


class ConnectError(Exception):
    """Named as the class of httpx."""


def wrapped() -> Exception:
    try:
        try:
            raise socket.gaierror("name resolution")
        except OSError as inner:
            raise RuntimeError("request failed") from inner
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), ConnectError("x"), wrapped()], ids=["builtin", "httpx", "cause"]
)
def test_offline_is_said(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(create_repo=fails, snapshot_download=fails))
    assert is_offline(error)
    for load in (m2s.load, DiT.from_pretrained, m2s.Checkpoint.from_pretrained):
        with pytest.raises(FileNotFoundError, match="this machine is offline"):
            load("me/all")
    for push in (checkpoint().push_to_hub, network().push_to_hub):
        with pytest.raises(ConnectionError, match=r"offline.*save_pretrained"):
            push("me/all")


def test_another_error_of_the_hub_is_not_called_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("404")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(create_repo=fails, snapshot_download=fails))
    with pytest.raises(FileNotFoundError, match="could not be downloaded") as caught:
        m2s.load("me/all")
    assert not re.search("offline", str(caught.value))


def test_batch_decode() -> None:
    tokenizer = Characters("abc")
    assert tokenizer.batch_decode(torch.tensor([[0, 1, 2], [2, 2, -1]])) == ["abc", "cc"]
    assert tokenizer.batch_decode([[0], []]) == ["a", ""]
    with pytest.raises(ValueError, match="3"):
        tokenizer.batch_decode([[3]])
