"""Public gradients: rows at the current weights, chunk by chunk."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.subspaces import linear_models
from tests.subspaces.linear_models import PARAMETERS
from tf_dpsub.data import given_batches
from tf_dpsub.subspaces.groups import Group
from tf_dpsub.subspaces.public_gradients import PublicGradients

layers = keras.layers
losses = keras.losses

EXAMPLES = 10
KEY = tf.constant([3, 4], tf.int64)

_random = np.random.default_rng(0)
X = _random.normal(size=(EXAMPLES, PARAMETERS)).astype("float32")
Y = _random.normal(size=(EXAMPLES, 1)).astype("float32")


def dpsgd(**arguments):
    return tf_dpsub.optimizers.DPSGD(
        "sgd",
        noise_multiplier=1.0,
        l2_norm_clip=1.0,
        batch_size=4,
        **arguments,
    )


@pytest.fixture(scope="module")
def linear():
    return linear_models.attach(linear_models.make_private(dpsgd()))


def network(loss, x, y, outputs, plain=None, **arguments):
    """A private model whose step is built for these data."""
    if plain is None:
        plain = keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                layers.Dense(3, activation="tanh"),
                layers.Dense(outputs),
            ]
        )
    model = tf_dpsub.make_private(plain)
    model.compile(dpsgd(**arguments), loss=loss)
    batch = given_batches.padded(given_batches.named(x, y), 4)
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    return model


def all_rows(found, variables=2, key=KEY, indices=None):
    """Each chunk of rows, `[chunks, rows, parameters]`."""

    every = Group("all", tuple(range(variables)), PARAMETERS)

    @tf.function(autograph=False)
    def compute(key):
        batch = found.draw(key, indices)
        chunks, size = batch["real"].shape
        written = found.fold(
            batch,
            lambda i, rows, array: array.write(i, tf.concat(rows.of(every), 1)),
            tf.TensorArray(tf.float32, chunks, element_shape=[size, None]),
        )
        return written.stack()

    return compute(key).numpy()


class TestRows:
    @pytest.mark.parametrize("chunk_size", [2, 3, 4, 9, 10, 256])
    def test_chunks_hold_each_example_once(self, linear, chunk_size):
        found = all_rows(PublicGradients(linear, X, Y, chunk_size))
        chunks, size, _ = found.shape
        assert size <= chunk_size
        assert chunks == -(-EXAMPLES // chunk_size)
        rows = found.reshape(-1, PARAMETERS)
        np.testing.assert_allclose(rows[:EXAMPLES], Y * X, rtol=1e-6)
        # Rows of padding are zero: others would be counted twice.
        assert not rows[EXAMPLES:].any()

    def test_of_some_examples(self, linear):
        found = PublicGradients(linear, X, Y, 2)
        rows = all_rows(found, indices=tf.constant([7, 0, 3]))
        np.testing.assert_allclose(
            rows.reshape(-1, PARAMETERS)[:3], (Y * X)[[7, 0, 3]], rtol=1e-6
        )
        assert rows.shape == (2, 2, PARAMETERS) and not rows[1, 1].any()

    @pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
    def test_are_gradients_at_the_current_weights(self, per_example):
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        labels = _random.integers(0, 4, EXAMPLES)
        model = network(loss, X, labels, 4, per_example=per_example)
        assert model.training_step.implementation == per_example
        found = PublicGradients(model, X, labels, 4)
        previous = None
        for _ in range(2):
            rows = all_rows(found, 4).reshape(-1, model.count_params())
            for i in range(EXAMPLES):
                with tf.GradientTape() as tape:
                    value = loss(labels[i : i + 1], model.model(X[i : i + 1]))
                expected = linear_models.flat(
                    tape.gradient(
                        value, [v.value for v in model.trainable_variables]
                    )
                )
                np.testing.assert_allclose(rows[i], expected, atol=1e-6)
            assert previous is None or not np.allclose(rows, previous)
            previous = rows
            for variable in model.trainable_variables:
                variable.assign(_random.normal(size=variable.shape))

    def test_numbers_of_another_type_are_cast(self, linear):
        found = PublicGradients(linear, X.astype("float64"), Y[:, :], 4)
        np.testing.assert_allclose(
            all_rows(found).reshape(-1, PARAMETERS)[:EXAMPLES], Y * X, rtol=1e-6
        )

    def test_too_large_rows_keep_their_direction(self, linear):
        """Products of two such rows would overflow."""
        scales = np.float32(10.0) ** np.array([0, 11, 13, 15, 18, 18])
        x = X[:6] / np.linalg.norm(X[:6], axis=1, keepdims=True)
        found = PublicGradients(
            linear, scales[:, None] * x, np.ones((6, 1), "float32"), 3
        )
        rows = all_rows(found).reshape(-1, PARAMETERS)
        np.testing.assert_allclose(
            rows, np.minimum(scales, 1e12)[:, None] * x, rtol=1e-5
        )

    @pytest.mark.parametrize("scale", [1.0, 1e15])
    def test_products_are_of_the_same_rows(self, linear, scale):
        """A group has some of the weights; large rows are scaled down."""
        sizes = np.where(np.arange(EXAMPLES) % 2, scale, 1)[:, None]
        found = PublicGradients(linear, sizes * X, np.abs(Y), 256)

        @tf.function(autograph=False)
        def compute(key):
            rows = found.rows(found.draw(key), 0)
            groups = [Group("0", (0,), 5), Group("1", (1,), 7)]
            return [(rows.of(g)[0], rows.gram(g)) for g in groups]

        for rows, products in compute(KEY):
            rows = rows.numpy().astype("float64")
            norms = np.linalg.norm(rows, axis=1)
            error = np.abs(products - rows @ rows.T)
            assert np.all(error < 1e-5 * np.outer(norms, norms))

    def test_rows_that_are_not_finite_are_zero(self, linear):
        x = X.copy()
        x[2, 5], x[4, 0], x[5] = np.nan, np.inf, 3e38
        found = PublicGradients(linear, x, Y, 4)
        rows = all_rows(found).reshape(-1, PARAMETERS)[:EXAMPLES]
        assert not rows[[2, 4, 5]].any()
        others = np.delete(np.arange(EXAMPLES), [2, 4, 5])
        np.testing.assert_allclose(rows[others], (Y * X)[others], rtol=1e-6)

    def test_dropout_is_as_in_training(self):
        """A basis of other gradients than those of a step would fit less."""
        plain = keras.Sequential(
            [keras.Input((PARAMETERS,)), layers.Dropout(0.5), layers.Dense(1)]
        )
        model = network(
            linear_models.product, X, np.ones((EXAMPLES, 1)), 1, plain
        )
        found = PublicGradients(model, X, np.ones((EXAMPLES, 1)), 4)
        rows = all_rows(found).reshape(-1, PARAMETERS + 1)[:EXAMPLES, :-1]
        share = np.mean(rows == 0)
        assert 0.2 < share < 0.8
        kept = rows != 0
        np.testing.assert_allclose(rows[kept], 2 * X[kept], rtol=1e-6)


SPARSE = losses.SparseCategoricalCrossentropy(from_logits=True)
BINARY = losses.BinaryCrossentropy(from_logits=True)
# Targets, outputs, loss, and the labels that may be drawn.
LABELS = {
    "sparse": (np.zeros(8, "int32"), 3, SPARSE, [0, 1, 2]),
    "sparse, int64": (np.zeros(8, "int64"), 3, SPARSE, [0, 1, 2]),
    "sparse, by column": (np.zeros((8, 1), "int32"), 3, SPARSE, [0, 1, 2]),
    "one-hot": (
        np.zeros((8, 3), "float32"),
        3,
        losses.CategoricalCrossentropy(from_logits=True),
        [0, 1],
    ),
    "binary": (np.zeros(8, "float32"), 1, BINARY, [0, 1]),
    "binary, by column": (np.zeros((8, 1), "float32"), 1, BINARY, [0, 1]),
    "by name": (
        np.zeros(8, "int32"),
        3,
        "sparse_categorical_crossentropy",
        [0, 1, 2],
    ),
}


class TestRandomLabels:
    @pytest.mark.parametrize("kind", LABELS)
    def test_fit_the_loss(self, kind):
        y, outputs, loss, values = LABELS[kind]
        x = np.zeros((400, 2), "float32")
        model = network(loss, x[:8], y, outputs)
        found = PublicGradients(model, x, None, 400)
        labels = found.draw(KEY)["y"][0].numpy()
        assert labels.dtype == model.training_step.spec["y"].dtype
        assert labels.shape == (400, *y.shape[1:])
        assert np.unique(labels).tolist() == values
        classes = labels.argmax(-1) if kind == "one-hot" else labels.ravel()
        if kind == "one-hot":
            np.testing.assert_array_equal(labels.sum(-1), 1)
        # All classes are equally likely: within five standard deviations.
        counts = np.unique(classes, return_counts=True)[1]
        share = 1 / max(2, outputs)
        deviation = np.sqrt(400 * share * (1 - share))
        assert np.abs(counts - 400 * share).max() < 5 * deviation
        # Another key draws other labels; the same key draws the same.
        np.testing.assert_array_equal(labels, found.draw(KEY)["y"][0])
        assert np.any(labels != found.draw(KEY + 1)["y"][0].numpy())

    def test_chunks_have_labels_of_their_own(self):
        y, outputs, loss, _ = LABELS["sparse"]
        x = np.zeros((60, 2), "float32")
        found = PublicGradients(network(loss, x, y, outputs), x, None, 20)
        first, second, third = found.draw(KEY)["y"].numpy()
        assert np.any(first != second) and np.any(second != third)

    def test_given_labels_are_used(self, linear):
        batch = PublicGradients(linear, X, Y, 256).draw(KEY)
        np.testing.assert_array_equal(batch["y"][0], Y)

    @pytest.mark.parametrize(
        ("loss", "shape"),
        [
            ("mse", (8, 1)),
            ("mse", (8,)),
            (losses.Huber(), (8, 1)),
            ("mae", (8, 3)),
        ],
    )
    def test_regression_has_none(self, loss, shape):
        """Labels 0 and 1 would give gradients unlike those of training."""
        x = np.zeros((8, 2), "float32")
        model = network(loss, x, np.zeros(shape, "float32"), (*shape, 1)[1])
        with pytest.raises(ValueError, match="classifier.*Pass `y_public`"):
            PublicGradients(model, x, None, 4)

    def test_per_token_labels_have_none(self):
        x, y = np.zeros((8, 5), "int32"), np.zeros((8, 5), "int32")
        plain = keras.Sequential(
            [keras.Input((5,), dtype="int32"), layers.Embedding(4, 4)]
        )
        model = network(SPARSE, x, y, 4, plain)
        with pytest.raises(ValueError, match="Pass `y_public`"):
            PublicGradients(model, x, None, 4)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:, :-1], Y, r"public x .*\(12,\) for each example, got \(11,\)"),
        (X[:, :, None], Y, r"public x .*got \(12, 1\)"),
        ({"a": X}, Y, "public x .*got {'a'"),
        (X, Y[:, 0], r"public y .*\(1,\) for each example, got \(\)"),
        (X, np.ones((EXAMPLES, 2)), r"public y .*got \(2,\)"),
    ],
)
def test_data_that_do_not_fit(linear, x, y, message):
    with pytest.raises(ValueError, match=message):
        PublicGradients(linear, x, y, 4)
