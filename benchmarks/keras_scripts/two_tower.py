"""Recommendation: two towers, ratings of users and movies."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


def tower(rows, name):
    return keras.Sequential(
        [
            keras.Input((), dtype="int32"),
            layers.Embedding(rows, 32),
            layers.Dense(64, activation="relu"),
            layers.Dense(32),
            layers.UnitNormalization(),
        ],
        name=name,
    )


def build():
    user, movie = (
        keras.Input((), dtype="int32", name=name) for name in ("user", "movie")
    )
    rating = layers.Dot(axes=1)(
        [tower(1000, "users")(user), tower(1500, "movies")(movie)]
    )
    model = keras.Model({"user": user, "movie": movie}, rating)
    return Script(
        model,
        keras.losses.MeanSquaredError(),
        {"user": integers(1000, 256), "movie": integers(1500, 256)},
        floats(256, 1),
    )
