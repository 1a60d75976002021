"""Time series: the next frame of a video by ConvLSTM."""

import keras
from keras import layers

import tf_dpsub
from benchmarks.keras_scripts.script import Script, floats


def build():
    inputs = keras.Input((6, 16, 16, 1))
    x = layers.ConvLSTM2D(
        16, (5, 5), padding="same", return_sequences=True, activation="relu"
    )(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.ConvLSTM2D(
        16, (3, 3), padding="same", return_sequences=True, activation="relu"
    )(x)
    x = layers.Conv3D(1, (3, 3, 3), activation="sigmoid", padding="same")(x)
    model = keras.Model(inputs, x)
    model = tf_dpsub.models.replace_batch_normalization(model)  # changed
    frames = floats(16, 7, 16, 16, 1)
    return Script(model, "binary_crossentropy", frames[:, :-1], frames[:, 1:])
