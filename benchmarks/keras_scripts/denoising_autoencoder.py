"""Image: convolutional autoencoder for denoising."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats


def build():
    inputs = keras.Input((28, 28, 1))
    x = layers.Conv2D(32, (3, 3), activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D((2, 2), padding="same")(x)
    x = layers.Conv2D(32, (3, 3), activation="relu", padding="same")(x)
    x = layers.MaxPooling2D((2, 2), padding="same")(x)
    for _ in range(2):
        x = layers.Conv2DTranspose(
            32, (3, 3), strides=2, activation="relu", padding="same"
        )(x)
    x = layers.Conv2D(1, (3, 3), activation="sigmoid", padding="same")(x)
    images = floats(64, 28, 28, 1)
    return Script(keras.Model(inputs, x), "binary_crossentropy", images, images)
