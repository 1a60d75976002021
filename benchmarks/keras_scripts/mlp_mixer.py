"""Image: MLP-Mixer, layers with models inside."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


class MLPMixerLayer(layers.Layer):
    def __init__(self, num_patches, hidden_units, dropout_rate):
        super().__init__()
        self.mlp1 = keras.Sequential(
            [
                layers.Dense(units=num_patches, activation="gelu"),
                layers.Dense(units=num_patches),
                layers.Dropout(rate=dropout_rate),
            ]
        )
        self.mlp2 = keras.Sequential(
            [
                layers.Dense(units=hidden_units, activation="gelu"),
                layers.Dense(units=hidden_units),
                layers.Dropout(rate=dropout_rate),
            ]
        )
        self.normalize = layers.LayerNormalization(epsilon=1e-6)

    def build(self, input_shape):
        self.built = True

    def call(self, inputs):
        x = self.normalize(inputs)
        x_channels = ops.transpose(x, axes=(0, 2, 1))
        mlp1_outputs = self.mlp1(x_channels)
        x = ops.transpose(mlp1_outputs, axes=(0, 2, 1)) + inputs
        return x + self.mlp2(self.normalize(x))


def build():
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(64, kernel_size=4, strides=4)(inputs)
    x = layers.Reshape((64, 64))(x)
    blocks = keras.Sequential([MLPMixerLayer(64, 64, 0.2) for _ in range(3)])
    x = layers.GlobalAveragePooling1D()(blocks(x))
    x = layers.Dropout(rate=0.2)(x)
    model = keras.Model(inputs, layers.Dense(100, activation="softmax")(x))
    return Script(
        model,
        "sparse_categorical_crossentropy",
        floats(64, 32, 32, 3),
        integers(100, 64),
    )
