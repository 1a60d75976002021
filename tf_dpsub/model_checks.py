"""Which models can be trained privately, and what is taken as public."""

import keras


def check_model(model):
    if not isinstance(model, keras.Model):
        raise ValueError(f"Expected a keras.Model, got {type(model).__name__}.")
    if not model.built:
        raise ValueError(
            f"Expected a built model, got '{model.name}', whose weights do not "
            "exist yet. Give it a `keras.Input`, or call it once on a batch."
        )
    for method in ("train_step", "compute_loss"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise ValueError(
                f"Expected a model with Keras's own {method}, got "
                f"'{model.name}', whose {type(model).__name__} overrides it: "
                "what it does would not happen in private training. Pass the "
                "loss to `compile` instead."
            )
    check_layers(model)


def check_layers(model):
    if not model.trainable_variables:
        raise ValueError(
            f"Expected a model with trainable weights, got '{model.name}', "
            "which has none. Set `trainable = True` on the layers to train."
        )
    for layer in model._flatten_layers():
        if (
            isinstance(layer, keras.layers.BatchNormalization)
            and layer.trainable
        ):
            raise ValueError(
                f"Expected layers that treat examples alike, alone or in a "
                f"batch, got BatchNormalization '{layer.name}', which mixes "
                "them and stores their statistics. Use GroupNormalization or "
                "LayerNormalization, or freeze it: `layer.trainable = False`."
            )


def public_assumptions(model):
    """What the statement has to take as public."""
    adapted = (
        keras.layers.Normalization,
        keras.layers.TextVectorization,
        keras.layers.StringLookup,
        keras.layers.IntegerLookup,
        keras.layers.Discretization,
    )
    return tuple(
        f"the adapted state of {type(layer).__name__} '{layer.name}'"
        for layer in model._flatten_layers()
        if isinstance(layer, adapted)
    )
