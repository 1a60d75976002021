"""Old names of what has moved to another module."""

import pytest

from tf_dpsub import analysis, planning


@pytest.mark.parametrize("name", planning.__all__)
def test_what_plans_has_its_old_name_with_a_warning(name):
    with pytest.warns(FutureWarning, match=f"tf_dpsub.planning.{name}"):
        assert getattr(analysis, name) is getattr(planning, name)


def test_another_name():
    with pytest.raises(AttributeError, match="no attribute 'planner'"):
        getattr(analysis, "planner")
