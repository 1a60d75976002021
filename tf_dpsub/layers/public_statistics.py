"""Scaling of features by statistics of public examples."""

import keras
import numpy as np
from keras import ops

from tf_dpsub.checks import check_count

# Deviations below this share of the median one are not blown up.
_FLOOR = 0.1
# What is added to eigenvalues, relative to the largest.
_RIDGE = 1e-3


class _PublicStatistics(keras.layers.Layer):
    """A layer whose weights are computed from public features."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.trainable = False

    def _add_statistic(self, name, shape, initializer):
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=initializer,
            trainable=False,
            dtype="float32",
        )


@keras.saving.register_keras_serializable("tf_dpsub")
class PublicNormalization(_PublicStatistics):
    """Centres and scales each feature by public examples.

    The public mean is subtracted, and the public standard deviation divided
    out, where it is not small; then all is divided by the median norm of
    public examples. A private head needs this: without it, what all examples
    have in common uses up the clip.

    Input and output shape: `[batch, features]`.

    Example:

    ```python
    normalization = tf_dpsub.layers.PublicNormalization.from_features(
        features.predict(public_images)
    )
    ```

    Reference:
        - [Tramèr, Boneh, 2021](https://arxiv.org/abs/2011.11660), section 3
    """

    @classmethod
    def from_features(cls, public_features, **kwargs):
        """Computes the statistics.

        Args:
            public_features: array `[m, features]`, of at least two examples.
            **kwargs: as `keras.layers.Layer`.

        Returns:
            A built `PublicNormalization`.

        Raises:
            ValueError: if features are not finite, all alike, or of another
                shape.
        """
        features = _checked(public_features)
        layer = cls(**kwargs)
        layer.build(features.shape)
        mean, deviations = features.mean(0), features.std(0)
        scale = np.sqrt(deviations**2 + _floor(deviations) ** 2)
        layer.mean.assign(mean)
        layer.scale.assign(scale * _median_norm((features - mean) / scale))
        return layer

    def build(self, input_shape):
        size = input_shape[-1]
        self.mean = self._add_statistic("mean", (size,), "zeros")
        self.scale = self._add_statistic("scale", (size,), "ones")
        self.built = True

    def call(self, inputs):
        return (inputs - self.mean) / self.scale


@keras.saving.register_keras_serializable("tf_dpsub")
class PublicProjection(_PublicStatistics):
    """Projects features on the main directions of public ones, and whitens.

    With `v_j` the principal directions of the public features and `lambda_j`
    their variances, the outputs are
    `v_j^T (features - mean) / (lambda_j + 1e-3 lambda_1)^(whiten / 2)`, divided
    by the public median of their norm. A private linear head on them is
    DP-SGD in a public subspace, with noise shaped to the public spectrum.

    Args:
        rank: int, number of directions.
        **kwargs: as `keras.layers.Layer`.

    Input shape: `[batch, features]`.

    Output shape: `[batch, rank]`.
    """

    def __init__(self, rank: int, **kwargs):
        super().__init__(**kwargs)
        check_count("rank", rank)
        self.rank = int(rank)

    @classmethod
    def from_features(
        cls, public_features, rank: int, *, whiten: float = 1.0, **kwargs
    ):
        """Computes the directions and their scales.

        Args:
            public_features: array `[m, features]`, of more than `rank`
                examples.
            rank: int, number of directions.
            whiten: float in [0, 1], 0 for a projection alone. Defaults to
                `1.0`.
            **kwargs: as `keras.layers.Layer`.

        Returns:
            A built `PublicProjection`.

        Raises:
            ValueError: if features are not finite, all alike, of another
                shape, or too few.
        """
        features = _checked(public_features)
        layer = cls(rank, **kwargs)
        if not 0 <= whiten <= 1:
            raise ValueError(f"Expected 0 <= whiten <= 1, got {whiten}.")
        most = min(len(features) - 1, features.shape[1])
        if layer.rank > most:
            raise ValueError(
                f"Expected rank <= {most}, what {len(features)} public "
                f"examples of {features.shape[1]} features span, got "
                f"{layer.rank}. Give more public examples, or a lower rank."
            )
        layer.build(features.shape)
        mean = features.mean(0)
        variances, directions = _principal_directions(
            features - mean, layer.rank
        )
        scales = (variances + _RIDGE * variances[0]) ** (-whiten / 2)
        kernel = directions * scales
        kernel /= _median_norm((features - mean) @ kernel)
        layer.kernel.assign(kernel)
        layer.bias.assign(-mean @ kernel)
        return layer

    def build(self, input_shape):
        shape = (input_shape[-1], self.rank)
        self.kernel = self._add_statistic("kernel", shape, "zeros")
        self.bias = self._add_statistic("bias", (self.rank,), "zeros")
        self.built = True

    def call(self, inputs):
        return ops.matmul(inputs, self.kernel) + self.bias

    def get_config(self):
        return {**super().get_config(), "rank": self.rank}


def _checked(features):
    features = np.asarray(features, np.float32)
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(
            "Expected public features [examples, features] of at least two "
            f"examples, got an array of shape {features.shape}."
        )
    if not np.isfinite(features).all():
        raise ValueError(
            "Expected public features that are finite, got NaN or infinity. "
            "Check the range of the inputs."
        )
    if not features.std(0).any():
        raise ValueError(
            "Expected public features that differ among examples, got "
            f"{len(features)} times the same."
        )
    return features


def _principal_directions(features, rank):
    """Variances `[rank]`, and directions `[features, rank]`, largest first."""
    rows, columns = features.shape
    if columns <= rows:
        values, vectors = np.linalg.eigh(features.T @ features / rows)
        return values[::-1][:rank], vectors[:, ::-1][:, :rank]
    # By way of the smaller Gram matrix.
    values, vectors = np.linalg.eigh(features @ features.T / rows)
    directions = features.T @ vectors[:, ::-1][:, :rank]
    return values[::-1][:rank], directions / np.linalg.norm(directions, axis=0)


def _floor(deviations):
    """What is added in quadrature to the deviation of each feature."""
    return _FLOOR * np.median(deviations[deviations > 0])


def _median_norm(features):
    return np.median(np.linalg.norm(features, axis=1))
