"""Subspaces of public gradients: what spans them, and when."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.subspaces.linear_models import (
    PARAMETERS,
    attach,
    flat,
    largest_sine,
    make_private,
    matrix_of,
    network,
    orthonormal,
    product,
    projected,
    top_eigenspace,
)
from tf_dpsub.subspaces import PublicSubspace, public_subspace

layers = keras.layers

EXAMPLES, RANK = 20, 3
METHODS = ("power", "gram", "lanczos")

_random = np.random.default_rng(0)
# Their gradients, with a gap after the third singular value: what is behind it
# fades by 1e4 in each power iteration.
ROWS = (
    orthonormal(EXAMPLES, PARAMETERS, 1)
    * [9, 8, 7, *[0.07] * (PARAMETERS - 3)]
    @ orthonormal(PARAMETERS, PARAMETERS, 2).T
).astype("float32")
# Rounding error of sums of 20 and 12 numbers and of orthonormalization, in the
# largest direction relative to the smallest.
ROUNDING = 100 * 2.0**-24 * 9**2 / 7**2
ONES = np.ones((EXAMPLES, 1), "float32")
# Private data, for models that are trained.
X = _random.normal(size=(8, PARAMETERS)).astype("float32")
Y = np.ones((8, 1), "float32")


def refreshed(subspace):
    """The basis after the refresh of a first step."""
    model = make_private(projected(subspace))
    attach(model, steps=100)
    model.optimizer.prepare()
    return matrix_of(subspace)


def check_orthonormal(basis):
    assert np.isfinite(basis).all()
    rank = basis.shape[1]
    assert np.abs(basis.T @ basis - np.eye(rank)).max() <= 1e-5


class TestBasis:
    @pytest.mark.parametrize("method", METHODS)
    def test_spans_the_top_eigenspace(self, method):
        subspace = PublicSubspace(
            ROWS, ONES, rank=RANK, method=method, iterations=2, seed=0
        )
        basis = refreshed(subspace)
        check_orthonormal(basis)
        assert basis.shape == (PARAMETERS, RANK)
        assert largest_sine(basis, top_eigenspace(ROWS, RANK)) < ROUNDING

    @pytest.mark.parametrize("method", ["power", "lanczos"])
    def test_products_of_a_refresh_may_be_narrow(self, method):
        """What they span is that of rounded rows, and still orthonormal."""
        bases = []
        for dtype in ("float32", "bfloat16"):
            subspace = PublicSubspace(
                ROWS,
                ONES,
                rank=RANK,
                method=method,
                iterations=2,
                refresh_dtype=dtype,
                seed=0,
            )
            bases.append(refreshed(subspace))
            check_orthonormal(bases[-1])
        assert 1e-4 < largest_sine(*bases) < 2.0**-6

    def test_each_group_has_a_block_of_its_own(self):
        subspace = PublicSubspace(
            ROWS, ONES, rank=5, groups="layers", method="gram"
        )
        basis = refreshed(subspace)
        assert sum(subspace.ranks) == subspace.rank == 5
        # In proportion to √5 and √7.
        assert subspace.ranks == [2, 3]
        check_orthonormal(basis)
        assert not basis[5:, :2].any() and not basis[:5, 2:].any()
        for block, columns in (
            (basis[:5, :2], ROWS[:, :5]),
            (basis[5:, 2:], ROWS[:, 5:]),
        ):
            rank = block.shape[1]
            assert largest_sine(block, top_eigenspace(columns, rank)) < 1e-4

    def test_groups_by_name(self):
        subspace = PublicSubspace(
            ROWS, ONES, rank=5, groups=[["part1"], ["part0"]], method="gram"
        )
        basis = refreshed(subspace)
        # Coordinates follow the groups.
        assert subspace.ranks == [3, 2]
        assert not basis[:5, :3].any() and not basis[5:, 3:].any()

    def test_labels_that_are_given_are_used(self):
        """Examples with target 0 have no gradient: they span nothing."""
        x = np.eye(PARAMETERS, dtype="float32")[:4]
        y = np.array([[0], [3], [0], [2]], "float32")
        subspace = PublicSubspace(x, y, rank=2, method="gram")
        assert largest_sine(refreshed(subspace), x[[1, 3]].T) < 1e-5

    def test_structures_of_inputs(self):
        first, second = keras.Input((5,), name="a"), keras.Input((7,), name="b")
        total = layers.Add()(
            [
                layers.Dense(1, use_bias=False)(first),
                layers.Dense(1, use_bias=False)(second),
            ]
        )
        model = tf_dpsub.make_private(
            keras.Model({"a": first, "b": second}, total)
        )
        subspace = PublicSubspace(
            {"a": ROWS[:, :5], "b": ROWS[:, 5:]}, ONES, rank=3, method="gram"
        )
        model.compile(projected(subspace), loss="mae")
        model.fit({"a": X[:, :5], "b": X[:, 5:]}, Y, verbose=0)
        assert np.isfinite(flat(model.get_weights())).all()
        check_orthonormal(matrix_of(subspace))


@keras.saving.register_keras_serializable("tests")
class Scaled(layers.Layer):
    """`kernel @ (scale * x)` of a kernel of zeros: gradients are scaled."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1],), initializer="zeros")
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return keras.ops.sum(x * self.scale * self.kernel, -1, keepdims=True)


