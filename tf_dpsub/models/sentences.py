"""A linear classifier on the mean hidden states of a frozen encoder."""

import keras
import keras_hub
import numpy as np
from keras import ops

from tf_dpsub.layers.frozen_features import FrozenFeatures
from tf_dpsub.layers.public_statistics import (
    PublicNormalization,
    PublicProjection,
)
from tf_dpsub.models.feature_classifier import linear_head

# The shortest width to which texts are cut.
_LEAST_WIDTH = 8


class SentenceFeatures(keras.Model):
    """Features of texts: mean hidden states of all layers of an encoder.

    Args:
        backbone: `keras_hub.models.Backbone` of an encoder.
        rank: int, number of public directions that are kept; None for all.
        whiten: float, exponent of the public variances, with a rank.
        public_tokens: dict of arrays, inputs of the backbone that are public.
            Defaults to `None`: what is computed from them is loaded later.

    Attributes:
        public_statistics: list of variables, computed from public tokens.
    """

    def __init__(self, backbone, rank, whiten, public_tokens=None):
        hidden = _hidden_states(backbone)
        inputs = backbone.input
        raw = keras.layers.Concatenate()(
            [_mean(h, inputs["padding_mask"]) for h in hidden]
        )
        normalization, projection = PublicNormalization(), None
        if rank is not None:
            projection = PublicProjection(rank)
        if public_tokens is not None:
            public = keras.Model(inputs, raw).predict(public_tokens, verbose=0)
            normalization = PublicNormalization.from_features(public)
            if rank is not None:
                projection = PublicProjection.from_features(
                    ops.convert_to_numpy(normalization(public)),
                    rank,
                    whiten=whiten,
                )
        features = normalization(raw)
        if projection is not None:
            features = projection(features)
        super().__init__(inputs, features, name="sentence_features")

    @property
    def public_statistics(self):
        return [
            variable
            for layer in self.layers
            if isinstance(layer, (PublicNormalization, PublicProjection))
            for variable in layer.weights
        ]

    def groups_of_like_length(self, x):
        """Rows of like lengths, cut to a common width.

        Features do not depend on padding, which takes most of the time.

        Args:
            x: dict of arrays `[examples, tokens]`, inputs of the encoder.

        Returns:
            list of pairs: the indices of some examples, and their inputs,
            `[some examples, width]`.
        """
        tokens = x["padding_mask"].shape[1]
        widths = [_LEAST_WIDTH]
        while widths[-1] < tokens:
            widths.append(min(2 * widths[-1], tokens))
        positions = 1 + np.arange(tokens)
        lengths = np.max(positions * (x["padding_mask"] != 0), axis=1)
        chosen = np.searchsorted(widths, np.minimum(lengths, tokens))
        return [
            (rows, {name: a[rows, :width] for name, a in x.items()})
            for k, width in enumerate(widths)
            if len(rows := np.flatnonzero(chosen == k))
        ]


@keras.saving.register_keras_serializable("tf_dpsub")
class SentenceClassifier(keras_hub.models.Task):
    """A linear head on the features of texts, which are frozen.

    Args:
        backbone: `keras_hub.models.Backbone` of an encoder.
        num_classes: int, number of logits.
        rank: int, as `SentenceFeatures`. Defaults to `None`.
        whiten: float, as `SentenceFeatures`. Defaults to `0.5`.
        preprocessor: `keras_hub.models.Preprocessor`. Defaults to `None`.
        public_tokens: dict of arrays, as `SentenceFeatures`. Defaults to
            `None`.
    """

    def __init__(
        self,
        backbone,
        num_classes: int,
        rank: int | None = None,
        whiten: float = 0.5,
        preprocessor=None,
        public_tokens=None,
        **kwargs,
    ):
        self.backbone = backbone
        self.preprocessor = preprocessor
        # Also the parts of it that have no part in the features.
        backbone.trainable = False
        features = SentenceFeatures(backbone, rank, whiten, public_tokens)
        hidden = FrozenFeatures(features, name="features")(backbone.input)
        outputs = linear_head(num_classes)(hidden)
        super().__init__(inputs=backbone.input, outputs=outputs, **kwargs)
        self._head = {
            "num_classes": num_classes,
            "rank": rank,
            "whiten": whiten,
        }

    def get_config(self):
        return {**super().get_config(), **self._head}


def _mean(hidden, padding_mask):
    """Means `[batch, width]` over tokens that are not padding."""
    weights = ops.expand_dims(ops.cast(padding_mask, hidden.dtype), -1)
    return ops.sum(hidden * weights, 1) / ops.maximum(ops.sum(weights, 1), 1)


def _hidden_states(backbone):
    """Outputs of the embedding and of each layer `[batch, tokens, width]`.

    Raises:
        ValueError: if the backbone is no stack of transformer layers.
    """
    layers = [
        layer
        for layer in backbone.layers
        if layer.name.startswith("transformer_layer_")
    ]
    if not layers or "padding_mask" not in backbone.input:
        raise ValueError(
            "Expected an encoder of keras_hub with layers transformer_layer_0 "
            f"and so on, such as BERT's or RoBERTa's, got '{backbone.name}'."
        )
    (first, *_) = keras.tree.flatten(layers[0].input)
    return [first, *(layer.output for layer in layers)]
