"""Text: named entities, a subclassed model and a loss with a mask."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, integers


class NERModel(keras.Model):
    def __init__(self, num_tags, vocab_size, maxlen, dim):
        super().__init__()
        self.token_emb = layers.Embedding(vocab_size, dim)
        self.pos_emb = layers.Embedding(maxlen, dim)
        self.att = layers.MultiHeadAttention(4, key_dim=dim)
        self.norm1 = layers.LayerNormalization(epsilon=1e-6)
        self.dense = layers.Dense(64, activation="relu")
        self.norm2 = layers.LayerNormalization(epsilon=1e-6)
        self.back = layers.Dense(dim)
        self.dropout = layers.Dropout(0.1)
        self.ff_final = layers.Dense(num_tags, activation="softmax")

    def call(self, inputs, training=False):
        x = self.token_emb(inputs) + self.pos_emb(ops.arange(inputs.shape[1]))
        x = self.norm1(x + self.att(x, x))
        x = self.norm2(x + self.back(self.dense(x)))
        x = self.dropout(x, training=training)
        return self.ff_final(x)


class CustomNonPaddingTokenLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        loss = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        mask = ops.cast(y_true > 0, dtype="float32")
        loss = loss * mask
        return ops.sum(loss) / (ops.sum(mask) + 1e-7)


def build():
    model = NERModel(10, 3000, 50, 32)
    tokens = integers(3000, 64, 50)
    model(tokens[:1])  # changed
    return Script(
        model,
        CustomNonPaddingTokenLoss(),
        tokens,
        integers(10, 64, 50),
    )
