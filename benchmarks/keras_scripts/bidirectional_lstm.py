"""Text: bidirectional LSTMs on reviews, a binary head."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, integers


def build():
    inputs = keras.Input(shape=(60,), dtype="int32")
    x = layers.Embedding(5000, 64)(inputs)
    x = layers.Bidirectional(layers.LSTM(32, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(32))(x)
    outputs = layers.Dense(1, activation="sigmoid")(x)
    return Script(
        keras.Model(inputs, outputs),
        "binary_crossentropy",
        integers(5000, 64, 60),
        integers(2, 64),
    )
