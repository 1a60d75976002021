"""Tabular: TabTransformer, attention between columns."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    categories = keras.Input((8,), dtype="int32")
    numbers = keras.Input((5,))
    x = layers.Embedding(100, 16)(categories)
    x = x + layers.Embedding(8, 16)(ops.arange(8))
    for _ in range(3):
        y = layers.MultiHeadAttention(4, key_dim=16, dropout=0.2)(x, x)
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([y, x]))
        y = layers.Dense(16, activation="gelu")(x)
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([y, x]))
    x = layers.Concatenate()(
        [layers.Flatten()(x), layers.LayerNormalization()(numbers)]
    )
    for units in (128, 64):
        x = layers.Dense(units, activation="selu")(layers.Dropout(0.2)(x))
    outputs = layers.Dense(1, activation="sigmoid")(x)
    return Script(
        keras.Model([categories, numbers], outputs),
        "binary_crossentropy",
        (integers(100, 128, 8), floats(128, 5)),
        integers(2, 128, 1),
    )
