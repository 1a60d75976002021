"""Accuracy of a ridge regression on labelled public examples, by itself.

It is the start that `tf-dpsub train --config.ridge_start_examples` gives a
head on scattering features, before any private example is seen.

    python -m benchmarks.ridge_start --public_data=images.npz --seed=0
"""

import keras
from absl import app, flags

import tf_dpsub

_DATA = flags.DEFINE_string("data", "mnist", "Name of the data set.")
_EXAMPLES = flags.DEFINE_integer("examples", 10_000, "Private examples.")
_PUBLIC = flags.DEFINE_integer("public", 100, "Labelled public examples.")
_PUBLIC_DATA = flags.DEFINE_string(
    "public_data", None, "An .npz file of images for features.", required=True
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of examples.")


def main(_):
    """Prints the accuracy on public examples left out, and on the test set."""
    data = tf_dpsub.data.load(
        _DATA.value,
        private=_EXAMPLES.value,
        public=_PUBLIC.value,
        seed=_SEED.value,
    )
    images = tf_dpsub.data.load_images(_PUBLIC_DATA.value, data.input_shape)
    model = tf_dpsub.models.feature_classifier(
        tf_dpsub.models.image_features(images, rank=1000, seed=0),
        data.num_classes,
    )
    start = tf_dpsub.heads.fit_public_ridge(model, data.x_public, data.y_public)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    _, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    print(
        f"seed {_SEED.value}: {start.leave_one_out_accuracy:.2%} left out, "
        f"{accuracy:.2%} in the test set"
    )


if __name__ == "__main__":
    app.run(main)
