"""Per-example gradients by running one example at a time."""

import tensorflow as tf
from keras.src import backend

from tf_dpsub.gradients import operator


class StoredGradients(operator.PerExampleGradients):
    """Per-example gradients given as rows.

    Args:
        variables: list of variables.
        rows: list aligned with them of tensors `[batch, *variable.shape]`.
    """

    def __init__(self, variables, rows):
        super().__init__(variables, rows[0].shape[0])
        rows = [tf.cast(row, tf.float32) for row in rows]
        sq_norms = [operator.sum_squares(row) for row in rows]
        self.valid = tf.math.is_finite(
            (1 + operator.ROUNDING_MARGIN) * tf.add_n(sq_norms)
        )
        keys = [operator.tf_variable(v).ref() for v in self.variables]
        self._rows = {
            key: operator.mask_rows(self.valid, row)
            for key, row in zip(keys, rows)
        }
        self._sq_norms = {
            key: tf.where(self.valid, norm, 0.0)
            for key, norm in zip(keys, sq_norms)
        }

    def sq_norms(self, variables=None):
        variables = self.variables if variables is None else variables
        return tf.add_n(
            [self._sq_norms[operator.tf_variable(v).ref()] for v in variables]
        )

    def sq_norm_bounds(self, variables=None):
        return (1 + operator.ROUNDING_MARGIN) * self.sq_norms(variables)

    def rows(self, variable):
        return self._rows[operator.tf_variable(variable).ref()]

    def weighted_sum(self, c):
        return [tf.tensordot(c, self.rows(v), 1) for v in self.variables]


def one_by_one(loss_fn, inputs, variables, map_function, loss_scale=1.0):
    """Rows from the loss of one example at a time.

    The model only ever sees one example, so a row cannot depend on another,
    whatever the layers do. Dropout masks are common to all examples.

    Args:
        loss_fn: callable that takes a structure of tensors with a batch axis
            and returns losses `[batch]` and a structure of tensors.
        inputs: structure of tensors whose axis 0 is the batch.
        variables: list of variables.
        map_function: `tf.vectorized_map` or `tf.map_fn`.
        loss_scale: float, the factor that `loss_fn` multiplied the losses by.
            Defaults to `1.0`.

    Returns:
        A `StoredGradients`, and the structure of the whole batch.
    """
    tf_variables = [operator.tf_variable(v) for v in variables]

    def one(example):
        batch_of_one = tf.nest.map_structure(lambda t: t[None], example)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(tf_variables)
            losses, aux = loss_fn(batch_of_one)
        gradients = tape.gradient(
            losses,
            tf_variables,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        rows = [
            tf.cast(tf.convert_to_tensor(g), tf.float32) / loss_scale
            for g in gradients
        ]
        masks = [backend.get_keras_mask(t) for t in tf.nest.flatten(aux)]
        outputs = (rows, aux, [() if m is None else m for m in masks])
        return tf.nest.map_structure(tf.convert_to_tensor, outputs)

    arguments = {}
    if map_function is tf.map_fn:
        example = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape[1:], t.dtype), inputs
        )
        outputs = tf.function(one).get_concrete_function(example)
        arguments["fn_output_signature"] = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype),
            outputs.structured_outputs,
        )
    rows, aux, masks = map_function(one, inputs, **arguments)
    aux, masks = (
        tf.nest.map_structure(lambda t: t[:, 0], part) for part in (aux, masks)
    )
    for tensor, mask in zip(tf.nest.flatten(aux), masks):
        if tf.is_tensor(mask):
            backend.set_keras_mask(tensor, mask)
    return StoredGradients(variables, rows), aux