SCALES = {
    "ordinary": np.ones(PARAMETERS),
    "zero": np.zeros(PARAMETERS),
    "one direction": np.eye(PARAMETERS)[3],
    "two directions": np.eye(PARAMETERS)[3] + np.eye(PARAMETERS)[5],
    "huge": np.full(PARAMETERS, 1e30),
    "overflowing": np.full(PARAMETERS, 3e38),
    "tiny": np.full(PARAMETERS, 1e-30),
    "of all sizes": np.logspace(-18, 18, PARAMETERS),
    "not finite": np.full(PARAMETERS, np.nan),
    "finite again": np.ones(PARAMETERS),
}


class TestDifficultExamples:
    @pytest.mark.parametrize("jit_compile", [False, True])
    @pytest.mark.parametrize("method", METHODS)
    def test_bases_are_orthonormal(self, method, jit_compile, monkeypatch):
        """Each from the last one, in one compiled refresh, in chunks.

        They span what those of the whole, not compiled, do.
        """
        monkeypatch.setattr(public_subspace, "_CHUNK", 6)
        layer = Scaled()
        plain = keras.Sequential([keras.Input((PARAMETERS,)), layer])
        model = tf_dpsub.make_private(plain)
        subspace = PublicSubspace(
            ROWS, ONES, rank=RANK, method=method, iterations=1, seed=0
        )
        model.compile(
            projected(subspace), loss=product, jit_compile=jit_compile
        )
        attach(model)
        assert model.training_step.is_compiled == jit_compile
        for _ in range(2):
            model.optimizer.prepare()
        inside = matrix_of(subspace)[:PARAMETERS]
        assert largest_sine(inside, top_eigenspace(ROWS, RANK)) < ROUNDING
        for name, scale in SCALES.items():
            layer.scale.assign(scale)
            model.optimizer.prepare()
            check_orthonormal(matrix_of(subspace))
            if name == "one direction":
                outside = np.eye(2 * PARAMETERS)[3] - (
                    matrix_of(subspace) @ matrix_of(subspace)[3]
                )
                assert np.linalg.norm(outside) < 1e-4

    def test_training_goes_on_without_a_direction(self):
        """All inputs are zero, and there is no bias."""
        subspace = PublicSubspace(0 * ROWS, ONES, rank=RANK)
        model = make_private(projected(subspace))
        model.fit(X, Y, epochs=2, verbose=0)
        weights = flat(model.get_weights())
        assert np.isfinite(weights).all() and weights.any()

    @pytest.mark.parametrize("method", ["power", "gram"])
    def test_rank_is_reduced_to_the_number_of_examples(self, method):
        subspace = PublicSubspace(ROWS[:2], ONES[:2], rank=5, method=method)
        with pytest.warns(UserWarning, match="rank <= 2.*got 5: 2 is taken"):
            basis = refreshed(subspace)
        assert subspace.rank == basis.shape[1] == 2
        check_orthonormal(basis)
        assert largest_sine(basis, ROWS[:2].T) < 1e-4

    def test_rank_is_reduced_to_the_number_of_weights(self):
        subspace = PublicSubspace(ROWS, ONES, rank=15, method="gram")
        with pytest.warns(UserWarning, match="rank <= 12.*got 15: 12 is"):
            check_orthonormal(refreshed(subspace))

    @pytest.mark.parametrize("method", ["power", "gram"])
    def test_one_example(self, method):
        subspace = PublicSubspace(ROWS[:1], ONES[:1], rank=1, method=method)
        assert largest_sine(refreshed(subspace), ROWS[:1].T) < 1e-4


