"""Audio: speech commands, a spectrogram inside of the model."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    inputs = keras.Input((2000, 1))
    # `MelSpectrogram` scales by the maximum of the batch.
    x = layers.STFTSpectrogram(  # changed
        frame_length=256, frame_step=100, fft_length=256
    )(inputs)
    x = layers.Reshape((*x.shape[1:], 1))(x)
    x = layers.Resizing(32, 32)(x)
    x = layers.Conv2D(16, 3, activation="relu")(x)
    x = layers.Conv2D(32, 3, activation="relu")(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.25)(x)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    outputs = layers.Dense(8)(layers.Dropout(0.5)(x))
    return Script(
        keras.Model(inputs, outputs),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        floats(32, 2000, 1),
        integers(8, 32),
    )
