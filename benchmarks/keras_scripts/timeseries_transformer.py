"""Time series: classification by a transformer encoder."""

import keras
from keras import layers

from benchmarks.keras_scripts.script import Script, floats, integers


def transformer_encoder(inputs, head_size, num_heads, ff_dim, dropout):
    x = layers.MultiHeadAttention(
        key_dim=head_size, num_heads=num_heads, dropout=dropout
    )(inputs, inputs)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Dropout(dropout)(x))
    res = x + inputs
    x = layers.Conv1D(ff_dim, kernel_size=1, activation="relu")(res)
    x = layers.Conv1D(inputs.shape[-1], kernel_size=1)(layers.Dropout(0.1)(x))
    return layers.LayerNormalization(epsilon=1e-6)(x) + res


def build():
    inputs = keras.Input((100, 4))
    x = inputs
    for _ in range(2):
        x = transformer_encoder(x, 32, 4, 4, 0.25)
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    x = layers.Dropout(0.4)(layers.Dense(128, activation="relu")(x))
    outputs = layers.Dense(2, activation="softmax")(x)
    return Script(
        keras.Model(inputs, outputs),
        "sparse_categorical_crossentropy",
        floats(64, 100, 4),
        integers(2, 64),
    )
