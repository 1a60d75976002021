"""Selects and prepares the parts of a model that a config trains."""

import re

import keras

from tf_dpsub import layers


def prepare(model, config):
    """Freezes layers, adds LoRA, and gives layers gradient carriers.

    Args:
        model: `keras.Model`.
        config: `ml_collections.ConfigDict` with the fields `trainable_layers`,
            `lora` and `reparametrize` of `configs/default.py`.

    Raises:
        ValueError: if a pattern fits no layer, or a layer cannot be converted.
    """
    if config.trainable_layers:
        chosen = _chosen(model, config.trainable_layers)
        for layer in _with_weights(model):
            layer.trainable = layer in chosen
    if config.lora:
        kinds = (keras.layers.Dense, keras.layers.EinsumDense)
        for layer in _chosen(model, config.lora["include"], kinds):
            layer.trainable = True
            layer.enable_lora(config.lora["rank"])
    if config.reparametrize:
        layers.reparametrize(model, **config.reparametrize.to_dict())


def _with_weights(model):
    """Layers that have weights and no sublayers."""
    return [
        layer
        for layer in model._flatten_layers()
        if layer.weights and not layer._flatten_layers(include_self=False)
    ]


def _chosen(model, patterns, kinds=keras.layers.Layer):
    candidates = [v for v in _with_weights(model) if isinstance(v, kinds)]
    for pattern in patterns:
        if not any(re.search(pattern, layer.path) for layer in candidates):
            raise ValueError(
                f"Expected patterns that fit a layer of '{model.name}', got "
                f"{pattern!r}. Its layers are "
                f"{', '.join(layer.path for layer in candidates)}."
            )
    return [
        v for v in candidates if any(re.search(p, v.path) for p in patterns)
    ]
