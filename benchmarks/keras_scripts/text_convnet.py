"""Text: classification from scratch by one-dimensional convolutions."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, integers


def build():
    inputs = keras.Input((200,), dtype="int64")
    x = layers.Embedding(5000, 64)(inputs)
    x = layers.Dropout(0.5)(x)
    x = layers.Conv1D(64, 7, strides=3, activation="relu")(x)
    x = layers.Conv1D(64, 7, strides=3, activation="relu")(x)
    x = layers.GlobalMaxPooling1D()(x)
    x = layers.Dense(64, activation="relu")(x)
    x = layers.Dropout(0.5)(x)
    outputs = layers.Dense(1, activation="sigmoid")(x)
    return Script(
        keras.Model(inputs, outputs),
        "binary_crossentropy",
        integers(5000, 64, 200),
        integers(2, 64),
    )
