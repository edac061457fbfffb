"""The checker of shapes in tests/conftest.py: it checks the first calls of a function in each test, and all of a property."""

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2s.conversions.bridge import gather_at

VALUES, OTHER_SITES = torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long)


def is_checked() -> bool:
    """Whether indices of other sites than those of the values are found."""
    with pytest.raises((jaxtyping.TypeCheckError, RuntimeError)) as error:
        gather_at(VALUES, OTHER_SITES)
    return isinstance(error.value, jaxtyping.TypeCheckError)


@pytest.mark.parametrize("again", [False, True])
def test_the_first_calls_of_each_test_are_checked(again: bool) -> None:
    assert [is_checked() for _ in range(11)] == [True] * 10 + [False]


@settings(max_examples=1, deadline=None)
@given(st.just(101))
def test_all_calls_of_a_property_are_checked(calls: int) -> None:
    assert all(is_checked() for _ in range(calls))


@pytest.mark.usefixtures("without_shape_hook")
def test_users_run_without_checks() -> None:
    assert not is_checked()
