"""Metrics of training alone, which Keras must not show in evaluation."""

import keras
import tensorflow as tf


class Tallies:
    """Counts dropped examples, and the loss of regularizers of weights.

    Formal guarantees: the number of dropped examples is a private result
    without noise, as all metrics of training are. Gradients of regularizers
    follow from the weights alone: they enter after the noise.

    Args:
        model: compiled `PrivateModel`.

    Attributes:
        dropped: `keras.metrics.Sum`, of the examples that contributed nothing.
    """

    def __init__(self, model):
        self.dropped = keras.metrics.Sum(name="dropped")
        self._regularization = keras.metrics.Mean(name="regularization")
        self._model = model

    def reset_state(self):
        """Begins anew, as Keras does at each epoch."""
        self.dropped.reset_state()
        self._regularization.reset_state()

    def regularization_gradients(self) -> list | None:
        """Gradients of the regularizers of weights, None without any."""
        if not self._is_regularized:
            return None
        values = [v.value for v in self._model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.add_n(self._model.model._get_regularization_losses())
        self._regularization.update_state(loss)
        return tape.gradient(loss, values)

    def added_to(self, logs: dict) -> dict:
        """The logs of training with what was counted."""
        if self._is_regularized:
            # As Keras counts it, in `val_loss` too.
            logs["loss"] += self._regularization.result()
        logs["dropped"] = self.dropped.result()
        return logs

    @property
    def of_weights(self) -> list:
        """Variables of what is counted of weights alone."""
        return self._regularization.variables

    @property
    def _is_regularized(self):
        return any(
            v.regularizer is not None for v in self._model.trainable_variables
        )
