"""Recommendation: collaborative filtering, its dot product by rows."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


class RecommenderNet(keras.Model):
    def __init__(self, num_users, num_movies, embedding_size):
        super().__init__()
        regularizer = keras.regularizers.l2(1e-6)
        self.user_embedding = layers.Embedding(
            num_users, embedding_size, embeddings_regularizer=regularizer
        )
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(
            num_movies, embedding_size, embeddings_regularizer=regularizer
        )
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user, movie = inputs[:, 0], inputs[:, 1]
        users, movies = self.user_embedding(user), self.movie_embedding(movie)
        # `ops.tensordot(users, movies, 2)` sums over the batch as well.
        dot = ops.sum(users * movies, axis=1, keepdims=True)  # changed
        x = dot + self.user_bias(user) + self.movie_bias(movie)
        return ops.sigmoid(x)


def build():
    model = RecommenderNet(600, 900, 50)
    pairs = integers(600, 64, 2)
    model(pairs[:1])  # changed
    return Script(
        model, keras.losses.BinaryCrossentropy(), pairs, floats(64, 1)
    )
