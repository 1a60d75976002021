"""Linear classifiers on features that are not trained."""

from collections.abc import Sequence

import keras

from tf_dpsub.data import public_origins
from tf_dpsub.layers.frozen_features import FrozenFeatures
from tf_dpsub.layers.patch_dictionary import PatchDictionary
from tf_dpsub.layers.public_statistics import (
    PublicNormalization,
    PublicProjection,
)
from tf_dpsub.layers.scattering2d import Scattering2D

PURPOSE = "that features are made of"


def feature_classifier(
    features, num_classes: int, input_shape=None, *, use_bias: bool = False
):
    """Builds a linear classifier on frozen features.

    `PrivateModel.fit` computes the features of private examples once. The
    saved model has the whole path from raw inputs to logits.

    Args:
        features: Keras layer or model, which is frozen, from inputs to
            features.
        num_classes: int, number of logits.
        input_shape: tuple of ints, the shape of one input. Defaults to `None`,
            that of the model that `features` is.
        use_bias: bool, whether logits have a bias. Its gradient takes a large
            part of the clip; classes of about equal size need none. Defaults
            to `False`.

    Returns:
        A built `keras.Model` of logits `[batch, num_classes]`, whose head is
        zero.

    Raises:
        ValueError: if the shape of inputs is not known.

    Example:

    ```python
    features = tf_dpsub.models.image_features(public_images, rank=500)
    model = tf_dpsub.models.feature_classifier(features, num_classes=10)
    ```
    """
    inputs = _inputs(features, input_shape)
    x = FrozenFeatures(features, name="features")(inputs)
    if len(x.shape) > 2:
        x = keras.layers.Flatten()(x)
    logits = linear_head(num_classes, use_bias)(x)
    return keras.Model(inputs, logits, name="feature_classifier")


def linear_head(num_classes: int, use_bias: bool = False):
    """Makes the layer `logits`, which is zero before training.

    Args:
        num_classes: int.
        use_bias: bool. Defaults to `False`.
    """
    return keras.layers.Dense(
        num_classes,
        use_bias=use_bias,
        kernel_initializer="zeros",
        name="logits",
    )


def image_features(
    public_images,
    *,
    kinds: Sequence[str] = ("scattering",),
    words: int = 400,
    mirror: bool = False,
    rank: int | None = None,
    whiten: float = 1.0,
    allow_private: bool = False,
    seed: int | None = None,
):
    """Builds features of images from public images, without labels.

    Features are computed by a scattering transform, by a dictionary of patches
    of the public images, or by both; normalised by their public statistics;
    and, with a rank, projected on their main public directions and whitened.
    Public images may be of another kind than the private ones.

    Formal guarantees: features are functions of one image and of public images.
    They cost no privacy. `fit` compares these with the private images, unless
    the model was loaded from a file.

    Args:
        public_images: array `[images, height, width, channels]`, colours in
            [0, 1], of the shape of private images.
        kinds: sequence of `"scattering"` and `"patches"`. Defaults to
            `("scattering",)`.
        words: int, number of words of the dictionary of patches. Defaults to
            `400`.
        mirror: bool, whether features are the means of those of an image and of
            its mirror image, left for right. They cost twice the time, once.
            Defaults to `False`.
        rank: int, number of public directions that are kept. Defaults to
            `None`, all features.
        whiten: float in [0, 1], exponent by which public variances are divided
            out, with a rank. Defaults to `1.0`.
        allow_private: bool, whether some of the public images may be private
            ones. The statement then says that epsilon does not cover these.
            Defaults to `False`.
        seed: int, of the dictionary. Defaults to `None`, fresh entropy.

    Returns:
        A built `keras.Model`, from images to `[batch, features]`.

    Raises:
        ValueError: if an argument is out of range, or images are of another
            shape or range, too few or too small.
    """
    unknown = set(kinds) - {"scattering", "patches"}
    if unknown or not kinds:
        raise ValueError(
            "Expected kinds to be some of ('scattering', 'patches'), got "
            f"{tuple(kinds)}."
        )
    dictionary = PatchDictionary.from_images(
        public_images, words if "patches" in kinds else 1, seed=seed
    )
    layers = {"scattering": Scattering2D, "patches": lambda: dictionary}
    inputs = keras.Input(public_images.shape[1:])
    parts = []
    for kind in dict.fromkeys(kinds):
        raw = keras.layers.Flatten()(_raw(layers[kind](), inputs, mirror))
        public = keras.Model(inputs, raw).predict(public_images, verbose=0)
        parts.append(PublicNormalization.from_features(public)(raw))
    features = parts[0]
    if len(parts) > 1:
        features = keras.layers.Concatenate()(parts)
    return _scaled(
        inputs,
        features,
        public_images,
        (rank, whiten),
        allow_private,
        "image_features",
    )


def vector_features(
    public_vectors,
    *,
    rank: int | None = None,
    whiten: float = 0.5,
    allow_private: bool = False,
):
    """Scales vectors, such as stored embeddings, by public ones.

    Vectors are normalised by the statistics of public ones; and, with a rank,
    projected on their main public directions and whitened.

    Formal guarantees: as of `image_features`.

    Args:
        public_vectors: array `[examples, numbers]`, without labels.
        rank: int, number of public directions that are kept. Defaults to
            `None`, all numbers.
        whiten: float in [0, 1], exponent by which public variances are divided
            out, with a rank. Defaults to `0.5`.
        allow_private: bool, as for `image_features`. Defaults to `False`.

    Returns:
        A built `keras.Model`, from vectors to `[batch, features]`.

    Raises:
        ValueError: if an argument is out of range, or vectors are not finite,
            all alike, of another shape or too few.
    """
    normalization = PublicNormalization.from_features(public_vectors)
    inputs = keras.Input(public_vectors.shape[1:])
    return _scaled(
        inputs,
        normalization(inputs),
        public_vectors,
        (rank, whiten),
        allow_private,
        "vector_features",
    )


def _scaled(inputs, features, public, scales, allow_private, name):
    """The model of features that are projected as public ones tell."""
    rank, whiten = scales
    if rank is not None:
        outputs = keras.Model(inputs, features).predict(public, verbose=0)
        features = PublicProjection.from_features(outputs, rank, whiten=whiten)(
            features
        )
    model = keras.Model(inputs, features, name=name)
    public_origins.remember(
        public, model.weights, PURPOSE, allow_private=allow_private
    )
    return model


def _raw(layer, images, mirror):
    if not mirror:
        return layer(images)
    mirrored = keras.ops.flip(images, axis=2)
    return keras.layers.Average()([layer(images), layer(mirrored)])


def _inputs(features, input_shape):
    if input_shape is not None:
        return keras.Input(input_shape)
    specs = getattr(features, "inputs", None)
    if specs is None:
        raise ValueError(
            "Expected input_shape with features that are a layer, or a model "
            "that is not built, got None."
        )
    if isinstance(features, keras.Sequential):
        (specs,) = specs
    else:
        specs = getattr(features, "input", specs)
    inputs = keras.tree.map_structure(
        lambda t: keras.Input(t.shape[1:], dtype=t.dtype, name=t.name), specs
    )
    return inputs
