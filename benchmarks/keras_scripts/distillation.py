"""Image: knowledge distillation from a teacher that stays as it is."""

import keras
from keras import layers, ops

from benchmarks.keras_scripts.script import Script, floats, integers


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.teacher.trainable = False
        self.loss_fn = keras.losses.KLDivergence()

    def call(self, x, training=None):
        return self.student(x, training=training)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        teacher_pred = self.teacher(x, training=False)
        student_loss = super().compute_loss(
            x, y, y_pred, sample_weight, training
        )
        distillation_loss = self.loss_fn(
            ops.softmax(teacher_pred / 3), ops.softmax(y_pred / 3)
        )
        return 0.1 * student_loss + 0.9 * distillation_loss


def network(filters):
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(filters, (3, 3), strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D((2, 2), strides=1, padding="same"),
            layers.Conv2D(2 * filters, (3, 3), strides=2, padding="same"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def build():
    model = Distiller(network(16), network(64))
    images = floats(64, 28, 28, 1)
    model(images[:1])  # changed
    return Script(
        model,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        images,
        integers(10, 64),
    )
