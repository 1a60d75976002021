"""Image: metric learning by the similarities of a batch."""

import keras
import tensorflow as tf
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


class EmbeddingModel(keras.Model):
    def train_step(self, data):
        anchors, positives = data[0][:, 0], data[0][:, 1]
        with tf.GradientTape() as tape:
            anchors = self(anchors, training=True)
            similarities = ops.einsum(
                "ae,pe->ap", anchors, self(positives, training=True)
            )
            labels = ops.arange(ops.shape(similarities)[0])
            loss = self.compute_loss(y=labels, y_pred=similarities / 0.2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def build():
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, strides=2, activation="relu")(inputs)
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.UnitNormalization()(layers.Dense(8)(x))
    return Script(
        EmbeddingModel(inputs, outputs),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        floats(16, 2, 32, 32, 3),
        integers(2, 16),
    )
