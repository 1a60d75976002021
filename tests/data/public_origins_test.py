import gc

import keras
import numpy as np

from tf_dpsub.data import public_origins


def _model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def test_origins_are_those_of_a_models_weights():
    first, second = _model(), _model()
    public_origins.remember(np.ones((3, 2)), first.weights, "that are made")
    (origin,) = public_origins.origins_of(first)
    assert (origin.examples, origin.purpose) == (3, "that are made")
    assert not public_origins.origins_of(second)
    outer = keras.Sequential([keras.Input((2,)), first])
    assert public_origins.origins_of(outer) == [origin]


def test_inputs_are_those_of_the_time():
    model, inputs = _model(), np.ones((3, 2))
    public_origins.remember(inputs, model.weights, "that are made")
    inputs *= 2
    (origin,) = public_origins.origins_of(model)
    np.testing.assert_array_equal(origin.inputs, np.ones((3, 2)))


def test_weights_that_are_gone_are_forgotten():
    kernel = keras.Variable(np.ones(2))
    public_origins.remember(np.ones((3, 2)), [kernel], "of what is gone")
    del kernel
    gc.collect()
    other = _model()
    public_origins.remember(np.ones((1, 2)), other.weights, "that are made")
    purposes = [origin.purpose for origin in public_origins._origins]
    assert "of what is gone" not in purposes
