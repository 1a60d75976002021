"""An example's rows may not move at all when the other examples do.

Whatever is proved, or run one example at a time, must give bit for bit the
same figures for one example while all its companions turn into NaN or grow by
a factor of 1e9, and their labels, tokens and masks are swapped.
"""

import numpy as np
import tensorflow as tf


def taint(inputs, i, factor):
    """Inputs with every example but `i` changed."""

    def others(t):
        values = t.numpy()
        changed = (
            values * factor if t.dtype.is_floating else np.roll(values, 1, 0)
        )
        changed[i] = values[i]
        return tf.constant(changed)

    return tf.nest.map_structure(others, inputs)


def assert_untouched(problem, step):
    """Checks a step of `model_zoo.traced` on tainted inputs."""
    for i in range(problem.batch):
        only_i = np.eye(problem.batch, dtype="float32")[i]
        clean = step(problem.inputs, only_i)
        assert clean.valid[i]
        for factor in np.float32("nan"), np.float32(1e9):
            tainted = step(taint(problem.inputs, i, factor), only_i)
            assert tainted.valid[i]
            np.testing.assert_array_equal(
                tainted.sq_norms[i], clean.sq_norms[i]
            )
            np.testing.assert_array_equal(
                tainted.sq_norm_bounds[i], clean.sq_norm_bounds[i]
            )
            for a, b in zip(tainted.sq_norms_of, clean.sq_norms_of):
                np.testing.assert_array_equal(a[i], b[i])
            for a, b in zip(tainted.rows, clean.rows):
                np.testing.assert_array_equal(a[i], b[i])
            for a, b in zip(tainted.weighted_sum, clean.weighted_sum):
                np.testing.assert_array_equal(a, b)
