"""Replacement of batch normalisation by layers that see one example."""

import math

import keras
import numpy as np
from keras.src.models import Functional

from tf_dpsub.checks import check_count

_MOST_GROUPS = 32
# Layers that replace batch normalisation.
_REPLACEMENTS = (
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.Rescaling,
)
_PRETRAINED = ("raise", "replace", "fold", "freeze")


def replace_batch_normalization(
    model, groups: int | None = None, pretrained: str = "raise"
):
    """Copies a model, with layers that do not mix the examples of a batch.

    Each trainable `BatchNormalization` becomes a `GroupNormalization`, or a
    `LayerNormalization` where an example has one vector of features. The new
    layer keeps the name, `gamma` and `beta` of the old one, and all other
    layers keep their weights. The model that is given is not changed.

    The moving statistics of a pretrained model have no place in these layers,
    and its features would be wrong without them, so `pretrained` must say what
    becomes of them:

    | `pretrained` | a layer whose moving statistics were trained |
    |---|---|
    | `"raise"` | raises |
    | `"replace"` | is replaced as any other, and its statistics are dropped |
    | `"fold"` | becomes a `Rescaling` by constants, of equal predictions |
    | `"freeze"` | stays, not trainable, of equal predictions |

    Formal guarantees: nothing is released here. With `"fold"` and `"freeze"`
    the statistics are taken as public, and the privacy statement says so.

    Args:
        model: built `keras.Model`, functional or sequential, with nested ones.
        groups: int, groups of each `GroupNormalization`. Defaults to `None`:
            the largest divisor of the channels up to 32 that leaves at least
            two numbers in a group.
        pretrained: string, `"raise"`, `"replace"`, `"fold"` or `"freeze"`.
            Defaults to `"raise"`.

    Returns:
        A new `keras.Model`; the given one if it has no such layer.

    Raises:
        ValueError: if a layer is pretrained and `pretrained="raise"`; if one
            cannot be replaced, as inside of a layer of your own or where an
            example has a single number.

    Example:

    ```python
    plain = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), weights=None, classes=10
    )
    plain = tf_dpsub.models.replace_batch_normalization(plain)
    model = tf_dpsub.make_private(plain)
    ```
    """
    if pretrained not in _PRETRAINED:
        raise ValueError(
            f"Expected pretrained to be one of {', '.join(_PRETRAINED)}, got "
            f"{pretrained!r}."
        )
    check_count("groups", groups, optional=True)
    if not trainable_batch_normalizations(model):
        return model
    _check_is_graph_of_layers(model)
    copies: dict = {}  # by identity: layers may be shared between models

    def copy_of(layer):
        if id(layer) not in copies:
            copies[id(layer)] = layer, new_copy(layer)
        return copies[id(layer)][1]

    def new_copy(layer):
        if _is_trainable_batch_normalization(layer):
            return _replacement(layer, groups, pretrained)
        if isinstance(layer, keras.Sequential):
            return keras.models.clone_model(layer, clone_function=copy_of)
        if isinstance(layer, Functional):
            return keras.models.clone_model(
                layer, clone_function=copy_of, call_function=_call
            )
        return type(layer).from_config(layer.get_config())

    copied = copy_of(model)
    for layer in trainable_batch_normalizations(copied):
        raise ValueError(
            "Expected BatchNormalization among the layers of a functional or "
            f"sequential model, got '{layer.path}' inside of another layer. "
            "Replace it there by GroupNormalization."
        )
    for old, new in copies.values():
        if not isinstance(old, (keras.Sequential, Functional)):
            _copy_weights(old, new)
    return copied


def trainable_batch_normalizations(model):
    """Layers of a model that normalise over the batch, a list."""
    return [
        layer
        for layer in model._flatten_layers()
        if _is_trainable_batch_normalization(layer)
    ]


def has_statistics(layer):
    """Returns whether a layer applies statistics of data seen before."""
    if isinstance(layer, keras.layers.BatchNormalization):
        return _is_pretrained(layer)
    # What `replace_batch_normalization` folds them into.
    return isinstance(layer, keras.layers.Rescaling) and np.ndim(layer.scale)


def _is_trainable_batch_normalization(layer):
    return (
        isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    )


