"""Image: super-resolution by an efficient sub-pixel CNN."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats


class DepthToSpace(layers.Layer):
    def __init__(self, block_size):
        super().__init__()
        self.block_size = block_size

    def call(self, inputs):
        batch, height, width, depth = ops.shape(inputs)
        depth = depth // (self.block_size**2)
        x = ops.reshape(
            inputs,
            [batch, height, width, self.block_size, self.block_size, depth],
        )
        x = ops.transpose(x, [0, 1, 3, 2, 4, 5])
        return ops.reshape(
            x, [batch, height * self.block_size, width * self.block_size, depth]
        )


def build():
    settings = {"activation": "relu", "padding": "same"}
    inputs = keras.Input((24, 24, 1))
    x = layers.Conv2D(32, 5, **settings)(inputs)
    x = layers.Conv2D(32, 3, **settings)(x)
    x = layers.Conv2D(16, 3, **settings)(x)
    x = layers.Conv2D(9, 3, **settings)(x)
    model = keras.Model(inputs, DepthToSpace(3)(x))
    return Script(
        model,
        keras.losses.MeanSquaredError(),
        floats(32, 24, 24, 1),
        floats(32, 72, 72, 1),
    )
