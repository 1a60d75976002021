"""Generative: PixelCNN, convolutions with masked kernels."""

import keras
import numpy as np
from keras import layers

from benchmarks.keras_scripts.script import Script, floats


class PixelConvLayer(layers.Layer):
    def __init__(self, mask_type, **kwargs):
        super().__init__()
        self.mask_type = mask_type
        self.conv = layers.Conv2D(**kwargs)

    def build(self, input_shape):
        self.conv.build(input_shape)
        height, width, *rest = self.conv.kernel.shape
        self.mask = np.zeros((height, width, *rest), "float32")
        self.mask[: height // 2] = 1.0
        self.mask[height // 2, : width // 2] = 1.0
        if self.mask_type == "B":
            self.mask[height // 2, width // 2] = 1.0

    def call(self, inputs):
        # As `conv(inputs)` of a kernel that is masked each time.
        return (
            keras.ops.conv(
                inputs,
                self.conv.kernel * self.mask,
                padding="same",
            )
            + self.conv.bias
        )


def build():
    inputs = keras.Input((28, 28, 1))
    x = PixelConvLayer(mask_type="A", filters=32, kernel_size=7)(inputs)
    x = layers.ReLU()(x)
    for _ in range(2):
        y = layers.ReLU()(layers.Conv2D(32, 1)(x))
        y = PixelConvLayer(mask_type="B", filters=32, kernel_size=3)(y)
        x = layers.add([x, layers.ReLU()(y)])
    outputs = layers.Conv2D(1, 1, activation="sigmoid")(x)
    images = floats(32, 28, 28, 1).round()
    return Script(
        keras.Model(inputs, outputs), "binary_crossentropy", images, images
    )
