"""Time series: anomalies by a convolutional autoencoder."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats


def build():
    settings = {"kernel_size": 7, "padding": "same", "strides": 2}
    model = keras.Sequential(
        [
            keras.Input((288, 1)),
            layers.Conv1D(32, activation="relu", **settings),
            layers.Dropout(rate=0.2),
            layers.Conv1D(16, activation="relu", **settings),
            layers.Conv1DTranspose(16, activation="relu", **settings),
            layers.Dropout(rate=0.2),
            layers.Conv1DTranspose(32, activation="relu", **settings),
            layers.Conv1DTranspose(1, kernel_size=7, padding="same"),
        ]
    )
    series = floats(64, 288, 1)
    return Script(model, "mse", series, series)
