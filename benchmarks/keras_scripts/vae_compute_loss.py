"""Generative: variational autoencoder with a `compute_loss` of its own."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats


class Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        shape = ops.shape(z_mean)
        epsilon = keras.random.normal(shape, seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        z_mean, z_log_var, image = y_pred
        reconstruction = ops.mean(
            ops.sum(
                keras.losses.binary_crossentropy(x, image),
                axis=(1, 2),
            )
        )
        kl = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
        return reconstruction + ops.mean(ops.sum(kl, axis=1))


def build():
    inputs = keras.Input((28, 28, 1))
    x = layers.Conv2D(32, 3, activation="relu", strides=2, padding="same")(
        inputs
    )
    x = layers.Conv2D(64, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    z_mean, z_log_var = layers.Dense(2)(x), layers.Dense(2)(x)
    x = layers.Dense(7 * 7 * 32, activation="relu")(
        Sampling()([z_mean, z_log_var])
    )
    x = layers.Reshape((7, 7, 32))(x)
    for filters in (32, 16):
        x = layers.Conv2DTranspose(
            filters, 3, activation="relu", strides=2, padding="same"
        )(x)
    image = layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")
    model = VAE(inputs, [z_mean, z_log_var, image(x)])
    return Script(model, None, floats(64, 28, 28, 1))