class Bases(keras.callbacks.Callback):
    """Records the basis of each step, and the weights it was computed at."""

    def __init__(self):
        super().__init__()
        self.bases, self.weights = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.weights.append(self.model.get_weights())

    def on_train_batch_end(self, batch, logs=None):
        self.bases.append(matrix_of(self.model.optimizer.subspace))


def classifier():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((PARAMETERS,)),
            layers.Dense(3, activation="tanh"),
            layers.Dense(4),
        ]
    )


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LABELS = _random.integers(0, 4, EXAMPLES)
PRIVATE_LABELS = _random.integers(0, 4, 8)


def still():
    """Leaves the weights where they are."""
    return keras.optimizers.SGD(0.0)


def train(subspace, steps=4, **arguments):
    """Trains a classifier, and returns the records of `Bases`."""
    model = tf_dpsub.make_private(classifier())
    model.compile(
        projected(subspace, **arguments),
        loss=LOSS,
        jit_compile=False,
    )
    noted = Bases()
    model.fit(
        X,
        PRIVATE_LABELS,
        steps_per_epoch=steps,
        callbacks=[noted],
        verbose=0,
    )
    return noted


def bases_of(subspace, steps, plain=None, jit_compile=False):
    """The bases of steps of a classifier whose weights stand still."""
    model = tf_dpsub.make_private(plain or classifier())
    model.compile(projected(subspace), loss=LOSS, jit_compile=jit_compile)
    model.prepare_training(
        {
            "x": tf.TensorSpec(X.shape, tf.float32),
            "y": tf.TensorSpec(PRIVATE_LABELS.shape, tf.int64),
            "real": tf.TensorSpec([len(X)], tf.float32),
        }
    )
    bases = []
    for step in range(steps):
        subspace.prepare(tf.constant(step))
        bases.append(matrix_of(subspace))
    return bases


