"""The published table of engines agrees with this version."""

import keras
import pytest

from tests.gradients import coverage_table


def test_every_layer_and_loss_has_a_row():
    """A new layer or loss needs a model to try it in, and a row."""
    published = {call.split("(")[0] for call in coverage_table.published()}
    missing = [
        name
        for names in coverage_table.sections().values()
        for name in names
        if name not in published
    ]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("section", coverage_table.sections())
def test_the_table_is_right(section):
    if f"Keras\n{keras.__version__} " not in coverage_table.PAGE.read_text():
        pytest.skip("the page is of another version of Keras")
    published = coverage_table.published()
    names = coverage_table.sections()[section]
    for row in coverage_table.rows(section, names):
        assert row == published[row[0]]
