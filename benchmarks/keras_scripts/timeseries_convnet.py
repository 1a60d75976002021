"""Time series: classification from scratch."""

import keras
from keras import layers

import tf_dpsub
from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    inputs = keras.Input((200, 1))
    x = inputs
    for _ in range(3):
        x = layers.Conv1D(filters=64, kernel_size=3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU()(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    model = tf_dpsub.models.replace_batch_normalization(model)  # changed
    return Script(
        model,
        "sparse_categorical_crossentropy",
        floats(32, 200, 1),
        integers(2, 32),
    )
