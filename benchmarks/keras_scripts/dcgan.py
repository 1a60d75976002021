"""Generative: GAN, two networks in a `train_step` of its own."""

import keras
import tensorflow as tf
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator

    def call(self, noise):
        return self.discriminator(self.generator(noise))

    def train_step(self, images):
        noise = keras.random.normal((ops.shape(images)[0], 16))
        both = ops.concatenate([self.generator(noise), images])
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.softplus(self.discriminator(both)))
        weights = self.discriminator.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def build():
    discriminator = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, strides=2),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [keras.Input((16,)), layers.Dense(64), layers.Reshape((8, 8, 1))]
    )
    return Script(GAN(discriminator, generator), None, floats(16, 8, 8, 1))
