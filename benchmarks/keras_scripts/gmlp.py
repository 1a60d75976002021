"""Image: gMLP, a spatial gating unit."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


class GMLPLayer(layers.Layer):
    def __init__(self, num_patches, embedding_dim):
        super().__init__()
        self.channel_projection1 = layers.Dense(
            embedding_dim * 2, activation="gelu"
        )
        self.channel_projection2 = layers.Dense(embedding_dim)
        self.spatial_projection = layers.Dense(
            num_patches, bias_initializer="Ones"
        )
        self.normalize1 = layers.LayerNormalization(epsilon=1e-6)
        self.normalize2 = layers.LayerNormalization(epsilon=1e-6)

    def spatial_gating_unit(self, x):
        u, v = ops.split(x, indices_or_sections=2, axis=2)
        v = ops.transpose(self.normalize2(v), axes=(0, 2, 1))
        v = ops.transpose(self.spatial_projection(v), axes=(0, 2, 1))
        return u * v

    def call(self, inputs):
        x = self.channel_projection1(self.normalize1(inputs))
        x = self.channel_projection2(self.spatial_gating_unit(x))
        return x + inputs


def build():
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(64, kernel_size=4, strides=4)(inputs)
    x = layers.Reshape((64, 64))(x)
    for _ in range(3):
        x = GMLPLayer(64, 64)(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(100)(x))
    return Script(
        model,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        floats(64, 32, 32, 3),
        integers(100, 64),
    )
