"""A few faults of the sweep, at moments that do not depend on time."""

import pytest

from tests import fault_sweep


@pytest.mark.slow
def test_runs_that_are_stopped_go_on(tmp_path):
    counts = {"kill_at_a_file": 2, "fill_the_disk": 1}
    assert not fault_sweep.sweep(tmp_path / "sweep", counts)
