"""Time series: dilated causal convolutions with residuals (TCN)."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats


def build():
    inputs = keras.Input((128, 4))
    x = layers.Conv1D(32, 1)(inputs)
    for dilation in (1, 2, 4, 8):
        y = x
        for _ in range(2):
            y = layers.Conv1D(32, 3, padding="causal", dilation_rate=dilation)(
                y
            )
            y = layers.LayerNormalization()(y)
            y = layers.SpatialDropout1D(0.1)(layers.ReLU()(y))
        x = layers.Add()([x, y])
    outputs = layers.Dense(12)(x[:, -1])
    return Script(
        keras.Model(inputs, outputs),
        keras.losses.MeanAbsoluteError(),
        floats(64, 128, 4),
        floats(64, 12),
    )
