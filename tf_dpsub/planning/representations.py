"""Representations of inputs that cost no privacy, and the code that makes them.

A representation is computed once for each public example. What scales it, by
public directions, is made from some of these.
"""

import math

import keras
import numpy as np

from tf_dpsub import models
from tf_dpsub.checks import is_int
from tf_dpsub.heads import public_ridge
from tf_dpsub.layers import (
    PatchDictionary,
    PublicNormalization,
    PublicProjection,
    Scattering2D,
)
from tf_dpsub.models import tokenizers

_KINDS = {
    "scattering": ("scattering",),
    "patches": ("patches",),
    "scattering and patches": ("scattering", "patches"),
}
# Words of a dictionary of patches, by the number of channels.
_WORDS = {1: 100, 3: 400}
# A thing in a photograph may look either way, a letter may not.
_MIRROR = {1: False, 3: True}
# The smallest images of which all kinds of features can be computed.
_LEAST_SIDE = 8


def kind_of(inputs) -> str:
    """Tells which kind of inputs these are.

    Args:
        inputs: list or array of strings or of pairs of them, or array of
            numbers.

    Returns:
        `"texts"`, `"grey images"`, `"coloured images"` or `"vectors"`.

    Raises:
        ValueError: if they are none of these, or of another range.
    """
    array = checked(inputs)
    if array.dtype == object:
        return "texts"
    if array.ndim == 4:
        return {1: "grey images", 3: "coloured images"}[array.shape[-1]]
    return "vectors"


def checked(inputs):
    """The inputs as an array of objects or of float32.

    Args:
        inputs: as for `kind_of`.

    Raises:
        ValueError: as `kind_of`.
    """
    array = np.asarray(inputs)
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype == object:
        if array.ndim in (1, 2) and all(
            isinstance(text, str) for text in array.flat
        ):
            return array
        raise ValueError(
            "Expected public texts that are strings, or pairs of strings, got "
            f"objects of shape {array.shape}."
        )
    if array.dtype.kind not in "biuf" or not (
        array.ndim == 2 or (array.ndim == 4 and array.shape[-1] in (1, 3))
    ):
        raise ValueError(
            "Expected public texts, vectors [examples, numbers] or images "
            "[examples, height, width, 1 or 3], got an array of "
            f"{array.dtype} of shape {array.shape}. For other inputs compare "
            "mechanisms by `tf_dpsub.planning.plan`."
        )
    array = array.astype(np.float32)
    if array.ndim == 2 and not np.isfinite(array).all():
        raise ValueError(
            "Expected public vectors that are finite, got NaN or infinity."
        )
    if array.ndim == 4:
        # NaN is in no range.
        if array.size and not (array.min() >= 0 and array.max() <= 1):
            raise ValueError(
                "Expected public images with colours in [0, 1], got values "
                f"from {array.min()} to {array.max()}. Divide bytes by 255."
            )
        if min(array.shape[1:3]) < _LEAST_SIDE:
            raise ValueError(
                f"Expected images of {_LEAST_SIDE} pixels on each side at "
                f"least, got {array.shape[1]} by {array.shape[2]}. Pass "
                "vectors, of shape [examples, numbers]."
            )
    return array


class Representations:
    """Features of public examples, of all representations of their kind.

    Args:
        scaling: array, the public inputs that scale features.
        labelled: array, the labelled public inputs; may be `scaling` itself.
        features: Keras layer or model of given features, or None.
        text_encoder: dict, arguments of `tf_dpsub.models.sentence_classifier`
            that name an encoder, or None.
        seed: int, of the dictionary of patches.
    """

    def __init__(self, scaling, labelled, features, text_encoder, seed):
        self._scaling, self._labelled = scaling, labelled
        self._features, self._text_encoder = features, text_encoder
        self._seed = seed
        self._computed: dict = {}

    def of(self, name: str):
        """Normalised features of the inputs that scale, and of labelled ones.

        Args:
            name: string, such as `"scattering"`.

        Returns:
            Tuple of two arrays `[examples, features]`.
        """
        if name == "scattering and patches":
            return tuple(
                np.concatenate(parts, axis=1)
                for parts in zip(self.of("scattering"), self.of("patches"))
            )
        if name not in self._computed:
            function = self._function(name)
            scaling = function(self._scaling)
            labelled = scaling
            if self._labelled is not self._scaling:
                labelled = function(self._labelled)
            self._computed[name] = scaling, labelled
        return self._computed[name]

    def _function(self, name):
        """A function from inputs to features that scale nothing yet."""
        if name in _KINDS:
            return _predictions(
                models.image_features(
                    self._scaling,
                    kinds=_KINDS[name],
                    words=_WORDS[self._scaling.shape[-1]],
                    mirror=_MIRROR[self._scaling.shape[-1]],
                    seed=self._seed,
                )
            )
        if name == "sentence embeddings":
            classifier = models.sentence_classifier(
                self._scaling.shape[1:],
                public_texts=self._scaling,
                **self._text_encoder,
            )
            predict = _predictions(
                keras.Model(classifier.input, classifier.layers[-1].input)
            )
            preprocessor = classifier.preprocessor
            return lambda x: predict(tokenizers.preprocessed(preprocessor, x))
        if name == "inputs":
            return _predictions(models.vector_features(self._scaling))
        raw = flat(self._features)
        public = public_ridge.outputs(raw, self._scaling)
        normalization = PublicNormalization.from_features(public)
        return _predictions(keras.Model(raw.input, normalization(raw.output)))


