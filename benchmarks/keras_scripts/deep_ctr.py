"""Recommendation: click-through rates by a deep and cross network."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


class Cross(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(shape[0][-1])
        self.dense.build(shape[1])

    def call(self, inputs):
        x0, x = inputs
        return x0 * self.dense(x) + x


def build():
    ids = keras.Input((10,), dtype="int32")
    numbers = keras.Input((6,))
    x = layers.Flatten()(layers.Embedding(2000, 16)(ids))
    x0 = layers.Concatenate()([x, numbers])
    cross, deep = x0, x0
    for _ in range(2):
        cross = Cross()([x0, cross])
    for units in (128, 64):
        deep = layers.Dense(units, activation="relu")(deep)
    x = layers.Concatenate()([cross, deep])
    outputs = layers.Dense(1, activation="sigmoid")(x)
    return Script(
        keras.Model([ids, numbers], outputs),
        "binary_crossentropy",
        (integers(2000, 256, 10), floats(256, 6)),
        integers(2, 256, 1),
    )
