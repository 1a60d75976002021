"""Image: one object and its box, focal and Huber losses of two outputs."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    inputs = keras.Input((48, 48, 3))
    x = inputs
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    model = keras.Model(
        inputs,
        {
            "found": layers.Dense(1, activation="sigmoid", name="found")(x),
            "box": layers.Dense(4, name="box")(x),
        },
    )
    return Script(
        model,
        {"found": keras.losses.BinaryFocalCrossentropy(), "box": "huber"},
        floats(64, 48, 48, 3),
        {"found": integers(2, 64, 1), "box": floats(64, 4)},
    )
