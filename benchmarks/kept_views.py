"""Accuracy of a private head on one view of each example, and on several.

The head is on scattering features, trained by `heads.FullBatch`; views are
flipped and moved at random, drawn once, and their features kept. Which private
examples there are, and all draws, follow from `--seed`.

    python -m benchmarks.kept_views --public_data=images.npz --views=4
"""

import keras
from absl import app, flags

import tf_dpsub

_DATA = flags.DEFINE_string("data", "fashion_mnist", "Name of the data set.")
_EXAMPLES = flags.DEFINE_integer("examples", 5000, "Private examples.")
_PUBLIC_DATA = flags.DEFINE_string(
    "public_data", None, "An .npz file of images for features.", required=True
)
_VIEWS = flags.DEFINE_integer("views", 4, "Views of each example.")
_SHIFT = flags.DEFINE_float("shift", 0.07, "Largest shift, of the width.")
_EPSILON = flags.DEFINE_float("epsilon", 1.0, "The budget.")
_SEED = flags.DEFINE_integer("seed", 0, "Of examples and draws.")


def classifier(data, augmented):
    """A head on features, of augmented inputs if these are to be."""
    images = tf_dpsub.data.load_images(_PUBLIC_DATA.value, data.input_shape)
    features = tf_dpsub.models.image_features(images, rank=1000, seed=0)
    inputs = x = keras.Input(data.input_shape)
    if augmented:
        x = keras.layers.RandomFlip("horizontal")(x)
        x = keras.layers.RandomTranslation(
            _SHIFT.value, _SHIFT.value, fill_mode="constant"
        )(x)
    x = tf_dpsub.layers.FrozenFeatures(features)(x)
    logits = keras.layers.Dense(
        data.num_classes, use_bias=False, kernel_initializer="zeros"
    )
    return keras.Model(inputs, logits(x))


def main(_):
    """Trains once and prints the test accuracy."""
    keras.utils.set_random_seed(_SEED.value)
    data = tf_dpsub.data.load(
        _DATA.value, private=_EXAMPLES.value, seed=_SEED.value
    )
    head = tf_dpsub.heads.FullBatch(_EXAMPLES.value, _EPSILON.value, delta=1e-5)
    model = tf_dpsub.make_private(classifier(data, _VIEWS.value > 1))
    model.compile(
        head.optimizer(seed=_SEED.value),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        data.x_train,
        data.y_train,
        epochs=head.steps,
        views=_VIEWS.value,
        verbose=0,
    )
    _, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    print(
        f"{_VIEWS.value} views, seed {_SEED.value}: {accuracy:.2%} at epsilon "
        f"{model.epsilon(1e-5, 'pld'):.3f}"
    )


if __name__ == "__main__":
    app.run(main)
