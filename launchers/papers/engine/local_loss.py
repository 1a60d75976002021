"""The mean loss of a classifier around its weights, to second order."""

import statistics

import numpy as np
import tensorflow as tf

from tf_dpsub import gradients


class LocalLoss:
    """The mean loss of some examples around the weights of a model.

    Vectors are float64 arrays `[parameters]`.

    Args:
        model: built `keras.Model`, which puts out logits.
        x: array, inputs.
        y: int array, classes.
        clip: float, the clipping norm.
    """

    def __init__(self, model, x, y, clip: float):
        self._model, self._clip = model, clip
        self._weights = [v.value for v in model.trainable_variables]
        self._x, self._y = tf.constant(x), tf.constant(y)
        self._product = tf.function(self._hessian_product, autograph=False)
        self._loss = tf.function(self._losses, autograph=False)
        self._rows = tf.function(self._row_sums, autograph=False)

    def basis(self, x, y, rank: int):
        """Top directions of the gradients of public examples.

        Returns:
            Float64 array `[parameters, rank]`, orthonormal.
        """
        rows = np.asarray(self._row_matrix(x, y), np.float64)
        # The eigenvectors of [examples, examples] give those of the rows.
        values, vectors = np.linalg.eigh(rows @ rows.T)
        positive = values[-rank:] > 1e-10 * values[-1]
        basis, _ = np.linalg.qr(rows.T @ vectors[:, -rank:][:, positive])
        return basis

    def gradients(self):
        """The gradient of the mean loss, and the mean of clipped gradients."""
        return [np.asarray(g, np.float64) for g in self._rows()]

    def hessian_product(self, vector):
        """The Hessian of the mean loss, times a vector."""
        product = self._product(tf.constant(vector, tf.float32))
        return np.asarray(product, np.float64)

    def change(self, vector):
        """Mean change of the loss as weights move by a vector, to and fro.

        The gradient adds nothing to it.
        """
        before = [v.numpy() for v in self._weights]
        loss = self._mean_loss()
        changes = []
        try:
            for sign in (1, -1):
                for variable, value, part in zip(
                    self._weights, before, self._parts(sign * vector)
                ):
                    variable.assign(value + part)
                changes.append(self._mean_loss() - loss)
        finally:
            for variable, value in zip(self._weights, before):
                variable.assign(value)
        return statistics.fmean(changes)

    def _mean_loss(self):
        return float(np.mean(self._loss(), dtype=np.float64))

    def _parts(self, vector):
        """A vector as a list of tensors of the shapes of the weights."""
        sizes = [v.shape.num_elements() for v in self._weights]
        parts = tf.split(vector, sizes)
        return [
            tf.cast(tf.reshape(part, v.shape), tf.float32)
            for part, v in zip(parts, self._weights)
        ]

    def _losses(self, x=None, y=None):
        logits = self._model(self._x if x is None else x, training=False)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            self._y if y is None else y, logits
        )

    def _hessian_product(self, vector):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(self._losses())
            slopes = inner.gradient(loss, self._weights)
            along = tf.add_n(
                [
                    tf.reduce_sum(slope * part)
                    for slope, part in zip(slopes, self._parts(vector))
                ]
            )
        return _flat(outer.gradient(along, self._weights))

    def _per_example(self, x, y):
        rows, _ = gradients.per_example_gradients(
            lambda batch: (self._losses(*batch), None),
            (x, y),
            self._model.trainable_variables,
        )
        return rows

    def _row_sums(self):
        rows = self._per_example(self._x, self._y)
        norms = tf.sqrt(rows.sq_norms())
        ones = tf.ones_like(norms)
        clipped = tf.minimum(
            ones, tf.math.divide_no_nan(self._clip * ones, norms)
        )
        count = float(len(self._y))
        return [_flat(rows.weighted_sum(c)) / count for c in (ones, clipped)]

    def _row_matrix(self, x, y):
        @tf.function(autograph=False)
        def matrix(x, y):
            rows = self._per_example(x, y)
            return tf.concat(
                [
                    tf.reshape(rows.rows(v), [rows.batch_size, -1])
                    for v in rows.variables
                ],
                axis=1,
            )

        return matrix(tf.constant(x), tf.constant(y))


def _flat(parts):
    """Tensors as one vector, one after another."""
    return tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)
