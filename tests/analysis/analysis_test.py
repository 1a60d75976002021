"""Dependencies of the package, and old names of functions that moved."""

import subprocess
import sys

import pytest

from tf_dpsub import analysis, planning


@pytest.mark.parametrize(
    "name", ["Candidate", "Plan", "Signal", "StepCost", "plan"]
)
def test_planning_keeps_its_old_names_with_a_warning(name):
    with pytest.warns(FutureWarning, match=f"tf_dpsub.planning.{name}"):
        assert getattr(analysis, name) is getattr(planning, name)


def test_another_name():
    with pytest.raises(AttributeError, match="no attribute 'planner'"):
        getattr(analysis, "planner")


def test_needs_no_tensorflow():
    code = (
        "import sys, tf_dpsub.analysis; "
        "print({'keras', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
