"""Recommendation: a transformer of what a user did before."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


def build():
    movies = keras.Input((8,), dtype="int32", name="movies")
    ratings = keras.Input((8,), name="ratings")
    target = keras.Input((1,), dtype="int32", name="target")
    embedding = layers.Embedding(1000, 32)
    position = layers.Embedding(8, 32)(ops.arange(8))
    sequence = (embedding(movies) + position) * ops.expand_dims(ratings, -1)
    x = layers.Concatenate(axis=1)([sequence, embedding(target)])
    y = layers.MultiHeadAttention(3, key_dim=32, dropout=0.1)(x, x)
    x1 = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(y)]))
    x2 = layers.Dense(32)(layers.LeakyReLU()(x1))
    x = layers.LayerNormalization()(layers.Add()([x1, x2]))
    x = layers.Flatten()(x)
    for units in (256, 128):
        x = layers.Dense(units)(x)
        x = layers.LeakyReLU()(layers.LayerNormalization()(x))
        x = layers.Dropout(0.1)(x)
    model = keras.Model([movies, ratings, target], layers.Dense(1)(x))
    return Script(
        model,
        keras.losses.MeanSquaredError(),
        (integers(1000, 128, 8), floats(128, 8), integers(1000, 128, 1)),
        floats(128, 1),
    )
