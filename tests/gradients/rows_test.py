"""Arithmetic on tensors whose axis 0 is the batch."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub.gradients.rows import add_in_order


@pytest.fixture
def unchanged_graphs():
    """Runs graphs unoptimized, so that AddN may choose its order."""
    options = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )
    yield
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": False, **options}
    )


@pytest.mark.parametrize("count", [3, 9])
def test_a_sum_has_one_order_whoever_reads_its_terms(unchanged_graphs, count):
    rng = np.random.default_rng(0)
    shape = [count, 2000]
    terms = list(
        tf.constant(10 ** rng.normal(size=shape) * rng.normal(size=shape))
    )
    terms = [tf.cast(t, tf.float32) for t in terms]

    @tf.function
    def alone(*terms):
        terms = [*terms[:-1], tf.sin(terms[-1])]
        return add_in_order(terms), 0

    @tf.function
    def shared(*terms):
        terms = [*terms[:-1], tf.sin(terms[-1])]
        return add_in_order(terms), terms[-1]

    np.testing.assert_array_equal(alone(*terms)[0], shared(*terms)[0])
