"""The head of a classifier on frozen features."""

import keras

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
