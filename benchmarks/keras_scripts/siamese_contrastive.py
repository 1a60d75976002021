"""Image: siamese network with a contrastive loss of pairs."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


def euclidean_distance(vects):
    x, y = vects
    sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))


def contrastive_loss(y_true, y_pred):
    y_true = ops.cast(y_true, y_pred.dtype)
    square_pred = ops.square(y_pred)
    margin_square = ops.square(ops.maximum(1 - y_pred, 0))
    return ops.mean((1 - y_true) * square_pred + y_true * margin_square)


def build():
    inputs = keras.Input((28, 28, 1))
    x = layers.Conv2D(8, (5, 5), activation="tanh")(inputs)
    x = layers.AveragePooling2D(pool_size=(2, 2))(x)
    x = layers.Conv2D(16, (5, 5), activation="tanh")(x)
    x = layers.AveragePooling2D(pool_size=(2, 2))(x)
    x = layers.Dense(10, activation="tanh")(layers.Flatten()(x))
    tower = keras.Model(inputs, x)
    left, right = keras.Input((28, 28, 1)), keras.Input((28, 28, 1))
    distance = layers.Lambda(euclidean_distance, output_shape=(1,))
    merged = distance([tower(left), tower(right)])
    outputs = layers.Dense(1, activation="sigmoid")(merged)
    images = floats(64, 28, 28, 1)
    return Script(
        keras.Model([left, right], outputs),
        contrastive_loss,
        (images, images[::-1].copy()),
        integers(2, 64, 1),
    )