class TestRefresh:
    def test_uses_the_current_weights(self):
        subspace = PublicSubspace(ROWS, LABELS, rank=2, method="gram")
        noted = train(subspace, inner=keras.optimizers.SGD(5.0))
        plain = classifier()
        for basis, weights in zip(noted.bases, noted.weights, strict=True):
            plain.set_weights(weights)
            rows = []
            for x, y in zip(ROWS, LABELS):
                with tf.GradientTape() as tape:
                    value = LOSS(y[None], plain(x[None]))
                variables = [v.value for v in plain.trainable_variables]
                rows.append(flat(tape.gradient(value, variables)))
            values = np.linalg.svd(rows)[1]
            gap = (values[1] ** 2 - values[2] ** 2) / values[0] ** 2
            expected = top_eigenspace(rows, 2)
            assert largest_sine(basis, expected) < 1e-5 / gap
        assert largest_sine(noted.bases[0], noted.bases[-1]) > 1e-2

    def test_keeps_the_basis_in_between(self):
        subspace = PublicSubspace(ROWS, LABELS, rank=2, update_every=3)
        bases = train(subspace, steps=7).bases
        for step in (1, 2, 4, 5):
            np.testing.assert_array_equal(bases[step], bases[step - 1])
        for step in (3, 6):
            assert np.abs(bases[step] - bases[step - 1]).max() > 1e-4

    def test_draws_labels_anew(self):
        """At weights that stand still, only labels change the basis."""
        random = PublicSubspace(ROWS, rank=2, method="gram", update_every=2)
        bases = bases_of(random, steps=5)
        for step in (0, 2):  # the labels of a basis are kept
            np.testing.assert_array_equal(bases[step], bases[step + 1])
            assert largest_sine(bases[step], bases[step + 2]) > 1e-2
        given = PublicSubspace(ROWS, LABELS, rank=2, method="gram")
        bases = bases_of(given, steps=3)
        assert largest_sine(bases[0], bases[2]) < 1e-5

    @pytest.mark.parametrize("seed", [None, 5])
    def test_is_reproducible_by_a_seed_alone(self, seed):
        first, second = (
            bases_of(PublicSubspace(ROWS, rank=2, seed=seed), steps=2)
            for _ in range(2)
        )
        for one, other in zip(first, second):
            assert np.allclose(one, other, atol=1e-5) == (seed is not None)

    def test_touches_nothing_private(self):
        """Whatever the private data are: weights stand still."""
        subspace = PublicSubspace(ROWS, rank=2, method="gram", seed=1)
        model = tf_dpsub.make_private(classifier())
        model.compile(projected(subspace, inner=still()), loss=LOSS)
        found = []
        for x in (X, np.full_like(X, np.nan)):
            noted = Bases()
            model.optimizer.inner_optimizer.iterations.assign(0)
            model.fit(
                x,
                PRIVATE_LABELS,
                steps_per_epoch=2,
                callbacks=[noted],
                verbose=0,
            )
            found.append(noted.bases)
        np.testing.assert_array_equal(*found)
        assert largest_sine(*found[0]) > 1e-2

    def test_after_a_resume_does_not_wait(self, tmp_path):
        """Without one, steps would go in random directions."""

        def make():
            return make_private(
                projected(
                    PublicSubspace(
                        ROWS, ONES, rank=RANK, method="gram", update_every=4
                    )
                )
            )

        model = make()
        model.fit(X, Y, steps_per_epoch=1, verbose=0)
        model.save_weights(tmp_path / "w.weights.h5")
        resumed = attach(make())
        resumed.load_weights(tmp_path / "w.weights.h5")
        resumed.fit(X, Y, steps_per_epoch=1, verbose=0)
        assert int(resumed.optimizer.iterations) == 2
        basis = matrix_of(resumed.optimizer.subspace)
        assert largest_sine(basis, top_eigenspace(ROWS, RANK)) < 1e-4

    def test_follows_a_loss_that_is_compiled_later(self):
        subspace = PublicSubspace(ROWS, LABELS, rank=2, method="gram")
        plain = classifier()
        model = tf_dpsub.make_private(plain)
        found = []
        for loss in (LOSS, lambda y, p: keras.ops.sum(p, -1)):
            model.compile(projected(subspace, inner=still()), loss=loss)
            model.fit(X, PRIVATE_LABELS, steps_per_epoch=1, verbose=0)
            found.append(matrix_of(subspace))
        assert largest_sine(*found) > 1e-2

    @pytest.mark.slow
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_of_a_model_with_a_loop(self, jit_compile):
        plain = keras.Sequential(
            [
                keras.Input((PARAMETERS,)),
                layers.Reshape((4, 3)),
                layers.SimpleRNN(2),
                layers.Dense(4),
            ]
        )
        subspace = PublicSubspace(ROWS, rank=3)
        first, second = bases_of(subspace, 2, plain, jit_compile)
        check_orthonormal(second)
        assert largest_sine(first, second) > 1e-2


