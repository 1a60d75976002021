"""Image: reading captchas, bidirectional LSTMs and CTC."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    inputs = keras.Input((48, 24, 1))
    x = layers.Conv2D(32, (3, 3), activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D((2, 2))(x)
    x = layers.Conv2D(64, (3, 3), activation="relu", padding="same")(x)
    x = layers.MaxPooling2D((2, 2))(x)
    x = layers.Reshape(target_shape=(12, 6 * 64))(x)
    x = layers.Dense(64, activation="relu")(x)
    x = layers.Dropout(0.2)(x)
    for units in (64, 32):
        x = layers.Bidirectional(
            layers.LSTM(units, return_sequences=True, dropout=0.25)
        )(x)
    outputs = layers.Dense(21)(x)
    return Script(
        keras.Model(inputs, outputs),
        keras.losses.CTC(),
        floats(32, 48, 24, 1),
        1 + integers(20, 32, 5),
    )
