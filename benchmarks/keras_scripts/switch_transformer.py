"""Text: switch transformer, whose experts have room for so many tokens."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, integers


class Switch(layers.Layer):
    def __init__(self, num_experts, embed_dim, tokens_per_batch):
        super().__init__()
        self.num_experts = num_experts
        self.experts = [
            keras.Sequential(
                [layers.Dense(64, activation="relu"), layers.Dense(embed_dim)]
            )
            for _ in range(num_experts)
        ]
        self.router = layers.Dense(num_experts)
        self.capacity = tokens_per_batch // num_experts

    def call(self, inputs):
        dim = inputs.shape[-1]
        tokens = ops.reshape(inputs, (-1, dim))
        probabilities = ops.softmax(self.router(tokens))
        gate, index = ops.max(probabilities, -1), ops.argmax(probabilities, -1)
        chosen = ops.one_hot(index, self.num_experts)
        # Who comes first has a place.
        position = ops.cumsum(chosen, axis=0) * chosen
        chosen = chosen * ops.cast(
            ops.less_equal(position, self.capacity), chosen.dtype
        )
        outputs = sum(
            expert(tokens) * chosen[:, i : i + 1]
            for i, expert in enumerate(self.experts)
        )
        outputs = outputs * ops.expand_dims(gate, -1)
        return ops.reshape(outputs, ops.shape(inputs))


def build():
    inputs = keras.Input((40,), dtype="int32")
    x = layers.Embedding(2000, 32)(inputs)
    x = layers.LayerNormalization()(
        x + layers.MultiHeadAttention(2, key_dim=16)(x, x)
    )
    x = layers.LayerNormalization()(x + Switch(4, 32, 32 * 40)(x))
    x = layers.GlobalAveragePooling1D()(x)
    outputs = layers.Dense(2, activation="softmax")(x)
    return Script(
        keras.Model(inputs, outputs),
        "sparse_categorical_crossentropy",
        integers(2000, 32, 40),
        integers(2, 32),
    )
