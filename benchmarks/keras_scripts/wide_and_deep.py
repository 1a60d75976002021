"""Tabular: wide and deep, lookups, encodings and normalisation inside."""

import keras
import numpy as np
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers

KINDS = {"work": ("private", "public", "none"), "sex": ("f", "m")}


def build():
    inputs, wide, deep = {}, [], []
    for name in ("age", "hours", "gain", "loss"):
        inputs[name] = keras.Input((1,), name=name)
        normalization = layers.Normalization(mean=0.5, variance=0.1)
        deep.append(normalization(inputs[name]))
    for name, kinds in KINDS.items():
        inputs[name] = keras.Input((1,), name=name, dtype="string")
        lookup = layers.StringLookup(vocabulary=kinds)
        index = lookup(inputs[name])
        size = lookup.vocabulary_size()
        wide.append(layers.CategoryEncoding(size, "one_hot")(index))
        deep.append(layers.Flatten()(layers.Embedding(size, 8)(index)))
    wide = layers.Dense(32, activation="relu")(layers.Concatenate()(wide))
    deep = layers.Concatenate()(deep)
    for units in (128, 64):
        deep = layers.Dense(units, activation="relu")(deep)
        deep = layers.Dropout(0.1)(deep)
    outputs = layers.Dense(1, activation="sigmoid")(
        layers.Concatenate()([wide, deep])
    )
    numbers = floats(256, 4)
    x = {n: numbers[:, i : i + 1] for i, n in enumerate(list(inputs)[:4])}
    for name, kinds in KINDS.items():
        x[name] = np.array(kinds)[integers(len(kinds), 256, 1)]
    return Script(
        keras.Model(inputs, outputs),
        keras.losses.BinaryCrossentropy(),
        x,
        integers(2, 256, 1),
    )
