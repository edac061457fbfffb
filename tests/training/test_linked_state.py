"""A folder of states that is a symbolic link: nothing is written or deleted through it."""

import shutil

import pytest

from m2s.errors import UserError
from m2s.training import state, train
from small_runs import random_rows, small


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    train(small(out, steps=8), random_rows())
    return out


def test_a_linked_folder_of_states_is_not_followed(tmp_path, finished):
    run = shutil.copytree(finished, tmp_path / "run")
    victim = (run / "state").rename(tmp_path / "victim")
    (run / "state").symlink_to(victim)
    before = sorted(path.name for path in victim.iterdir())
    with pytest.raises(UserError, match="state is a link"):
        train(small(run, steps=8), random_rows())
    with pytest.raises(UserError, match="state is a link"):
        state.remove_old(run / "state", 1)
    with pytest.raises(UserError, match="state is a link"):
        state.write(run / "state", 9, {}, {}, 1)
    assert sorted(path.name for path in victim.iterdir()) == before
