"""Time series: weather forecasting by an LSTM."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats


def build():
    inputs = keras.Input((120, 7))
    outputs = layers.Dense(1)(layers.LSTM(32)(inputs))
    return Script(
        keras.Model(inputs, outputs), "mse", floats(128, 120, 7), floats(128, 1)
    )
