"""Image: vision transformer with augmentation and custom layers."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


class Patches(layers.Layer):
    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        patches = ops.image.extract_patches(images, size=self.patch_size)
        return ops.reshape(patches, (-1, 64, 4 * 4 * 3))


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(dim)
        self.position_embedding = layers.Embedding(num_patches, dim)

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(self.num_patches), axis=0)
        return self.projection(patch) + self.position_embedding(positions)


def mlp(x, units):
    for n in units:
        x = layers.Dense(n, activation=keras.activations.gelu)(x)
        x = layers.Dropout(0.1)(x)
    return x


def build():
    inputs = keras.Input((32, 32, 3))
    augmentation = keras.Sequential(
        [
            layers.RandomFlip("horizontal"),
            layers.RandomRotation(factor=0.02),
            layers.RandomZoom(height_factor=0.2, width_factor=0.2),
        ],
    )
    x = augmentation(inputs)
    x = PatchEncoder(64, 48)(Patches(4)(x))
    for _ in range(2):
        x1 = layers.LayerNormalization(epsilon=1e-6)(x)
        attention = layers.MultiHeadAttention(4, key_dim=48, dropout=0.1)
        x2 = layers.Add()([attention(x1, x1), x])
        x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
        x = layers.Add()([mlp(x3, [96, 48]), x2])
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Dropout(0.5)(layers.Flatten()(x))
    outputs = layers.Dense(100)(mlp(x, [256, 128]))
    return Script(
        keras.Model(inputs, outputs),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        floats(64, 32, 32, 3),
        integers(100, 64, 1),
    )
