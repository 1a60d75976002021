"""The benchmark of the first `fit` trains, and counts its time."""

import pytest

from benchmarks import first_fit


@pytest.mark.slow
def test_trains_in_both_ways():
    keras, private = (first_fit.measure(1, kind) for kind in (False, True))
    assert keras.keys() == private.keys() == {"wall", "processor"}
    assert min(*keras.values(), *private.values()) > 0
