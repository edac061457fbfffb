"""Every function that calls a network raises the same errors for one that does not fit."""

import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import m2s
from m2s.evaluation.bpd import dataset_nelbo

pytestmark = pytest.mark.usefixtures("without_shape_hook")

K, B, L = 5, 4, 50
head = m2s.Posterior(m2s.Absorbing(K, m2s.Linear()))
x_0 = torch.ones(B, L, dtype=torch.long)
LABELS = torch.arange(B)
CALLERS: dict[str, Callable[..., Any]] = {
    "objective": lambda net, c=None: m2s.Objective(net, head)(x_0, m2s.stratified_times(B, 0.1, 0.9), condition=c),
    "elbo": lambda net, c=None: m2s.elbo(net, head, x_0, condition=c),
    "sample": lambda net, c=None: m2s.sample(net, head, (B, L), steps=2, condition=c),
    "dataset_nelbo": lambda net, c=None: dataset_nelbo(net, head, x_0, passes=2, labels=c),
}
EVERY_CALLER = pytest.mark.parametrize("caller", CALLERS)


class Table(nn.Module):
    """A network that is one embedding, stored under a given attribute name."""

    def __init__(self, rows: int, name: str, columns: int = K + 1) -> None:
        super().__init__()
        setattr(self, name, nn.Embedding(rows, columns))
        self.name = name

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        return getattr(self, self.name)(x_t)


class Last(Table):
    """The same network, returning `m2s.Unprojected`."""

    def forward(self, x_t: Tensor, t: Tensor) -> Any:
        hidden = super().forward(x_t, t)
        return m2s.Unprojected(hidden, torch.eye(hidden.shape[-1]))


@EVERY_CALLER
@pytest.mark.parametrize("kind", [Table, Last])
def test_missing_column_for_the_mask_raises(caller: str, kind: type[Table]) -> None:
    with pytest.raises(ValueError, match=r"\b5\b.*\b6\b.*if the process has a mask, that is its last state.*vocab \+ 1 in all"):
        CALLERS[caller](kind(K + 1, "tokens", K))
    with pytest.raises(ValueError, match=r"\b3\b.*\b6\b") as error:
        CALLERS[caller](kind(K + 1, "tokens", 3))
    assert "mask" not in str(error.value)
    for columns in (K + 1, K + 4):
        CALLERS[caller](kind(K + 1, "tokens", columns))


@EVERY_CALLER
def test_missing_embedding_of_the_mask_raises(caller: str) -> None:
    states = r"process\.states = 6 states, 0\.\.5, the last one the mask"
    with pytest.raises(ValueError, match=rf"embedding has 5 rows: .*{states}"):
        CALLERS[caller](Table(K, "embedding"))
    with pytest.raises(IndexError, match=rf"failed at tokens \[\d+, 50\] \(index out of range in self\): .*{states}") as error:
        CALLERS[caller](Table(K, "tokens"))
    assert isinstance(error.value.__cause__, IndexError)
    CALLERS[caller](Table(K + 1, "embedding"))


@EVERY_CALLER
@pytest.mark.parametrize("net", [nn.Embedding(K + 1, K + 1), nn.Embedding(K + 1, K + 1).forward], ids=["module", "function"])
def test_network_without_time_raises(caller: str, net: Any) -> None:
    with pytest.raises(
        TypeError, match=r"cannot be called as model\(x_t, t\) \(.*positional argument.*condition=None"
    ) as error:
        CALLERS[caller](net)
    advice = re.search(r"give (lambda .*)$", str(error.value))
    assert advice is not None
    CALLERS[caller](eval(advice[1], {"net": net}), LABELS)


@EVERY_CALLER
def test_network_without_condition_raises(caller: str) -> None:
    with pytest.raises(
        TypeError, match=r"cannot be called as model\(x_t, t, condition\) .* must take \(x_t, t, condition=None\)"
    ):
        CALLERS[caller](Table(K + 1, "tokens"), LABELS)


@EVERY_CALLER
def test_errors_inside_a_network_are_not_changed(caller: str) -> None:
    def broken(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        return len(5)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        CALLERS[caller](broken, LABELS)


@EVERY_CALLER
def test_output_object_with_logits_raises(caller: str) -> None:
    """Models of transformers return such an object."""

    def net(x_t: Tensor) -> Any:
        return types.SimpleNamespace(logits=torch.zeros(*x_t.shape, K + 1), attentions=None)

    with pytest.raises(
        TypeError, match=r"output must be a torch\.Tensor, not SimpleNamespace: hand over its \.logits"
    ) as error:
        CALLERS[caller](lambda x_t, t: net(x_t))
    advice = re.search(r"model = (lambda .*) does$", str(error.value))
    assert advice is not None
    CALLERS[caller](eval(advice[1], {"net": net}), LABELS)
    with pytest.raises(TypeError, match=r"not tuple$"):
        CALLERS[caller](lambda x_t, t: (net(x_t).logits,))
    with pytest.raises(TypeError, match=r"hand over its \.logits"):
        m2s.score_entropy(head, net(x_0), x_0, x_0, torch.full((B,), 0.5))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), "mps", "abacus"], ids=str)
def test_missing_device_raises(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"device is '{device}', but .* or give cpu"):
        m2s.sample(lambda x_t, t: pytest.fail("the network was called"), head, (B, L), steps=2, device=device)
    assert m2s.sample(Table(K + 1, "tokens"), head, (B, L), steps=2, device="cpu").device.type == "cpu"
