"""The head of a classifier on frozen features."""

import keras

from tf_dpsub.layers.frozen_features import FrozenFeatures
from tf_dpsub.training import kept_features


def of(model):
    """Finds the dense layer that is all that is trained of a model.

    Args:
        model: plain `keras.Model`.

    Returns:
        A `keras.layers.Dense`.

    Raises:
        ValueError: if there is none.
    """
    layer = model.layers[-1]
    if (
        not kept_features.has_frozen_features(model)
        or not isinstance(layer, keras.layers.Dense)
        or len(layer.trainable_variables) != len(model.trainable_variables)
    ):
        raise ValueError(
            "Expected a model of frozen features and one dense layer, as "
            "`tf_dpsub.models.feature_classifier` makes it, got "
            f"'{model.name}'."
        )
    return layer


def on_features(model):
    """Finds the head of a model, and that it takes the features themselves.

    Args:
        model: plain `keras.Model`.

    Returns:
        A `keras.layers.Dense`.

    Raises:
        ValueError: if there is none, or there are layers before it.
    """
    head = of(model)
    is_features = [isinstance(v, FrozenFeatures) for v in model.layers]
    between = [
        layer.name
        for layer in model.layers[is_features.index(True) + 1 : -1]
        if not isinstance(layer, (keras.layers.Flatten, keras.layers.Reshape))
    ]
    if between:
        raise ValueError(
            "Expected a dense layer that takes the frozen features themselves, "
            f"got {', '.join(between)} between these in '{model.name}'. Make "
            "these layers a part of the features."
        )
    return head
