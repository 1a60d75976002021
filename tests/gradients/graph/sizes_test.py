"""A row is the same function in batches of several sizes, or it is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub.gradients.graph import sizes, sources
from tf_dpsub.gradients.graph.states import Unproven
from tf_dpsub.gradients.tracing import trace

L = keras.layers
FEATURES = 16


def traced(function, size):
    """A loss of a function of `[batch, FEATURES]`, traced for a size."""
    made = []

    def loss(x):
        made.append(sizes.Traced(tf.reduce_sum(function(x), range(1, 2)), [x]))
        return made[-1].losses

    trace(loss, tf.TensorSpec([size, FEATURES]))
    return made[-1]


def require(function, pair=(16, 8), may_read=None):
    one, other = (traced(function, size) for size in pair)
    sizes.require_same_rows(one, other, may_read)


def require_of(model, pair=(16, 8)):
    model.build([None, FEATURES])
    seeds = [
        generator.state
        for layer in model._flatten_layers()
        for generator in layer._seed_generators
    ]
    weights = [v for v in model.variables if all(v is not s for s in seeds)]
    require(
        lambda x: model(x, training=True),
        pair,
        sources.Sources(weights, seeds),
    )


KERNEL = tf.Variable(np.ones([FEATURES, 4], "float32"))


def batch(x):
    return keras.ops.shape(x)[0]


HOSTILE = {
    "divides by the size": lambda x: x / tf.cast(batch(x), tf.float32),
    "the size as a shape tensor": lambda x: (
        x * tf.cast(tf.raw_ops.Shape(input=x)[0], tf.float32)
    ),
    "a sum of ones": lambda x: x * tf.reduce_sum(tf.ones([batch(x)])),
    "a sum of ones like the batch": lambda x: (
        x * tf.reduce_sum(tf.ones_like(x)[:, 0])
    ),
    "a sum of repeated weights": lambda x: (
        x * tf.reduce_sum(tf.repeat(KERNEL[:1, :1], batch(x), 0))
    ),
    "equal shares": lambda x: (
        x * tf.nn.softmax(tf.zeros([batch(x)]) * KERNEL[0, 0])[:, None]
    ),
    "a branch of Python": lambda x: x * 2 if batch(x) > 12 else x * 3,
    "a branch of the graph": lambda x: tf.cond(
        tf.reduce_sum(tf.ones([batch(x)])) > 12.0, lambda: x, lambda: 2 * x
    ),
    "features by the size": lambda x: x[:, batch(x) // 8 : batch(x) // 8 + 8],
    "fewer features": lambda x: x[:, : batch(x) // 4],
    "groups of features": lambda x: tf.reduce_max(
        tf.reshape(x, [batch(x), batch(x) // 4, -1])[:, :, :2], 2
    ),
    "a number of steps": lambda x: tf.while_loop(
        lambda i, _: i < batch(x), lambda i, h: (i + 1, h * 1.1), [0, x]
    )[1],
    "an attribute": lambda x: tf.raw_ops.LeakyRelu(
        features=x, alpha=1.0 / batch(x)
    ),
    "a gradient of its own": lambda x: by_size(x),
    "a gradient of its own in a loop": lambda x: tf.while_loop(
        lambda i, _: i < 2, lambda i, h: (i + 1, by_size(h)), [0, x]
    )[1],
    "the shape of a list's elements": lambda x: (
        x
        * tf.cast(
            tf.raw_ops.TensorListElementShape(
                input_handle=tf.raw_ops.TensorListReserve(
                    element_shape=tf.constant([batch(x)]),
                    num_elements=2,
                    element_dtype=tf.float32,
                ),
                shape_type=tf.int32,
            )[0],
            tf.float32,
        )
    ),
    "a last place": lambda x: x * tf.cast(tf.range(batch(x))[-1], tf.float32),
}


@tf.custom_gradient
def by_size(x):
    return tf.identity(x), lambda dy: dy / x.shape[0]


@pytest.mark.parametrize("name", HOSTILE)
def test_the_size_as_a_number_is_refused(name):
    with pytest.raises(Unproven):
        require(HOSTILE[name])


def test_what_is_kept_from_the_size_is_refused():
    count = tf.Variable(0.0)

    def counting(x):
        count.assign(float(batch(x)))
        return x * count

    with pytest.raises(Unproven, match="keeps what follows the size"):
        require(counting)


def attention():
    x = keras.Input((4, 4))
    return keras.Model(x, L.MultiHeadAttention(2, 2)(x, x))


MODELS = {
    "dense": lambda: keras.Sequential([L.Dense(4, "gelu"), L.Dropout(0.5)]),
    "convolution": lambda: keras.Sequential(
        [
            L.Reshape((4, 4, 1)),
            L.Conv2D(4, 2),
            L.GroupNormalization(2),
            L.MaxPool2D(),
            L.Conv2DTranspose(2, 2),
            L.Flatten(),
        ]
    ),
    "attention": lambda: keras.Sequential(
        [L.Reshape((4, 4)), attention(), L.LayerNormalization(), L.Flatten()]
    ),
    "recurrent": lambda: keras.Sequential([L.Reshape((4, 4)), L.LSTM(3)]),
    "recurrent, unrolled": lambda: keras.Sequential(
        [L.Reshape((4, 4)), L.LSTM(3, unroll=True)]
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_proved(name):
    require_of(MODELS[name]())


def test_sizes_that_features_have_are_told_apart():
    """A batch of as many examples as there are features."""
    require_of(MODELS["dense"](), (FEATURES, 4))
