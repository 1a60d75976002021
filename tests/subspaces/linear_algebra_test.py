"""Bases are orthonormal and finite for any columns."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients import tensor_cores
from tests.subspaces.linear_models import orthonormal
from tf_dpsub.gradients import precision
from tf_dpsub.subspaces import linear_algebra

ROWS, COLUMNS = 60, 8
SPLIT = 25  # rows of the first of two blocks

_random = np.random.default_rng(0)
ORDINARY = _random.normal(size=(ROWS, COLUMNS))
LEFT = orthonormal(ROWS, COLUMNS, 1)
RIGHT = orthonormal(COLUMNS, COLUMNS, 2)
SIZES = np.logspace(0, -8, COLUMNS)
DIRECTIONS = _random.normal(size=(ROWS, 3))

MATRICES = {
    "ordinary": ORDINARY,
    "small columns": LEFT * SIZES,
    "ill-conditioned": LEFT * SIZES @ RIGHT,
    "zero": np.zeros((ROWS, COLUMNS)),
    "some zero columns": ORDINARY * (np.arange(COLUMNS) % 2),
    "less than full rank": DIRECTIONS @ _random.normal(size=(3, COLUMNS)),
    "one column repeated": np.repeat(ORDINARY[:, :1], COLUMNS, 1),
    "almost one column": 1 + 1e-7 * ORDINARY,
    "one row": np.eye(ROWS)[:, :1] * ORDINARY[:1],
    "huge": 1e30 * ORDINARY,
    "huge and negative": -1e30 * np.abs(ORDINARY),
    "tiny": 1e-30 * ORDINARY,
    "denormal": 1e-40 * ORDINARY,
    "all sizes": ORDINARY * np.logspace(-30, 30, COLUMNS),
}
FILLS = {
    "another basis": orthonormal(ROWS, COLUMNS, 3),
    "nothing": np.zeros((ROWS, COLUMNS)),
    "the same directions": np.linalg.qr(MATRICES["less than full rank"])[0],
}
# Columns that float32 can tell apart.
FULL_RANK = ("ordinary", "small columns", "huge", "tiny")
# Columns that are not lost beside larger ones.
SEEN = [n for n in MATRICES if n not in ("zero", "denormal", "all sizes")]
# The share of the fill in a column, and roundings.
OUTSIDE = 2.0**-20 + 8 * 2.0**-23


@pytest.fixture(scope="module", params=[False, True], ids=["graph", "xla"])
def orthonormalize(request):
    """The function under test, of whole matrices."""
    function = tf.function(
        linear_algebra.orthonormalize,
        autograph=False,
        jit_compile=request.param,
    )

    def of(matrix, fill):
        blocks = [
            [tf.constant(part, tf.float32) for part in np.split(m, [SPLIT])]
            for m in (matrix, fill)
        ]
        made, error = function(*blocks)
        assert [b.shape for b in made] == [b.shape for b in blocks[0]]
        return np.concatenate(made).astype("float64"), float(error)

    return of


def check_orthonormal(basis, error):
    assert np.isfinite(basis).all()
    off = basis.T @ basis - np.eye(basis.shape[1])
    assert np.abs(off).max() <= 1e-5
    assert np.linalg.norm(off) <= 2.0**-13
    # The reported error is the true one: mechanisms rely on it.
    assert abs(error - np.linalg.norm(off)) < 1e-5


def part_outside(basis, matrix):
    """Relative norms of the parts of columns outside a span."""
    basis = np.linalg.qr(basis)[0]
    matrix = np.float32(matrix).astype("float64")
    matrix = matrix / np.linalg.norm(matrix, axis=0)
    return np.linalg.norm(matrix - basis @ (basis.T @ matrix), axis=0)


class TestOrthonormalize:
    @pytest.mark.parametrize("fill", ["another basis", "the same directions"])
    @pytest.mark.parametrize("name", MATRICES)
    def test_is_orthonormal(self, name, fill, orthonormalize):
        check_orthonormal(*orthonormalize(MATRICES[name], FILLS[fill]))

    @pytest.mark.parametrize("name", FULL_RANK)
    def test_needs_no_fill_for_full_rank(self, name, orthonormalize):
        basis, error = orthonormalize(MATRICES[name], FILLS["nothing"])
        check_orthonormal(basis, error)

    @pytest.mark.parametrize("name", FULL_RANK)
    def test_leading_columns_span_the_same(self, name, orthonormalize):
        """Otherwise a rank could not be cut, nor power iteration converge."""
        basis, _ = orthonormalize(MATRICES[name], FILLS["another basis"])
        for k in range(1, COLUMNS + 1):
            outside = part_outside(basis[:, :k], MATRICES[name][:, :k])
            assert outside.max() < OUTSIDE

    @pytest.mark.parametrize("name", SEEN)
    def test_span_holds_all_columns(self, name, orthonormalize):
        matrix = MATRICES[name]
        basis, _ = orthonormalize(matrix, FILLS["another basis"])
        present = np.any(matrix != 0, 0)
        outside = part_outside(basis, matrix[:, present])
        assert outside.max() < OUTSIDE

    @pytest.mark.parametrize("name", ["zero", "some zero columns"])
    def test_fill_takes_the_place_of_nothing(self, name, orthonormalize):
        matrix, fill = MATRICES[name], FILLS["another basis"]
        basis, _ = orthonormalize(matrix, fill)
        absent = np.all(matrix == 0, 0)
        together = np.concatenate([matrix[:, ~absent], fill[:, absent]], 1)
        assert part_outside(basis, together).max() < 1e-5

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_what_is_not_finite_does_not_pass(self, value, orthonormalize):
        matrix = ORDINARY.copy()
        matrix[3, 2] = value
        _, error = orthonormalize(matrix, FILLS["another basis"])
        assert not error <= linear_algebra.ORTHONORMALITY

    def test_more_columns_than_rows_do_not_pass(self):
        """No basis of them exists."""
        wide = tf.constant(ORDINARY[:5], tf.float32)
        made, error = linear_algebra.orthonormalize([wide], [wide])
        assert not error <= linear_algebra.ORTHONORMALITY
        assert made[0].shape == wide.shape


class TestOrthonormalityError:
    @pytest.mark.parametrize("size", [0.0, 1e-6, 1e-3, 1.0])
    def test_is_the_frobenius_norm(self, size):
        basis = LEFT + size * ORDINARY
        found = linear_algebra.orthonormality_error(
            [tf.constant(p, tf.float32) for p in np.split(basis, [SPLIT])]
        )
        expected = np.linalg.norm(basis.T @ basis - np.eye(COLUMNS))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
    def test_is_infinite_for_what_is_not_finite(self, value):
        basis = LEFT.copy()
        basis[0, 0] = value
        error = linear_algebra.orthonormality_error(
            [tf.constant(basis, tf.float32)]
        )
        assert error == np.inf


def test_inverse_factor_makes_orthonormal():
    matrix = ORDINARY * np.logspace(-3, 3, COLUMNS)
    inverse = linear_algebra.inverse_factor(
        tf.constant(matrix.T @ matrix, tf.float32)
    ).numpy()
    basis = matrix @ inverse
    assert np.abs(basis.T @ basis - np.eye(COLUMNS)).max() < 1e-5
    np.testing.assert_array_equal(inverse, np.triu(inverse))


class TestProducts:
    """The functions, on matrices in blocks of rows."""

    def blocks(self, matrix):
        return [tf.constant(p) for p in np.split(matrix, [SPLIT])]

    def test_equal_those_of_whole_matrices(self):
        a, b = ORDINARY, LEFT
        np.testing.assert_allclose(
            linear_algebra.gram(self.blocks(a)), a.T @ a, atol=1e-12
        )
        np.testing.assert_allclose(
            linear_algebra.gram(self.blocks(a), self.blocks(b)),
            a.T @ b,
            atol=1e-12,
        )
        product = linear_algebra.right_multiply(self.blocks(a), RIGHT)
        np.testing.assert_allclose(
            np.concatenate(product), a @ RIGHT, atol=1e-12
        )

    def test_of_rows_equal_those_of_whole_matrices(self):
        rows = _random.normal(size=(4, ROWS))
        parts = [tf.constant(p) for p in np.split(rows, [SPLIT], 1)]
        np.testing.assert_allclose(
            linear_algebra.multiply(parts, self.blocks(ORDINARY)),
            rows @ ORDINARY,
            atol=1e-12,
        )

    def test_blocks_have_to_match(self):
        """A block that is left out would change the mechanism in silence."""
        with pytest.raises(ValueError):
            linear_algebra.gram(
                self.blocks(ORDINARY), self.blocks(ORDINARY)[:1]
            )


def test_errors_of_long_columns_are_found(monkeypatch):
    """Equal numbers, added up one after another, round in one direction."""
    monkeypatch.setattr(precision, "bilinear", tensor_cores.all_in_order)
    size = 3 * 2**17
    column = np.full([size, 1], size**-0.5, "float32")
    exact = np.sum(column.astype("float64") ** 2) - 1
    found = linear_algebra.orthonormality_error([tf.constant(column)])
    assert abs(found - abs(exact)) < 2.0**-15
    in_order = np.cumsum(np.square(column), dtype="float32")[-1]
    assert abs(in_order - 1) > 2.0**-13
