"""Tabular: neural decision tree, routes as products of probabilities."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


class NeuralDecisionTree(keras.Model):
    def __init__(self, depth, num_classes):
        super().__init__()
        self.depth = depth
        self.num_leaves = 2**depth
        self.pi = self.add_weight(
            initializer="random_normal",
            shape=[self.num_leaves, num_classes],
            dtype="float32",
            trainable=True,
        )
        self.decision_fn = layers.Dense(self.num_leaves, activation="sigmoid")

    def call(self, features):
        batch_size = ops.shape(features)[0]
        decisions = ops.expand_dims(self.decision_fn(features), axis=2)
        decisions = ops.concatenate([decisions, 1 - decisions], axis=2)
        mu = ops.ones([batch_size, 1, 1])
        begin_idx, end_idx = 1, 2
        for level in range(self.depth):
            mu = ops.reshape(mu, [batch_size, -1, 1])
            mu = ops.tile(mu, (1, 1, 2))
            mu = mu * decisions[:, begin_idx:end_idx, :]
            begin_idx = end_idx
            end_idx = begin_idx + 2 ** (level + 1)
        mu = ops.reshape(mu, [batch_size, self.num_leaves])
        return ops.matmul(mu, ops.softmax(self.pi))


def build():
    inputs = keras.Input((30,))
    x = layers.Dense(64, activation="relu")(inputs)
    outputs = NeuralDecisionTree(5, 2)(x)
    return Script(
        keras.Model(inputs, outputs),
        "sparse_categorical_crossentropy",
        floats(256, 30),
        integers(2, 256),
    )
