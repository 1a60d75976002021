"""Text: sequences of many lengths, masked, by a GRU."""

import keras
import numpy as np
from keras import layers

from benchmarks.keras_scripts.script import Script, integers


def build():
    model = keras.Sequential(
        [
            keras.Input((40,), dtype="int32"),
            layers.Embedding(2000, 32, mask_zero=True),
            layers.GRU(48),
            layers.Dense(4, activation="softmax"),
        ]
    )
    lengths = 5 + integers(35, 64, 1)
    tokens = 1 + integers(1999, 64, 40)
    return Script(
        model,
        "sparse_categorical_crossentropy",
        np.where(np.arange(40) < lengths, tokens, 0),
        integers(4, 64),
    )
