"""A GPU that rounds operands of float32 products, without one."""

import tensorflow as tf

from tf_dpsub.gradients import precision


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
