"""Views of an example count as one: their mean gradient is its row."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import (
    CLASSES,
    EXACT,
    EXAMPLES,
    W,
    X,
    Y,
    assert_same_weights,
    dpsgd,
    fit_plainly,
    linear,
    loss,
    mlp,
    private,
    twin,
)
from tf_dpsub import accounting
from tf_dpsub.data import PoissonBatches

layers = keras.layers

IMPLEMENTATIONS = ("graph", "vectorized_map")
_random = np.random.default_rng(2)
IMAGES = _random.normal(size=(EXAMPLES, 6, 6, 2)).astype("float32")
SERIES = _random.normal(size=(EXAMPLES, 4, 3)).astype("float32")
IDS = _random.integers(0, 5, (EXAMPLES, 4))


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


def convolutional(*before):
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            *before,
            layers.Conv2D(4, 3),
            layers.GroupNormalization(2),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def attentive():
    inputs = keras.Input((4, 3))
    attention = layers.MultiHeadAttention(2, 2)(inputs, inputs)
    outputs = layers.LayerNormalization()(attention + inputs)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(outputs)))


def recurrent():
    return keras.Sequential(
        [keras.Input((4, 3)), layers.LSTM(3), layers.Dense(CLASSES)]
    )


def embedding():
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(5, 3),
            layers.GlobalAveragePooling1D(),
            layers.Dense(CLASSES),
        ]
    )


MODELS = {
    "mlp": (mlp, X),
    "convolutional": (convolutional, IMAGES),
    "attentive": (attentive, SERIES),
    "recurrent": (recurrent, SERIES),
    "embedding": (embedding, IDS),
}


def stepper(plain, per_example="graph", **settings):
    """A private model that shows the sums of its steps."""
    settings = EXACT | {"microbatch_size": 4} | settings
    return private(plain, dpsgd(per_example=per_example, **settings))


def sums(model, x, y, views=1, real=None):
    """Sums of a step on `x`, which has an axis of views if there are several.

    Returns:
        Vector of all sums.
    """
    batch = {
        "x": tf.constant(x),
        "y": tf.constant(y),
        "real": tf.ones([len(x)]) if real is None else tf.constant(real),
    }
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch), views
    )
    return np.concatenate([np.ravel(s) for s in model.training_step(batch)])


def in_views(x, y, views):
    """The examples in groups, as so many views of one example each."""
    return tuple(a.reshape(-1, views, *a.shape[1:]) for a in (x, y))


@pytest.fixture(scope="module")
def stepper_of():
    """Steppers of `MODELS`, which keep their steps from test to test."""
    return functools.cache(
        lambda name, per_example: stepper(MODELS[name][0](), per_example)
    )


# One example at a time, a model is given its views as a plain batch: a map, a
# loop where TensorFlow cannot map, and ids are all there is.
CASES = [
    *((name, "graph") for name in MODELS),
    ("mlp", "vectorized_map"),
    ("attentive", "vectorized_map"),
    ("embedding", "vectorized_map"),
]


class TestRows:
    @pytest.mark.parametrize(("name", "per_example"), CASES)
    def test_are_means_of_those_of_the_views(
        self, stepper_of, name, per_example
    ):
        _, data = MODELS[name]
        # The first example of a batch counts, the others pad it.
        first = np.float32([1, 0, 0, 0])
        model = stepper_of(name, per_example)
        expected = np.mean(
            [
                sums(
                    model,
                    np.roll(data[:4], -k, 0),
                    np.roll(Y[:4], -k),
                    1,
                    first,
                )
                for k in range(2)
            ],
            axis=0,
        )
        views = sums(model, *in_views(data[:8], Y[:8], 2), 2, first)
        implementation = model.training_step.implementation
        assert implementation in (per_example, "map_fn")
        assert np.linalg.norm(expected) > 0.01
        np.testing.assert_allclose(views, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("name", "per_example"), CASES)
    def test_are_those_of_one_view_if_all_are_equal(
        self, stepper_of, name, per_example
    ):
        _, data = MODELS[name]
        model = stepper_of(name, per_example)
        expected = sums(model, data[:4], Y[:4])
        # An axis of one view is the same for all models: it is tiled.
        for copies in (1, 2) if name == "mlp" else (2,):
            x, y = (np.repeat(a[:4, None], copies, 1) for a in (data, Y))
            np.testing.assert_allclose(
                sums(model, x, y, 2), expected, rtol=1e-4, atol=1e-5
            )

    @pytest.mark.parametrize("per_example", IMPLEMENTATIONS)
    def test_their_mean_is_clipped(self, per_example):
        """Views that cancel leave little, those that do not are one clip."""
        model = stepper(linear(), per_example, l2_norm_clip=0.5)
        x = np.zeros((4, 2, 4), "float32")
        x[0] = 100.0
        same = np.zeros((4, 2), int)
        first = np.float32([1, 0, 0, 0])
        clipped = np.linalg.norm(sums(model, x, same, 2, first))
        assert 0.498 < clipped <= 0.5

        alone = stepper(linear(), per_example)
        x = np.zeros((4, 2, 4), "float32")
        x[0, 0] = 100.0
        x[0, 1] = -100.0
        np.testing.assert_allclose(
            # The logits are all 0, and so is the mean over the views.
            sums(_without_weights(alone), x, same, 2, first)[:12],
            0.0,
            atol=1e-5,
        )

    @pytest.mark.parametrize("per_example", IMPLEMENTATIONS)
    def test_one_hostile_view_leaves_the_example_out(self, per_example):
        model = stepper(mlp(), per_example, l2_norm_clip=0.5)
        x, y = in_views(X[:12], Y[:12], 3)
        expected = sums(model, x, y, 3, np.float32([1, 0, 1, 1]))
        for value in (np.nan, np.inf, 3e38):
            hostile = x.copy()
            hostile[1, 2, 0] = value
            found = sums(model, hostile, y, 3)
            if np.isfinite(value):
                assert np.linalg.norm(found - expected) <= 0.5
            else:
                np.testing.assert_array_equal(found, expected)
        # Nor does one with a label out of range.
        wrong = y.copy()
        wrong[1, 0] = CLASSES
        np.testing.assert_array_equal(sums(model, x, wrong, 3), expected)


def _without_weights(model):
    for variable in model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    return model


class TestFit:
    @pytest.mark.parametrize(
        ("microbatch_size", "per_example"),
        [(None, "graph"), (3, "vectorized_map")],
    )
    def test_equal_views_are_plain_training(self, microbatch_size, per_example):
        """In metrics, too: an example counts once."""
        plain = mlp()
        expected = twin(plain)
        optimizer = dpsgd(
            batch_size=EXAMPLES,
            microbatch_size=microbatch_size,
            per_example=per_example,
            **EXACT,
        )
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        model = private(plain, optimizer, metrics=[accuracy])
        with pytest.warns(UserWarning, match="got 3 equal ones") as warned:
            history = model.fit(X, Y, views=3, epochs=2, verbose=0).history
        assert warned[0].filename == __file__
        reference = fit_plainly(expected, keras.optimizers.SGD(0.1), 2)
        assert_same_weights(plain, expected)
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(
                history[name], reference[name], rtol=1e-5
            )
        np.testing.assert_allclose(accuracy.count, EXAMPLES, rtol=1e-5)

    def test_weights_of_examples_and_several_inputs_and_outputs(self):
        def build():
            keras.utils.set_random_seed(1)
            a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
            hidden = layers.Dense(4, activation="tanh")(a + b)
            return keras.Model(
                {"a": a, "b": b},
                [layers.Dense(CLASSES)(hidden), layers.Dense(1)(hidden)],
            )

        results = []
        for views in (1, 2):
            model = tf_dpsub.make_private(build())
            model.compile(
                dpsgd(batch_size=EXAMPLES, **EXACT),
                loss=[
                    keras.losses.SparseCategoricalCrossentropy(True),
                    "mse",
                ],
            )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Expected views")
                history = model.fit(
                    {"a": X, "b": X[::-1]},
                    [Y, X[:, :1]],
                    sample_weight=W,
                    views=views,
                    verbose=0,
                ).history
            results.append((history["loss"], *model.get_weights()))
        for one, other in zip(*results, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)

    def test_masked_sequences(self):
        """Masks follow the views into losses and metrics."""

        def build():
            keras.utils.set_random_seed(1)
            return keras.Sequential(
                [
                    keras.Input((4,), dtype="int32"),
                    layers.Embedding(5, 3, mask_zero=True),
                    layers.Dense(CLASSES),
                ]
            )

        labels = np.repeat(Y[:, None], 4, 1)
        results = []
        for per_example, views in (
            ("graph", 1),
            ("graph", 2),
            ("vectorized_map", 2),
        ):
            optimizer = dpsgd(
                batch_size=EXAMPLES, per_example=per_example, **EXACT
            )
            model = private(build(), optimizer, weighted_metrics=["accuracy"])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Expected views")
                history = model.fit(IDS, labels, views=views, verbose=0).history
            results.append(
                (history["loss"], history["accuracy"], *model.get_weights())
            )
        for one, *others in zip(*results, strict=True):
            for other in others:
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)

    def test_views_that_map_draws(self):
        """Full batches of views train on the mean of their gradients."""

        def shifted(x, y, seed):
            return x + tf.random.stateless_normal([4], seed), y

        batches = PoissonBatches(X, Y, batch_size=EXAMPLES, map=shifted, seed=3)
        (batch,) = (
            PoissonBatches(X, Y, batch_size=EXAMPLES, map=shifted, seed=3)
            .dataset(multiple_of=EXAMPLES, views=3)
            .take(1)
        )
        plain = linear()
        expected = twin(plain)
        model = private(plain, dpsgd(batch_size=EXAMPLES, **EXACT))
        model.fit(batches, views=3, steps_per_epoch=1, verbose=0)
        expected.compile(keras.optimizers.SGD(0.1), loss())
        expected.train_on_batch(
            *(
                np.reshape(batch[k], [3 * EXAMPLES, *batch[k].shape[2:]])
                for k in ("x", "y")
            )
        )
        assert_same_weights(plain, expected)
        assert model.training_step.implementation == "graph"

    @pytest.mark.parametrize("per_example", IMPLEMENTATIONS)
    def test_layers_of_the_model_draw_for_each_view(self, per_example):
        """Of 64 views of one image, some are flipped and others are not."""
        plain = keras.Sequential(
            [
                keras.Input((1, 2, 1)),
                layers.RandomFlip("horizontal"),
                layers.Flatten(),
                layers.Dense(1, use_bias=False),
            ]
        )
        model = private(
            plain,
            dpsgd(
                per_example=per_example,
                batch_size=2,
                microbatch_size=2,
                **EXACT,
            ),
            loss=lambda y, prediction: prediction[:, 0],
        )
        image = np.zeros((2, 1, 1, 2, 1), "float32")
        image[:, 0, 0, 0] = 1.0
        left, right = sums(
            model, image, np.zeros((2, 1)), 64, np.float32([1, 0])
        )
        implementation = model.training_step.implementation
        assert implementation in (per_example, "map_fn")
        np.testing.assert_allclose(left + right, 1.0, rtol=1e-5)
        assert 0.1 < left < 0.9

    def test_batches_of_a_dataset(self):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        model = private(mlp(layers.Dropout(0.3)), dpsgd())
        model.fit(dataset, views=2, verbose=0)
        assert model.training_step.implementation == "graph"
        # A later run may have other views.
        model.fit(dataset, verbose=0)
        model.fit(dataset, views=4, verbose=0)

    def test_public_examples_beside_them(self):
        """A subspace is of public examples, which have no views."""
        subspace = tf_dpsub.subspaces.PublicSubspace(
            X[:8] + 1, Y[:8], rank=2, method="gram"
        )
        optimizer = tf_dpsub.optimizers.GEP(
            keras.optimizers.SGD(0.1),
            subspace=subspace,
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            residual_norm_clip=1.0,
            batch_size=4,
        )
        model = private(mlp(layers.Dropout(0.2)), optimizer)
        noisy = PoissonBatches(
            X,
            Y,
            batch_size=4,
            map=lambda x, y: (x + keras.random.normal([4]), y),
        )
        model.fit(noisy, views=3, verbose=0)

    def test_ledger_is_that_of_one_view(self):
        model = private(mlp(layers.Dropout(0.5)), dpsgd())
        model.fit(X, Y, views=4, verbose=0)
        spent = accounting.epsilon(
            noise_multiplier=1.0, sampling_rate=4 / 20, steps=5, delta=1e-5
        )
        assert model.epsilon(1e-5) == pytest.approx(spent)


class TestBadInput:
    @pytest.mark.parametrize("views", [0, -1, 1.5, None])
    def test_number(self, views):
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="views"):
            model.fit(X, Y, views=views, verbose=0)
        assert model.ledger.steps == 0

    def test_equal_views(self):
        """A crop that all examples share differs between no two views."""
        cases = {
            "nothing": (linear(), X, None),
            "crop": (convolutional_of_crop(), IMAGES, None),
            "map": (linear(), X, lambda x, y: (2 * x, y)),
        }
        for plain, x, function in cases.values():
            model = private(plain, dpsgd())
            batches = PoissonBatches(x, Y, batch_size=4, map=function)
            # A warning is an error, which ends the run here.
            with pytest.raises(UserWarning, match="2 equal ones"):
                model.fit(batches, views=2, verbose=0)

    @pytest.mark.parametrize("kind", ["Dropout", "GaussianNoise"])
    def test_views_that_differ_do_not_warn(self, kind):
        model = private(mlp(getattr(layers, kind)(0.1)), dpsgd())
        before_training = keras.callbacks.LambdaCallback(
            on_train_begin=_interrupt
        )
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, views=2, verbose=0, callbacks=[before_training])


def _interrupt(logs):
    raise KeyboardInterrupt


def convolutional_of_crop():
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.RandomCrop(5, 5),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def test_default_microbatches_shrink_with_the_views():
    wide = keras.Sequential(
        [keras.Input((4,)), layers.Dense(2**15), layers.Dense(CLASSES)]
    )
    model = private(wide, dpsgd(batch_size=10**4, microbatch_size=None))
    assert model.microbatch_size == 64
    assert [model.microbatch_size_of(k) for k in (4, 1000)] == [16, 2]
