"""Common behaviour of all subspaces: coordinates, lifting, one model each."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.subspaces.linear_models import (
    PARAMETERS,
    SIZES,
    attach,
    attach_basis,
    flat,
    make_private,
    matrix_of,
    network,
    orthonormal,
    product,
    projected,
    stored,
)
from tf_dpsub import subspaces
from tf_dpsub.subspaces import subspace as base

_random = np.random.default_rng(0)
ROWS = _random.normal(size=(6, PARAMETERS)).astype("float32")
ONES = np.ones((6, 1), "float32")
X, Y = ROWS[:4] + 1, ONES[:4]

SUBSPACES = {
    "public": lambda: subspaces.PublicSubspace(
        ROWS, ONES, rank=4, groups=[["part1"], ["part0"]]
    ),
    "random": lambda: subspaces.RandomSubspace(
        4, groups=[["part1"], ["part0"]]
    ),
    "fixed": lambda: subspaces.FixedSubspace(orthonormal(PARAMETERS, 4)),
}
ALL = pytest.mark.parametrize("kind", SUBSPACES)
# A fixed one has nothing to prepare for a model or a step.
PREPARED = pytest.mark.parametrize("kind", ["public", "random"])


def prepared(kind):
    subspace = SUBSPACES[kind]()
    follows_gradients = isinstance(subspace, subspaces.PublicSubspace)
    build = attach if follows_gradients else attach_basis
    model = build(make_private(projected(subspace)))
    model.optimizer.prepare()
    return subspace, model, matrix_of(subspace)


@pytest.fixture(name="shared", scope="module")
def _shared():
    """As `prepared`, for tests that only read."""
    return functools.cache(prepared)


def split(vector, dtype="float32"):
    parts = np.split(vector, [SIZES[0]])
    return [tf.constant(part[:, None], dtype) for part in parts]


class TestCoordinates:
    @ALL
    def test_are_products_with_one_basis(self, kind, shared):
        subspace, model, basis = shared(kind)
        vector = _random.normal(size=PARAMETERS)
        np.testing.assert_allclose(
            subspace.coordinates(split(vector)), basis.T @ vector, atol=1e-5
        )
        np.testing.assert_allclose(
            subspace.project(stored(model, ROWS)), ROWS @ basis, atol=1e-5
        )

    @ALL
    def test_of_what_was_lifted_are_the_same(self, kind, shared):
        subspace, _, _ = shared(kind)
        given = _random.normal(size=4).astype("float32")
        lifted = subspace.lift(tf.constant(given))
        assert [t.shape for t in lifted] == [(5, 1), (7, 1)]
        np.testing.assert_allclose(
            subspace.coordinates(lifted), given, atol=1e-5
        )

    @ALL
    def test_are_computed_in_the_precision_of_sums(self, kind, shared):
        """Rounding a large sum would move it by more than a clip."""
        subspace, _, basis = shared(kind)
        vector = 1e6 * _random.normal(size=PARAMETERS)
        found = subspace.coordinates(split(vector, "float64"))
        assert found.dtype == tf.float64
        # `basis` itself is known to float32.
        unit = flat(
            [
                np.float64(t)
                for t in subspace.lift(tf.eye(4, dtype="float64")[1])
            ]
        )
        assert abs(unit @ vector - found[1]) < 1e-6
        lifted = subspace.lift(found)
        assert {t.dtype for t in lifted} == {tf.float64}
        np.testing.assert_allclose(
            flat(lifted), basis @ found.numpy(), rtol=1e-6
        )


class TestOneModelEach:
    @ALL
    def test_of_another_model_is_refused(self, kind):
        subspace, _, _ = prepared(kind)
        other = make_private(projected(subspace))
        with pytest.raises(ValueError, match="a subspace for the weights of"):
            other.fit(X, Y, verbose=0)
        assert other.ledger.steps == 0

    @ALL
    def test_of_a_model_of_another_size_is_refused(self, kind):
        subspace, _, _ = prepared(kind)
        other = make_private(projected(subspace), (PARAMETERS,))
        with pytest.raises(ValueError, match="Make a new one for each model"):
            other.fit(X, Y, verbose=0)

    @PREPARED
    def test_is_the_one_that_steps_use(self, kind):
        """Steps of other types of targets are traced, and go on, by turns.

        So does another optimizer, or another wrapper, of the same weights.
        """
        plain, subspace = network(), SUBSPACES[kind]()
        first, second = (tf_dpsub.make_private(plain) for _ in range(2))
        for model in (first, second):
            model.compile(projected(subspace), loss=product)
        for model, dtype in (
            (first, "float32"),
            (first, "int32"),
            (first, "float32"),
            (second, "float32"),
        ):
            before = flat(model.get_weights())
            model.train_on_batch(X, Y.astype(dtype))
            moved = flat(model.get_weights()) - before
            basis = matrix_of(subspace)
            outside = moved - basis @ (basis.T @ moved)
            assert np.linalg.norm(outside) < 1e-5 * np.linalg.norm(moved)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("error", [2.0**-12, np.inf, np.nan])
def test_a_basis_that_is_not_orthonormal_raises(error, is_graph):
    def check(error):
        with tf.control_dependencies([base.require_orthonormal(error)]):
            return tf.identity(error)

    check = tf.function(check, autograph=False) if is_graph else check
    assert check(tf.constant(2.0**-14)) == 2.0**-14
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="orthonormal basis"
    ):
        check(tf.constant(error, tf.float32))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_refresh_is_checked_in_the_step(monkeypatch, jit_compile):
    """Noise in k dimensions, and residual norms, rest on it."""
    subspace = subspaces.PublicSubspace(ROWS, ONES, rank=2)
    model = make_private(projected(subspace), jit_compile=jit_compile)
    monkeypatch.setattr(
        subspaces.linear_algebra, "ORTHONORMALITY", 1e-12, raising=True
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="not keep"):
        model.fit(X, Y, verbose=0)
