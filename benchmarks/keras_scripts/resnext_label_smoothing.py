"""Image: ResNeXt blocks, grouped convolutions and label smoothing."""

import keras
from keras import layers

import tf_dpsub
from benchmarks.keras_scripts.script import Script, floats, one_hot


def block(x, filters):
    y = layers.Conv2D(filters, 1, use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.Conv2D(filters, 3, padding="same", groups=8, use_bias=False)(y)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.Conv2D(x.shape[-1], 1, use_bias=False)(y)
    return layers.ReLU()(x + layers.BatchNormalization()(y))


def build():
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(64, 3, strides=2, padding="same")(inputs)
    for _ in range(2):
        x = block(x, 32)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(10)(x))
    model = tf_dpsub.models.replace_batch_normalization(model)  # changed
    loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.1
    )
    return Script(model, loss, floats(64, 32, 32, 3), one_hot(10, 64))
