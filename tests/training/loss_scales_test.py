"""A word where weights leave nothing beside the noise."""

import numpy as np
import pytest

from tf_dpsub.training import loss_scales


@pytest.mark.parametrize(
    "class_weight, sample_weight, said",
    [
        (None, None, ""),
        ({0: 1 / 900, 1: 1 / 100}, None, "class_weight is 0.01 at most"),
        ({0: 0.55, 1: 5.0}, None, ""),
        ({0: 0.0, 1: 0.0}, None, ""),
        (None, np.full(4, 1e-3), "sample_weight is below 0.1 everywhere"),
        (None, np.array([1e-3, 1.0]), ""),
        (None, (np.full(4, 1e-3), np.ones(4)), ""),
    ],
)
def test_small_weights_are_named(caplog, class_weight, sample_weight, said):
    loss_scales.warn_of_small_weights(class_weight, sample_weight)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_a_number_of_private_weights_is_not_shown(caplog):
    loss_scales.warn_of_small_weights(None, np.array([0.0123, 0.0456]))
    assert "private weights" in caplog.text
    assert "0.0" not in caplog.text
