"""Image: a convnet in mixed precision."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.Conv2D(32, 3, strides=2, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10, dtype="float32"),
            ]
        )
    finally:
        keras.mixed_precision.set_global_policy(before)
    return Script(
        model,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        floats(64, 32, 32, 3),
        integers(10, 64),
    )
