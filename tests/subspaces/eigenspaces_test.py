"""Three methods for an eigenspace, compared with NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.subspaces.linear_models import (
    largest_sine,
    orthonormal,
    top_eigenspace,
)
from tf_dpsub import gradients
from tf_dpsub.subspaces import eigenspaces, public_gradients
from tf_dpsub.subspaces.groups import Group

EXAMPLES, RANK = 30, 3
# Two groups, of two variables and of one, which alternate.
SIZES = [9, 14, 7]
GROUPS = [Group("outer", (0, 2), 16), Group("inner", (1,), 14)]

METHODS = {
    "power": (eigenspaces.power, 12),
    "gram": (eigenspaces.gram, 1),
    "lanczos": (eigenspaces.lanczos, 4),
}
EXACT = pytest.mark.parametrize("method", METHODS)


class GivenGradients:
    """A fake of `PublicGradients` with given rows, in chunks."""

    def __init__(self, rows, chunks):
        size = -(-len(rows) // chunks)
        padding = chunks * size - len(rows)
        real = np.pad(np.ones(len(rows)), [0, padding])
        self.batch = {"real": tf.constant(real.reshape(chunks, size))}
        rows = np.pad(rows, [[0, padding], [0, 0]]).astype("float32")
        self._variables = [tf.Variable(tf.zeros([size])) for size in SIZES]
        self._chunks = [
            np.split(chunk, np.cumsum(SIZES)[:-1], 1)
            for chunk in np.split(rows, chunks)
        ]

    def rows(self, batch, i):
        return public_gradients.Rows(
            gradients.StoredGradients(self._variables, self._chunks[i])
        )

    def fold(self, batch, function, state):
        for i in range(len(self._chunks)):
            state = function(tf.constant(i), self.rows(batch, i), state)
        return state


def moments_of(rows, chunks=1):
    given = GivenGradients(rows, chunks)
    return eigenspaces.SecondMoments(given, given.batch, GROUPS)


def columns_of(matrix, group):
    """The columns that belong to a group."""
    parts = np.split(matrix, np.cumsum(SIZES)[:-1], 1)
    return np.concatenate([parts[k] for k in group.indices], 1)


def start(rank=RANK, seed=7):
    """An initial basis, in blocks."""
    bases = []
    for group in GROUPS:
        basis = orthonormal(group.size, rank, seed).astype("float32")
        ends = np.cumsum([SIZES[k] for k in group.indices])[:-1]
        bases.append([tf.constant(part) for part in np.split(basis, ends)])
    return bases


def run(method, rows, rank=RANK, chunks=1, iterations=None):
    """Bases, one matrix for each group, and the error that is reported."""
    function, enough = METHODS[method]
    bases, error = function(
        moments_of(rows, chunks), start(rank), iterations or enough
    )
    return [np.concatenate(b).astype("float64") for b in bases], float(error)


def with_spectrum(*values, seed=0):
    """Rows of which each group has these singular values, in its columns."""
    matrix = np.zeros((EXAMPLES, sum(SIZES)))
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    for k, group in enumerate(GROUPS):
        left = orthonormal(EXAMPLES, len(values), seed + 2 * k)
        right = orthonormal(group.size, len(values), seed + 2 * k + 1)
        columns = np.concatenate(
            [np.arange(starts[i], starts[i + 1]) for i in group.indices]
        )
        matrix[:, columns] = left * values @ right.T
    return matrix


# A gap after the third: later directions shrink by 36 per iteration.
GAP = with_spectrum(9, 7.5, 6, 1, 0.9, 0.8, 0.5, 0.1, 0.01)
# Rounding error of sums of 30 and 16 numbers and of orthonormalization, in the
# largest eigenvalue, divided by the gap between the third and the fourth.
ROUNDING = 100 * 2.0**-24 * 9**2 / (6**2 - 1)


class TestTopEigenspace:
    @EXACT
    def test_is_that_of_the_singular_vectors(self, method):
        bases, _ = run(method, GAP)
        for basis, group in zip(bases, GROUPS):
            expected = top_eigenspace(columns_of(GAP, group), RANK)
            assert largest_sine(basis, expected) < ROUNDING

    @EXACT
    def test_is_the_same_in_chunks(self, method):
        """30 rows are 4 chunks of 8, with 2 rows that pad."""
        whole, _ = run(method, GAP)
        parts, _ = run(method, GAP, chunks=4)
        for one, other in zip(whole, parts):
            assert largest_sine(one, other) < ROUNDING

    @EXACT
    def test_leading_directions_come_first(self, method):
        """A rank that is cut keeps the directions that matter."""
        rows = with_spectrum(9, 3, 1, 0.1)
        bases, _ = run(method, rows)
        for basis, group in zip(bases, GROUPS):
            expected = top_eigenspace(columns_of(rows, group), RANK)
            cosines = np.abs(np.sum(basis * expected, 0))
            np.testing.assert_allclose(cosines, 1, atol=1e-4)

    def test_power_iteration_is_what_it_says(self):
        """A single one, against its definition."""
        bases, _ = run("power", GAP, iterations=1)
        for basis, group, blocks in zip(bases, GROUPS, start()):
            own = columns_of(GAP, group)
            expected = own.T @ (own @ np.concatenate(blocks))
            assert largest_sine(basis, expected) < 1e-5
            # It has not converged: iterations are not free.
            assert largest_sine(basis, top_eigenspace(own, RANK)) > 1e-3

    def test_iterations_add_up(self):
        twice, _ = run("power", GAP, iterations=2)
        bases = start()
        for _ in range(2):
            bases, _ = eigenspaces.power(moments_of(GAP), bases, 1)
        for one, blocks in zip(twice, bases):
            np.testing.assert_allclose(one, np.concatenate(blocks), atol=1e-5)

    def test_lanczos_needs_fewer_passes_where_decay_is_slow(self):
        """One cycle passes three times over the rows."""
        rows = with_spectrum(*(k**-0.6 for k in range(1, 14)))
        found = {
            method: [
                largest_sine(basis, top_eigenspace(columns_of(rows, group), 3))
                for basis, group in zip(
                    run(method, rows, iterations=iterations)[0], GROUPS
                )
            ]
            for method, iterations in (("power", 3), ("lanczos", 1))
        }
        assert np.all(np.less(found["lanczos"], found["power"]))

    def test_lanczos_cycles_converge(self):
        """Without a restart a Krylov space of k steps is not the top k."""
        rows = with_spectrum(*(k**-0.6 for k in range(1, 14)))
        sines = [
            largest_sine(
                run("lanczos", rows, iterations=iterations)[0][0],
                top_eigenspace(columns_of(rows, GROUPS[0]), RANK),
            )
            for iterations in (1, 4, 16)
        ]
        assert sines[0] > 10 * sines[1] > 100 * sines[2]


_random = np.random.default_rng(5)
# `PublicGradients` scales rows down to a norm of 1e12.
DIFFICULT = {
    "zero gradients": np.zeros((EXAMPLES, sum(SIZES))),
    "one example repeated": np.tile(
        _random.normal(size=(1, sum(SIZES))), (EXAMPLES, 1)
    ),
    "fewer examples than directions": _random.normal(size=(2, sum(SIZES))),
    "one example": _random.normal(size=(1, sum(SIZES))),
    "as many directions as examples": _random.normal(size=(5, sum(SIZES))),
    "one group without gradients": GAP * np.repeat([0, 1, 0], SIZES),
    "steep decay": with_spectrum(*np.logspace(0, -8, 9)),
    "small": 1e-11 * GAP,
    "large": 1e11 * GAP,
    "of all sizes": GAP * np.logspace(-11, 11, EXAMPLES)[:, None],
}


class TestDifficultRows:
    @pytest.mark.parametrize("rank", [1, 5])
    @pytest.mark.parametrize("name", DIFFICULT)
    @EXACT
    def test_basis_is_orthonormal(self, method, name, rank):
        bases, error = run(method, DIFFICULT[name], rank, iterations=2)
        assert error <= 2.0**-13
        for basis in bases:
            assert np.isfinite(basis).all()
            assert np.abs(basis.T @ basis - np.eye(rank)).max() <= 1e-5

    @pytest.mark.parametrize("chunks", [1, 2])
    @pytest.mark.parametrize(
        "name",
        [
            "one example",
            "one example repeated",
            "fewer examples than directions",
        ],
    )
    @EXACT
    def test_basis_holds_all_rows_that_there_are(self, method, name, chunks):
        rows = DIFFICULT[name]
        bases, _ = run(method, rows, 5, chunks)
        for basis, group in zip(bases, GROUPS):
            own = columns_of(rows, group)
            outside = own - own @ basis @ basis.T
            # A share of 1e-8 of the energy.
            assert np.linalg.norm(outside) < 1e-4 * np.linalg.norm(own)

    @pytest.mark.parametrize("name", ["small", "large"])
    @EXACT
    def test_scale_does_not_matter(self, method, name):
        bases, _ = run(method, DIFFICULT[name])
        for basis, group in zip(bases, GROUPS):
            expected = top_eigenspace(columns_of(GAP, group), RANK)
            assert largest_sine(basis, expected) < ROUNDING


class TestSecondMoments:
    @pytest.mark.parametrize("chunks", [1, 4])
    def test_gram_matrices(self, chunks):
        found = moments_of(GAP, chunks).gram_matrices()
        for products, group in zip(found, GROUPS):
            own = columns_of(GAP, group)
            products = products.numpy()
            # Rows that pad follow all others, and are zero.
            assert not products[EXAMPLES:].any()
            assert not products[:, EXAMPLES:].any()
            np.testing.assert_allclose(
                products[:EXAMPLES, :EXAMPLES], own @ own.T, atol=1e-4
            )

    @pytest.mark.parametrize("chunks", [1, 4])
    def test_combinations(self, chunks):
        moments = moments_of(GAP, chunks)
        rows = -(-EXAMPLES // chunks) * chunks
        weights = _random.normal(size=(rows, RANK)).astype("float32")
        found = moments.combinations([tf.constant(weights)] * 2, start())
        for blocks, group in zip(found, GROUPS):
            expected = columns_of(GAP, group).T @ weights[:EXAMPLES]
            np.testing.assert_allclose(
                np.concatenate(blocks), expected, atol=1e-4
            )

    @pytest.mark.parametrize("chunks", [1, 4])
    def test_energies(self, chunks):
        found = moments_of(GAP, chunks).energies(start())
        for energies, group, blocks in zip(found, GROUPS, start()):
            expected = columns_of(GAP, group) @ np.concatenate(blocks)
            np.testing.assert_allclose(
                energies, np.sum(np.square(expected), 0), rtol=1e-5
            )