def _check_is_graph_of_layers(model):
    for part in (model, *model._flatten_layers(include_self=False)):
        is_subclassed = isinstance(part, keras.Model) and not isinstance(
            part, (keras.Sequential, Functional)
        )
        if is_subclassed and trainable_batch_normalizations(part):
            raise ValueError(
                "Expected functional and sequential models, got "
                f"{type(part).__name__} '{part.path or part.name}', whose "
                "`call` cannot be rewritten. Replace BatchNormalization in its "
                "code by GroupNormalization."
            )


def _replacement(layer, groups, pretrained):
    if _is_pretrained(layer) and pretrained != "replace":
        if pretrained == "raise":
            raise ValueError(
                "Expected BatchNormalization without trained statistics, got "
                f"'{layer.name}' of a pretrained model, whose features would "
                'be wrong without them. Pass pretrained="freeze" or "fold" '
                'to keep them as they are, or "replace" to drop them.'
            )
        if pretrained == "fold":
            return _folded(layer)
        frozen = type(layer).from_config(layer.get_config())
        frozen.trainable = False
        return frozen
    # Settings that a new layer takes over from the old one.
    settings = {
        name: layer.get_config()[name]
        for name in (
            "name",
            "dtype",
            "center",
            "scale",
            "beta_initializer",
            "gamma_initializer",
            "beta_regularizer",
            "gamma_regularizer",
            "beta_constraint",
            "gamma_constraint",
        )
    }
    channels, positions = _channels_and_positions(layer)
    if channels * positions == 1:
        raise ValueError(
            "Expected several numbers of each example to normalise, got "
            f"BatchNormalization '{layer.name}' of a single one, which any "
            "normalisation of one example makes constant. Remove the layer, or "
            "scale its input by public constants (`keras.layers.Rescaling`)."
        )
    if len(_input_shape(layer)) == 2:
        return keras.layers.LayerNormalization(axis=layer.axis, **settings)
    if groups is None:
        groups = max(
            n
            for n in range(1, min(channels, _MOST_GROUPS) + 1)
            if channels % n == 0 and (positions > 1 or channels // n > 1)
        )
    return keras.layers.GroupNormalization(groups, axis=layer.axis, **settings)


def _call(layer, *args, **kwargs):
    """Calls a layer with the arguments that the old one was called with."""
    if isinstance(layer, _REPLACEMENTS):
        # Of batch normalisation alone.
        kwargs = {
            k: v for k, v in kwargs.items() if k not in ("mask", "training")
        }
    return layer(*args, **kwargs)


def _input_shape(layer):
    return tuple(layer._build_shapes_dict["input_shape"])


def _channels_and_positions(layer):
    """Channels, and positions that are normalised together; 2 if unknown."""
    shape = _input_shape(layer)
    axis = layer.axis % len(shape)
    others = [n for i, n in enumerate(shape[1:], 1) if i != axis]
    return shape[axis], math.prod(2 if n is None else n for n in others)


def _is_pretrained(layer):
    return bool(
        np.any(np.asarray(layer.moving_mean) != 0)
        or np.any(np.asarray(layer.moving_variance) != 1)
    )


def _folded(layer):
    rank = len(_input_shape(layer))
    if layer.axis % rank != rank - 1:
        raise ValueError(
            f"Expected channels in the last axis, got '{layer.name}' with "
            f'axis={layer.axis}. Pass pretrained="freeze".'
        )
    # In float64: rounded once.
    mean, variance = (
        np.asarray(w, np.float64)
        for w in (layer.moving_mean, layer.moving_variance)
    )
    scale = 1 / np.sqrt(variance + layer.epsilon)
    if layer.scale:
        scale = scale * np.asarray(layer.gamma, np.float64)
    offset = -mean * scale
    if layer.center:
        offset = offset + np.asarray(layer.beta, np.float64)
    return keras.layers.Rescaling(
        scale.astype("float32"),
        offset.astype("float32"),
        name=layer.name,
        dtype=layer.dtype_policy,
    )


def _copy_weights(old, new):
    if not isinstance(old, keras.Layer):
        return  # an operation, such as that of `x + y`
    if isinstance(new, type(old)):
        for target, source in zip(new.variables, old.variables, strict=True):
            target.assign(source)
        return
    for name in ("gamma", "beta"):
        weight = getattr(new, name, None)
        if weight is not None:
            weight.assign(getattr(old, name))
