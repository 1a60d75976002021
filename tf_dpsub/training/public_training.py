"""Training on public examples, before private training."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tf_dpsub.checks import check_count, check_positive, check_seed
from tf_dpsub.data import public_origins

_WEIGHT_DECAY = 1e-2
_PURPOSE = "that the weights were trained on before"


def fit_public(
    model,
    x,
    y,
    *,
    loss=None,
    augmentation: str | Callable | None = None,
    steps: int = 800,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    seed: int | None = None,
    allow_private: bool = False,
    verbose: int | str = 0,
):
    """Trains a plain model on public examples, as a start for private training.

    It is trained by AdamW, whose rate falls to 0 along a cosine. Call it before
    `make_private`, in the same process: the statement of a private model that
    has one of these weights, be it within frozen features, names the public
    examples, and `fit` raises where some of them are private. Files and copies
    of the weights do not tell what they were trained on.

    Formal guarantees: none, and none is needed, if the examples are public.

    Args:
        model: plain `keras.Model`.
        x: array, or structure of arrays, inputs of public examples.
        y: the same for their labels.
        loss: as `keras.Model.compile` takes it. Defaults to `None`, sparse
            categorical cross-entropy of logits.
        augmentation: `"affine"` (images are turned by up to 15 degrees, sheared
            by 0.2, scaled by 12 % and moved by 10 % at random); a function or
            layer of a batch of inputs; or None. Defaults to `None`.
        steps: int, number of batches. Defaults to `800`.
        batch_size: int, at most as many examples as there are. Defaults to
            `64`.
        learning_rate: float, the first one. Defaults to `3e-3`.
        seed: int, of the order of examples and of `"affine"`. Defaults to
            `None`, fresh entropy.
        allow_private: bool, whether some of them may be private examples. The
            statement then says that epsilon does not cover these. Defaults to
            `False`.
        verbose: as `keras.Model.fit`. Defaults to `0`.

    Returns:
        A `keras.callbacks.History`, of one epoch.

    Raises:
        ValueError: if labels are missing, lengths differ, or an argument is out
            of range.

    Example:

    ```python
    plain = tf_dpsub.models.mnist_cnn()
    tf_dpsub.fit_public(plain, x_public, y_public, augmentation="affine")
    model = tf_dpsub.make_private(plain)
    ```
    """
    _check_model(model)
    check_count("steps", steps)
    check_count("batch_size", batch_size)
    check_positive("learning_rate", learning_rate)
    check_seed(seed)
    if y is None:
        raise ValueError(
            "Expected labels of the public examples, got y=None: training on "
            "them needs these. Unlabelled ones can make features "
            "(`tf_dpsub.models.image_features`) or a subspace."
        )
    x, y = tree.map_structure(np.asarray, (x, y))
    counts = {len(array) for array in tree.flatten((x, y))}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "Expected inputs and labels of the same number of public examples, "
            f"at least one, got {sorted(counts)}."
        )
    (count,) = counts
    if loss is None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(learning_rate, steps),
            weight_decay=_WEIGHT_DECAY,
        ),
        loss,
    )
    batches = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .shuffle(count, seed=seed)
        .repeat()
        .batch(min(batch_size, count), drop_remainder=True)
    )
    augment = _augmentation(augmentation, seed)
    if augment is not None:
        batches = batches.map(lambda x, y: (augment(x), y))
    public_origins.remember(
        x, _trained_weights(model), _PURPOSE, allow_private=allow_private
    )
    return model.fit(
        batches.prefetch(2),
        steps_per_epoch=steps,
        epochs=1,
        shuffle=False,
        verbose=verbose,
    )


def _check_model(model):
    if isinstance(model, keras.Model) and hasattr(model, "ledger"):
        raise ValueError(
            f"Expected a plain model, got the private '{model.name}': its "
            "ledger would not know of this. Call `fit_public` before "
            "`make_private`."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(f"Expected a keras.Model, got {type(model).__name__}.")
    if not model.trainable_variables:
        raise ValueError(
            f"Expected a model with trainable weights, got '{model.name}', "
            "which has none, or is not built."
        )


def _trained_weights(model):
    """What `fit` of a plain model changes."""
    return [
        variable
        for layer in model._flatten_layers()
        if layer.trainable
        for variable in (
            *(v for v in layer._trainable_variables if v.trainable),
            *layer._non_trainable_variables,
        )
    ]


def _augmentation(augmentation, seed):
    """A function of a batch of inputs, or None."""
    if augmentation is None:
        return None
    if callable(augmentation):
        return lambda x: augmentation(x)
    if augmentation != "affine":
        raise ValueError(
            "Expected augmentation to be 'affine', a function, a layer or "
            f"None, got {augmentation!r}."
        )
    shared = {"fill_mode": "constant", "seed": seed}
    layers = [
        keras.layers.RandomShear(0.2, 0.2, **shared),
        keras.layers.RandomRotation(15 / 360, **shared),
        keras.layers.RandomZoom(0.12, 0.12, **shared),
        keras.layers.RandomTranslation(0.1, 0.1, **shared),
    ]

    def augment(images):
        for layer in layers:
            images = layer(images, training=True)
        return images

    return augment
