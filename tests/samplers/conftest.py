"""Fixtures of the sampler tests."""

import pytest

from step_cases import use_blocks_of

# Tests with a categorical draw in its default block size.
DEFAULT_BLOCKS = ("test_samples_have_the_exact_distribution[uniform-bayes]", "test_samples_without_positive_weights")


@pytest.fixture
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Categorical draws use blocks of two tokens, so that a small vocabulary has several blocks too."""
    if request.node.name not in DEFAULT_BLOCKS:
        use_blocks_of(2, monkeypatch)
