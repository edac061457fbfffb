"""Every shape in a signature of the library is checked while the tests run."""

import os

from jaxtyping import install_import_hook

hook = install_import_hook("m2s", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