def size(name: str, shape: tuple, features) -> int | None:
    """Number of features of a representation; None if it is not known.

    Args:
        name: string, such as `"scattering"`.
        shape: tuple of ints, of one input.
        features: as for `Representations`.
    """
    if name in _KINDS:
        sizes = {
            "scattering": lambda: Scattering2D().compute_output_shape,
            "patches": lambda: (
                PatchDictionary(_WORDS[shape[-1]]).compute_output_shape
            ),
        }
        return sum(
            math.prod(sizes[kind]()((None, *shape))[1:])
            for kind in _KINDS[name]
        )
    if name == "inputs":
        return shape[0]
    if name == "given features":
        return flat(features).output_shape[1]
    return None


def flat(features):
    """The given features as a model whose outputs are vectors.

    Args:
        features: built Keras model, or layer that was called.
    """
    inputs = getattr(features, "inputs", None)
    if not inputs or len(inputs) != 1:
        raise ValueError(
            "Expected features to be a built Keras model of one input, got "
            f"{type(features).__name__}. Wrap a layer in `keras.Sequential` "
            "with a `keras.Input`."
        )
    outputs = features(inputs[0], training=False)
    return keras.Model(inputs[0], keras.layers.Flatten()(outputs))


class Scales:
    """Projections of features on public directions, for several exponents.

    Args:
        public: array `[examples, features]`, that the directions are of.
        most: int, the largest number of directions.
    """

    def __init__(self, public, most: int):
        # Directions of these coordinates are those of the features.
        self._widest = _projection(public, most, 0.0)
        self._public = self._widest(public)

    def function(self, rank: int, whiten: float):
        """A function that projects features as `PublicProjection` does.

        Args:
            rank: int, number of directions.
            whiten: float, exponent by which public variances are divided out.

        Returns:
            Function from arrays `[batch, features]` to `[batch, rank]`.
        """
        narrow = _projection(self._public, rank, whiten)
        return lambda features: narrow(self._widest(features))


def _projection(public, rank, whiten):
    layer = PublicProjection.from_features(public, rank, whiten=whiten)
    kernel, bias = layer.get_weights()
    return lambda features: features @ kernel + bias


def code(approach, public: str, shape: tuple, text_encoder: dict | None):
    """Lines of Python that make a plain classifier on a representation.

    Args:
        approach: `tf_dpsub.planning.Approach` of a head.
        public: string, the name of the public inputs that scale.
        shape: tuple of ints, of one input.
        text_encoder: as for `Representations`.

    Returns:
        list of string.
    """
    scales = f"rank={approach.rank}, whiten={approach.whiten}"
    name = approach.representation
    if name == "sentence embeddings":
        encoder = ", ".join(
            f"{key}={str(value)!r}" if not is_int(value) else f"{key}={value}"
            for key, value in (
                text_encoder or {"folder": "all-MiniLM-L6-v2"}
            ).items()
        )
        return [
            "plain = tf_dpsub.models.sentence_classifier(",
            f"    {tuple(shape)}, num_classes, public_texts={public},",
            f"    {encoder}, {scales},",
            ")",
        ]
    if name in _KINDS:
        lines = [
            "features = tf_dpsub.models.image_features(",
            f"    {public}, kinds={_KINDS[name]},",
            f"    words={_WORDS[shape[-1]]}, mirror={_MIRROR[shape[-1]]},",
            f"    {scales},",
            ")",
        ]
    elif name == "inputs":
        lines = [
            "features = tf_dpsub.models.vector_features(",
            f"    {public}, {scales}",
            ")",
        ]
    else:
        lines = [
            "inputs = features.inputs",
            "outputs = features(inputs[0], training=False)",
            "raw = keras.Model(inputs, keras.layers.Flatten()(outputs))",
            "scaling = tf_dpsub.models.vector_features(",
            f"    raw.predict({public}), {scales}",
            ")",
            "features = keras.Model(inputs, scaling(raw.outputs[0]))",
        ]
    return [
        *lines,
        "plain = tf_dpsub.models.feature_classifier(features, num_classes)",
    ]


def image_arguments(approach, channels: int) -> dict:
    """Arguments of `tf_dpsub.models.image_features` for an approach.

    Args:
        approach: `tf_dpsub.planning.Approach` of a head on images.
        channels: int, 1 or 3.
    """
    return {
        "kinds": _KINDS[approach.representation],
        "words": _WORDS[channels],
        "mirror": _MIRROR[channels],
        "rank": approach.rank,
        "whiten": approach.whiten,
    }


def _predictions(model):
    return lambda x: public_ridge.outputs(model, x)