class TestArguments:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rank": 0}, "rank >= 1 .int., got 0"),
            ({"rank": -3}, "rank >= 1"),
            ({"rank": 2.5}, "rank >= 1"),
            ({"rank": True}, "rank >= 1"),
            ({"rank": "all"}, "rank >= 1 .*got 'all'"),
            ({"rank": "auto"}, "max_rank with rank='auto', got None"),
            ({"rank": "auto", "max_rank": 0}, "rank >= 1"),
            ({"max_rank": 5}, "max_rank=None unless rank='auto', got 5"),
            ({"method": "svd"}, "method to be one of .*'power'.*got 'svd'"),
            ({"refresh_dtype": "float16"}, "refresh_dtype to be one of"),
            (
                {"refresh_dtype": "bfloat16", "method": "gram"},
                "refresh_dtype='float32' with method='gram'",
            ),
            ({"iterations": 0}, "iterations >= 1 .int., got 0"),
            ({"update_every": 0}, "update_every >= 1 .int., got 0"),
            ({"update_every": 1.5}, "update_every >= 1"),
            ({"groups": 0}, "groups >= 1, got 0"),
            ({"groups": "layer"}, "groups to be a number, 'layers' or lists"),
            ({"held_out": 3}, "held_out"),
        ],
    )
    def test_invalid(self, changes, message):
        with pytest.raises(ValueError, match=f"Expected.*{message}"):
            PublicSubspace(ROWS, ONES, **{"rank": 2, **changes})

    @pytest.mark.parametrize(
        ("x", "y"),
        [
            (ROWS[:0], ONES[:0]),
            (ROWS[:0], None),
            ({}, None),
            (np.float32(3.0), None),
            (ROWS, ONES[:-1]),
            ({"a": ROWS, "b": ROWS[:-1]}, None),
        ],
    )
    def test_data_that_are_no_examples(self, x, y):
        with pytest.raises(ValueError, match="Expected public data with the"):
            PublicSubspace(x, y, rank=2)

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (ROWS[:, :-1], ONES, "public x of the shapes of the private ones"),
            (ROWS, np.ones((EXAMPLES, 2)), "public y of the shapes"),
        ],
    )
    def test_data_of_another_shape(self, x, y, message):
        model = make_private(projected(PublicSubspace(x, y, rank=2)))
        with pytest.raises(ValueError, match=message):
            model.fit(X, Y, verbose=0)
        assert model.ledger.steps == 0

    def test_groups_that_do_not_fit(self):
        for groups, message in (
            ([["part0"], ["part2"]], "unknown name 'part2'"),
            ([["part0"]], "got part1/kernel in none"),
            ([["part0", "part1"], ["part1"]], "part1/kernel in two"),
            (3, "groups <= 2"),
        ):
            subspace = PublicSubspace(ROWS, ONES, rank=4, groups=groups)
            model = make_private(projected(subspace))
            with pytest.raises(ValueError, match=message):
                model.fit(X, Y, verbose=0)

    def test_regression_needs_labels(self):
        model = tf_dpsub.make_private(network())
        model.compile(projected(PublicSubspace(ROWS, rank=2)), loss="mse")
        with pytest.raises(ValueError, match="Pass `y_public`"):
            model.fit(X, Y, verbose=0)
        assert model.ledger.steps == 0


CONFIGS = {
    "plain": ((ROWS, ONES), {"rank": 3}),
    "random labels": ((ROWS,), {"rank": 3, "seed": 4}),
    "all": (
        (ROWS, ONES),
        {
            "rank": 4,
            "groups": [["part0"], ["part1"]],
            "method": "lanczos",
            "iterations": 2,
            "refresh_dtype": "bfloat16",
            "update_every": 5,
            "allow_private": True,
        },
    ),
    "auto": (
        (ROWS, ONES),
        {"rank": "auto", "max_rank": 4, "held_out": 5, "groups": "layers"},
    ),
    "images": ((ROWS.reshape(EXAMPLES, 2, 6).astype("uint8"),), {"rank": 1}),
    "structures": (
        ({"a": ROWS[:, :5], "b": ROWS[:, 5:]}, ONES),
        {"rank": 3},
    ),
    "texts": ((np.array(["a b", "c"]), np.array([0, 1])), {"rank": 1}),
}


class TestSerialisation:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_round_trip(self, name):
        data, arguments = CONFIGS[name]
        subspace = PublicSubspace(*data, **arguments)
        text = json.dumps(keras.saving.serialize_keras_object(subspace))
        loaded = keras.saving.deserialize_keras_object(json.loads(text))
        assert type(loaded) is PublicSubspace
        assert loaded.get_config() == subspace.get_config()
        for key, value in arguments.items():
            assert loaded.get_config()[key] == value
        keras.tree.map_structure(
            np.testing.assert_array_equal, loaded.public_inputs, data[0]
        )
        for one, other in zip(
            keras.tree.flatten(loaded.public_inputs),
            keras.tree.flatten(data[0]),
            strict=True,
        ):
            assert one.dtype == other.dtype

    def test_loaded_one_spans_the_same(self):
        subspace = PublicSubspace(
            ROWS, ONES, rank=RANK, groups="layers", method="gram"
        )
        loaded = PublicSubspace.from_config(subspace.get_config())
        np.testing.assert_allclose(
            refreshed(loaded), refreshed(subspace), atol=1e-5
        )


def test_statement_takes_public_examples_as_public():
    random = PublicSubspace(ROWS, rank=2)
    assert "20 examples with random labels" in random.notes[0]
    subspace = PublicSubspace(ROWS, ONES, rank=2, update_every=10)
    model = make_private(projected(subspace))
    model.fit(X, Y, steps_per_epoch=1, verbose=0)
    text = " ".join(model.privacy_statement(1e-5).split())
    taken = text.split("Taken as public:")[1]
    assert "20 examples with their labels" in taken
    assert all(note in taken for note in subspace.notes)
    assert "not compared" not in text
