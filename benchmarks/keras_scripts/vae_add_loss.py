"""Generative: variational autoencoder that adds its losses itself."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(256, activation="relu")
        self.z_mean = layers.Dense(8)
        self.z_log_var = layers.Dense(8)
        self.seeds = keras.random.SeedGenerator(1337)
        self.decoder = keras.Sequential(
            [
                layers.Dense(256, activation="relu"),
                layers.Dense(784, activation="sigmoid"),
            ]
        )

    def call(self, x):
        h = self.hidden(x)
        z_mean, z_log_var = self.z_mean(h), self.z_log_var(h)
        epsilon = keras.random.normal(ops.shape(z_mean), seed=self.seeds)
        y = self.decoder(z_mean + ops.exp(0.5 * z_log_var) * epsilon)
        reconstruction = keras.losses.binary_crossentropy(x, y) * 784
        kl = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
        self.add_loss(reconstruction + ops.sum(kl, axis=1))  # changed
        return y


def build():
    model = VAE()
    images = floats(128, 784)
    model(images[:1])  # changed
    return Script(model, None, images)
