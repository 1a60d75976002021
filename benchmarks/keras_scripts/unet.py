"""Image: segmentation by a U-Net-like network, a class for each pixel."""

import keras
from keras import layers

import tf_dpsub
from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    inputs = keras.Input((48, 48, 3))
    x = layers.Conv2D(32, 3, strides=2, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    previous = x
    for filters in (32, 64):
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(filters, 1, strides=2, padding="same")
        x = layers.add([x, residual(previous)])
        previous = x
    for filters in (64, 32, 16):
        x = layers.Activation("relu")(x)
        x = layers.Conv2DTranspose(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.UpSampling2D(2)(x)
        residual = layers.UpSampling2D(2)(previous)
        residual = layers.Conv2D(filters, 1, padding="same")(residual)
        x = layers.add([x, residual])
        previous = x
    outputs = layers.Conv2D(3, 3, activation="softmax", padding="same")(x)
    model = keras.Model(inputs, outputs)
    model = tf_dpsub.models.replace_batch_normalization(model)  # changed
    return Script(
        model,
        "sparse_categorical_crossentropy",
        floats(32, 48, 48, 3),
        integers(3, 32, 48, 48),
    )
