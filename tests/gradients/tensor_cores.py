"""A GPU that rounds operands of float32 products, without one."""

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients import precision, summation


def pretend_a_gpu(monkeypatch):
    """Lets TensorFlow say that it sees a GPU, as it does of TensorFloat-32."""
    seen = tf.config.get_visible_devices

    def with_gpu(device_type=None):
        return ["a GPU"] if device_type == "GPU" else seen(device_type)

    monkeypatch.setattr(tf.config, "get_visible_devices", with_gpu)
    monkeypatch.setattr(precision, "_traced_as_is", False)


def narrow(monkeypatch, as_written=False):
    """Lets the products that norms and sums follow from be TensorFloat-32's.

    Args:
        monkeypatch: pytest's.
        as_written: bool, whether products are those that were written, with
            nothing rounded before and nothing taken apart.
    """
    pretend_a_gpu(monkeypatch)
    rounded, bilinear = precision.rounded, precision.bilinear

    def product(function, a, b, short=(False, False)):
        def of_gpu(a, b):
            if a.dtype != tf.float32:
                return function(a, b)
            return function(rounded(a), rounded(b))

        return of_gpu(a, b) if as_written else bilinear(of_gpu, a, b, short)

    monkeypatch.setattr(precision, "bilinear", product)
    if as_written:
        monkeypatch.setattr(precision, "rounded", lambda x: x)


def one_after_another(function, a, b, short=(False, False)):
    """A product of matrices as a GPU may add it up, in float32."""

    def added(products):
        return np.cumsum(products, -1, dtype="float32")[..., -1]

    return _added_by(added, function, a, b, short)


def all_in_order(function, a, b, short=(False, False)):
    """As `one_after_another`, of what norms follow from as well."""
    del short
    if function.func is not tf.matmul:
        return function(a, b)
    return one_after_another(function, a, b)


def every_other(function, a, b, short=(False, False)):
    """A product of matrices that adds up products in two sums, in turns."""

    def added(products):
        sums = [
            np.cumsum(products[..., k::2], -1, dtype="float32")[..., -1]
            for k in range(min(2, products.shape[-1]))
        ]
        return np.sum(sums, 0, dtype="float32")

    return _added_by(added, function, a, b, short)


def _added_by(added, function, a, b, short):
    if a.dtype != tf.float32 or all(short):
        # Sums of rows alone: what norms take may be traced for other tests.
        return function(a, b)
    assert function.func is tf.matmul
    if function.keywords["transpose_a"]:
        a = tf.linalg.matrix_transpose(a)
    if function.keywords["transpose_b"]:
        b = tf.linalg.matrix_transpose(b)
    b = tf.linalg.matrix_transpose(b)
    products = a[..., :, None, :] * b[..., None, :, :]
    total = tf.numpy_function(added, [products], tf.float32)
    return tf.ensure_shape(total, products.shape[:-1])


def merge_terms(monkeypatch):
    """Lets terms of all rows be added up, in whatever order."""
    monkeypatch.setattr(summation, "is_in_order", lambda *_: True)
