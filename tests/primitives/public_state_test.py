"""State that tells nothing about private data: none, seeds and refreshes."""

import keras
import pytest
import tensorflow as tf

from tf_dpsub.primitives.public_state import (
    PublicState,
    assign_if,
    public_variable,
    seed_variable,
)


def test_by_default_there_is_none():
    optimizer, state = keras.optimizers.SGD(), PublicState()
    count = len(optimizer.variables)
    state.build(optimizer)
    assert len(optimizer.variables) == count
    assert state.is_public and state.is_compilable
    assert not state.allow_private
    assert state.public_inputs is None
    assert state.notes == ()


class TestSeed:
    def test_is_saved_with_the_optimizer(self):
        optimizer = keras.optimizers.SGD()
        seed = seed_variable(optimizer, 7)
        assert any(v is seed for v in optimizer.variables)
        assert int(seed.numpy()) == 7

    def test_is_fresh_where_none_is_given(self):
        optimizer = keras.optimizers.SGD()
        # Alike with probability 2^-62.
        first, second = (seed_variable(optimizer, None) for _ in range(2))
        assert int(first.numpy()) != int(second.numpy())


@pytest.mark.parametrize("is_traced", [False, True])
def test_values_are_assigned_where_a_refresh_is_due(is_traced):
    variables = [public_variable([2]), public_variable([], tf.int64)]

    def refresh(due):
        assign_if(
            due, variables, lambda: [tf.ones([2]), tf.constant(3, "int64")]
        )

    if is_traced:
        refresh = tf.function(refresh, autograph=False)
    for due, expected in ((False, ([0, 0], 0)), (True, ([1, 1], 3))):
        refresh(tf.constant(due))
        assert variables[0].numpy().tolist() == expected[0]
        assert int(variables[1].numpy()) == expected[1]
