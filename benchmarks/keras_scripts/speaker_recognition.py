"""Audio: speakers by residual one-dimensional convolutions."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


def residual_block(x, filters, conv_num=3, activation="relu"):
    s = layers.Conv1D(filters, 1, padding="same")(x)
    for _ in range(conv_num - 1):
        x = layers.Conv1D(filters, 3, padding="same")(x)
        x = layers.Activation(activation)(x)
    x = layers.Conv1D(filters, 3, padding="same")(x)
    x = layers.Activation(activation)(layers.Add()([x, s]))
    return layers.MaxPool1D(pool_size=2, strides=2)(x)


def build():
    inputs = keras.Input((512, 1))
    x = residual_block(inputs, 16, 2)
    x = residual_block(x, 32, 2)
    x = residual_block(x, 64, 3)
    x = layers.AveragePooling1D(pool_size=3, strides=3)(x)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    outputs = layers.Dense(5, activation="softmax")(x)
    return Script(
        keras.Model(inputs, outputs),
        "sparse_categorical_crossentropy",
        floats(32, 512, 1),
        integers(5, 32),
    )
