"""Tabular: rare frauds, a weight for each class."""

import keras
import numpy as np
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    model = keras.Sequential(
        [
            keras.Input((29,)),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(256, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    y = integers(20, 512, 1) == 0
    return Script(
        model,
        "binary_crossentropy",
        floats(512, 29),
        y.astype("float32"),
        np.where(y[:, 0], 1.0, 0.05).astype("float32"),  # changed
    )
