"""What follows the noise reads no private result."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import loss
from tf_dpsub import optimizers
from tf_dpsub.gradients import ReadsState

ROWS = 20
X = np.zeros((ROWS, 5), "float32")
Y = np.zeros(ROWS, int)


def private(rate=1.0, metrics=(), **of_kernel):
    model = tf_dpsub.make_private(
        keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(3, **of_kernel)]
        )
    )
    optimizer = optimizers.DPSGD(
        keras.optimizers.SGD(rate),
        noise_multiplier=1.0,
        l2_norm_clip=1.0,
        batch_size=ROWS,
    )
    model.compile(optimizer, loss(), metrics=list(metrics))
    return model


class Regularizer(keras.regularizers.Regularizer):
    def __init__(self, read):
        self.read = read

    def __call__(self, weights):
        return self.read() * tf.reduce_sum(weights)


class Constraint(keras.constraints.Constraint):
    def __init__(self, read):
        self.read = read

    def __call__(self, weights):
        return weights * self.read()


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, read):
        self.read = read

    def __call__(self, step):
        return tf.cast(self.read(), tf.float32)

    def get_config(self):
        return {}


USES = {
    "regularizer": lambda read: {"kernel_regularizer": Regularizer(read)},
    "constraint": lambda read: {"kernel_constraint": Constraint(read)},
    "schedule": lambda read: {"rate": Schedule(read)},
}


@pytest.mark.parametrize("use", USES)
def test_a_metric_is_not_read(use):
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    arguments = USES[use](lambda: accuracy.total.value)
    model = private(metrics=[accuracy], **arguments)
    with pytest.raises(ReadsState, match="a metric, say"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("use", USES)
def test_python_functions_are_refused(use):
    """They may read whatever there is."""

    def read():
        number = tf.py_function(lambda: np.float32(1.0), [], tf.float32)
        return tf.ensure_shape(number, [])

    model = private(**USES[use](read))
    with pytest.raises(ReadsState, match="runs a Python function"):
        model.fit(X, Y, verbose=0)


def test_what_eager_steps_read_is_an_assumption():
    model = private()
    assert "in eager steps" not in str(entry_of(model))
    model.compile(model.optimizer, loss(), run_eagerly=True)
    assert "in eager steps" in str(entry_of(model))


def entry_of(model):
    model.fit(X, Y, verbose=0)
    return model.ledger.entries[-1]


@pytest.mark.parametrize("use", USES)
def test_weights_and_numbers_are_read(use):
    model = private(**USES[use](lambda: 0.5))
    model.fit(X, Y, verbose=0)
    assert model.ledger.steps == 1
