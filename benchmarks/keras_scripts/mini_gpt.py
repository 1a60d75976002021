"""Text: generation by a small GPT with a causal mask."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, integers


class Embeddings(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(vocab_size, embed_dim)
        self.pos_emb = layers.Embedding(maxlen, embed_dim)

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.token_emb(x) + self.pos_emb(positions)


def build():
    inputs = keras.Input((40,), dtype="int32")
    x = Embeddings(40, 1000, 64)(inputs)
    attention = layers.MultiHeadAttention(2, 64)
    y = layers.Dropout(0.1)(attention(x, x, use_causal_mask=True))
    x = layers.LayerNormalization(epsilon=1e-6)(x + y)
    y = layers.Dense(128, activation="relu")(x)
    y = layers.Dropout(0.1)(layers.Dense(64)(y))
    x = layers.LayerNormalization(epsilon=1e-6)(x + y)
    outputs = layers.Dense(1000)(x)
    return Script(
        keras.Model(inputs, outputs),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        integers(1000, 32, 40),
        integers(1000, 32, 40),
    )
