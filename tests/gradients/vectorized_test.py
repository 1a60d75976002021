"""Rows by TensorFlow's vectorized map."""

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub import gradients
from tf_dpsub.gradients import vectorized


def test_operations_run_in_loops_without_warnings(caplog):
    kernel = keras.Variable(np.ones([3]), dtype="float32")

    def loss_fn(batch):
        # TensorFlow has no converter for this operation.
        moved = tf.raw_ops.ImageProjectiveTransformV3(
            images=batch["x"][:, None, :, None],
            transforms=[[1.0, 0, 0, 0, 1, 0, 0, 0]],
            output_shape=[1, 3],
            fill_value=0.0,
            interpolation="NEAREST",
        )
        return tf.reduce_sum(kernel.value * moved[:, 0, :, 0], -1), {}

    batch = {"x": tf.constant([[1.0, 2.0, 3.0], [2.0, 2.0, 1.0]])}
    log = tf.get_logger()
    log.addHandler(caplog.handler)
    try:
        rows, _ = vectorized.one_by_one(
            loss_fn, batch, [kernel], may_read=gradients.Sources([kernel], [])
        )
    finally:
        log.removeHandler(caplog.handler)
    np.testing.assert_allclose(rows.sq_norms(), [14.0, 9.0])
    assert vectorized.vectorizes(loss_fn, batch, [kernel])
    assert "while_loop" not in caplog.text
