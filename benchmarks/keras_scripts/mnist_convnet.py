"""Image: simple MNIST convnet."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, one_hot


def build():
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, (3, 3), activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Conv2D(64, (3, 3), activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )
    return Script(
        model,
        "categorical_crossentropy",
        floats(64, 28, 28, 1),
        one_hot(10, 64),
    )
