"""Image: ConvMixer, depthwise convolutions and batch normalisation."""

import keras
from keras import layers

import tf_dpsub
from benchmarks.keras_scripts.script import Script, floats, integers


def activation_block(x):
    x = layers.Activation("gelu")(x)
    return layers.BatchNormalization()(x)


def build():
    inputs = keras.Input((32, 32, 3))
    x = layers.Rescaling(scale=1.0 / 255)(inputs)
    x = activation_block(layers.Conv2D(64, kernel_size=2, strides=2)(x))
    for _ in range(3):
        x0 = x
        x = layers.DepthwiseConv2D(kernel_size=5, padding="same")(x)
        x = layers.Add()([activation_block(x), x0])
        x = activation_block(layers.Conv2D(64, kernel_size=1)(x))
    x = layers.GlobalAvgPool2D()(x)
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
    model = tf_dpsub.models.replace_batch_normalization(model)  # changed
    return Script(
        model,
        "sparse_categorical_crossentropy",
        255 * floats(64, 32, 32, 3),
        integers(10, 64),
    )
