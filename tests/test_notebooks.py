"""What a notebook shows: names for completion, signatures, and results as HTML with the right numbers."""

import inspect
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import m2s

HEAD = m2s.Posterior(m2s.Uniform(4, m2s.Linear()))
X_0 = torch.arange(30).reshape(6, 5) % 4


def network(x_t: Tensor, t: Tensor) -> Tensor:
    return torch.sin(torch.arange(4) * 1.3 + x_t.unsqueeze(-1))


def cells(html: str) -> list[list[str]]:
    """The rows of the table, without its head."""
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html) if "<td>" in row]


def test_dir_is_complete_before_anything_is_imported() -> None:
    """In a new process: every public name and every package that is imported on first access, and each can be read."""
    code = "import m2s; names = dir(m2s); assert {*m2s.__all__, *m2s.PARTS} <= {*names}; [getattr(m2s, n) for n in names]"
    code += "; assert {*m2s.training.__all__} <= {*dir(m2s.training)}; [getattr(m2s.training, n) for n in dir(m2s.training)]"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", m2s.__all__)
def test_every_public_function_has_a_signature_and_a_docstring(name: str) -> None:
    value = getattr(m2s, name)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        parameters = inspect.signature(value).parameters.values()
        assert all(each.annotation is not inspect.Parameter.empty for each in parameters)


@pytest.mark.parametrize("function", [m2s.fit, m2s.training.train, m2s.training.fit])
def test_lazy_functions_are_the_functions_themselves(function: object) -> None:
    assert inspect.isfunction(function) and "Args:" in (inspect.getdoc(function) or "")
    assert all(each.annotation is not inspect.Parameter.empty for each in inspect.signature(function).parameters.values())


def test_elbo_as_html() -> None:
    found = m2s.elbo(network, HEAD, X_0, passes=3)
    rows = cells(found._repr_html_())
    assert [row[0] for row in rows] == ["integral", "prior", "reconstruction", "NELBO"]
    nats, error = found.mean()
    assert rows[-1][1] == f"{nats:.4f} ± {error:.4f}"
    assert float(rows[-1][2]) == pytest.approx(nats / 5 / torch.log(torch.tensor(2.0)).item(), abs=1e-4)
    assert float(rows[0][1]) == pytest.approx(float(found.integral.mean()), abs=1e-4)


def test_audit_as_html() -> None:
    found = m2s.audit(network, m2s.LogScore(m2s.Uniform(4, m2s.Linear())), (4, 5), steps=4)
    html, total = found._repr_html_(), found.overall()
    rows = cells(html)
    assert [int(row[1].replace(",", "")) for row in rows] == total.before.classes
    assert [int(row[3].replace(",", "")) for row in rows] == total.after.classes
    assert f"seed {found.seed}" in html


def test_trajectory_as_html() -> None:
    trajectory = m2s.Trajectory()
    assert "nothing" in trajectory._repr_html_()
    x = m2s.sample(network, HEAD, (7, 20), steps=10, callback=trajectory)
    rows = cells(trajectory._repr_html_())
    assert [row[0] for row in rows] == ["0", "2", "4", "6", "8", "10"] and len(rows[0]) == 5
    assert rows[-1][1:] == [" ".join(map(str, tokens[:16])) + " ..." for tokens in x[:4].tolist()]
