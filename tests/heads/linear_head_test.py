"""The head is the one layer behind frozen features."""

import keras
import pytest

from tf_dpsub.heads import linear_head
from tf_dpsub.layers import FrozenFeatures


def model_of(*between):
    features = FrozenFeatures(keras.layers.Rescaling(2.0))
    return keras.Sequential(
        [keras.Input((2, 3)), features, *between, keras.layers.Dense(4)]
    )


@pytest.mark.parametrize(
    "between",
    [(), (keras.layers.Flatten(),), (keras.layers.Reshape((6,)),)],
    ids=["none", "flattened", "reshaped"],
)
def test_takes_the_features_as_they_are(between):
    model = model_of(*between)
    assert linear_head.on_features(model) is model.layers[-1]


@pytest.mark.parametrize(
    "layer",
    [keras.layers.UnitNormalization(name="unit"), keras.layers.ReLU(name="up")],
    ids=["normalised", "rectified"],
)
def test_solutions_would_be_for_other_features(layer):
    """A head is solved for on the frozen features."""
    message = f"got {layer.name} between .* a part of the features"
    with pytest.raises(ValueError, match=message):
        linear_head.on_features(model_of(keras.layers.Flatten(), layer))


def test_there_is_no_head_without_features():
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    with pytest.raises(ValueError, match="of frozen features and one dense"):
        linear_head.on_features(plain)
