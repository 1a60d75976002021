"""Text: sequence to sequence learning for adding numbers."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, integers, one_hot


def build():
    model = keras.Sequential(
        [
            keras.Input((7, 12)),
            layers.LSTM(64),
            layers.RepeatVector(4),
            layers.LSTM(64, return_sequences=True),
            layers.Dense(12, activation="softmax"),
        ]
    )
    return Script(
        model,
        "sparse_categorical_crossentropy",
        one_hot(12, 64, 7),
        integers(12, 64, 4),
    )
