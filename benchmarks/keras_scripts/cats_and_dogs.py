"""Image: classification from scratch, augmentation and a binary head."""

import keras
from keras import layers

import tf_dpsub
from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    inputs = keras.Input((48, 48, 3))
    x = layers.RandomFlip("horizontal")(inputs)
    x = layers.RandomRotation(0.1)(x)
    x = layers.Rescaling(1.0 / 255)(x)
    x = layers.Conv2D(32, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    previous = x
    for size in (64, 96):
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(size, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(size, 1, strides=2, padding="same")(previous)
        x = layers.add([x, residual])
        previous = x
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.25)(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model = tf_dpsub.models.replace_batch_normalization(model)  # changed
    return Script(
        model,
        keras.losses.BinaryCrossentropy(from_logits=True),
        255 * floats(64, 48, 48, 3),
        integers(2, 64),
    )
