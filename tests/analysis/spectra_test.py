"""Singular values, against NumPy's."""

import numpy as np
import pytest

from tf_dpsub import analysis
from tf_dpsub.analysis import spectra

_random = np.random.default_rng(0)


def decaying(rows, columns, exponent=0.6):
    """A matrix whose singular values follow a power law, and the values."""
    count = min(rows, columns)
    values = np.arange(1, count + 1) ** -exponent
    left = np.linalg.qr(_random.normal(size=(rows, count)))[0]
    right = np.linalg.qr(_random.normal(size=(columns, count)))[0]
    return ((left * values) @ right.T).astype("float32"), values


class Parameter:
    """The attributes of a variable that a store reads."""

    def __init__(self, path, *shape):
        self.path, self.shape = path, shape


def stored(folder, matrix, dtype="float32"):
    store = analysis.GradientStore.create(
        folder, [Parameter("kernel", matrix.shape[1])], dtype=dtype
    )
    for step, row in enumerate(matrix):
        store.append([row], step)
    return store


class TestTopSingularValues:
    @pytest.mark.parametrize("few", [2**14, 0])
    def test_are_those_of_numpy(self, monkeypatch, few):
        """This holds by all products of rows, and by passes over the stack."""
        monkeypatch.setattr(spectra, "_FEW", few)
        monkeypatch.setattr(spectra, "_BLOCK", 70 * 13)
        matrix, _ = decaying(70, 200)
        result = analysis.top_singular_values(
            matrix, 8, iterations=60, directions=True
        )
        _, values, right = np.linalg.svd(matrix.astype(float))
        np.testing.assert_allclose(
            result.singular_values, values[:8], rtol=1e-4
        )
        assert analysis.subspace_distance(result.directions, right[:8].T) < 1e-3
        signs = np.sign(np.sum(result.directions.T * right[:8], 1))
        np.testing.assert_allclose(
            result.directions * signs, right[:8].T, atol=5e-3
        )
        assert result.energy == pytest.approx(np.sum(values**2), rel=1e-5)

    def test_both_ways_make_the_same_iterations(self, monkeypatch):
        matrix, _ = decaying(90, 60)
        result = []
        for few in (2**14, 0):
            monkeypatch.setattr(spectra, "_FEW", few)
            result.append(analysis.top_singular_values(matrix, 5, iterations=1))
        np.testing.assert_allclose(
            result[0].singular_values, result[1].singular_values, rtol=1e-5
        )

    def test_more_iterations_come_closer_from_below(self):
        matrix, values = decaying(120, 150)
        errors = [
            values[:10]
            - analysis.top_singular_values(
                matrix, 10, iterations=n
            ).singular_values
            for n in (1, 3, 10, 40)
        ]
        assert all((e > -1e-5).all() for e in errors)
        sizes = [np.linalg.norm(e) for e in errors]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > 10 * sizes[-1]

    def test_of_a_stack_of_low_rank(self):
        matrix = np.outer(np.arange(6.0), np.ones(9))
        result = analysis.top_singular_values(matrix, 3, directions=True)
        expected = np.linalg.norm(matrix)
        np.testing.assert_allclose(
            result.singular_values, [expected, 0, 0], atol=1e-4
        )
        np.testing.assert_allclose(np.abs(result.directions[:, 0]), 1 / 3)
        assert not result.directions[:, 1:].any()

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_of_gradients_on_disk(self, tmp_path, dtype):
        matrix, values = decaying(40, 300)
        # As small as those of a large model, below float16's own range.
        store = stored(tmp_path, 1e-7 * matrix, dtype)
        result = analysis.top_singular_values(store, 5, iterations=50)
        np.testing.assert_allclose(
            result.singular_values, 1e-7 * values[:5], rtol=1e-3
        )

    def test_of_some_rows(self, tmp_path):
        matrix, _ = decaying(40, 30)
        store = stored(tmp_path, matrix)
        some = slice(10, 25)
        expected = np.linalg.svd(matrix[some], compute_uv=False)
        for stack in (matrix, store):
            result = analysis.top_singular_values(
                stack, 3, iterations=80, rows=some
            )
            np.testing.assert_allclose(
                result.singular_values, expected[:3], rtol=1e-4
            )

    def test_the_seed_is_of_the_start(self):
        matrix, _ = decaying(60, 60)
        first, same, other = (
            analysis.top_singular_values(matrix, 3, iterations=1, seed=s)
            for s in (0, 0, 1)
        )
        assert (first.singular_values == same.singular_values).all()
        assert (first.singular_values != other.singular_values).any()

    @pytest.mark.parametrize("k, kind", [(8, "rows"), (5, "columns")])
    def test_more_than_there_are(self, k, kind):
        matrix = np.ones((7, 20)) if kind == "rows" else np.ones((20, 4))
        with pytest.raises(ValueError, match=f"Expected k <= .*, got {k}"):
            analysis.top_singular_values(matrix, k)

    @pytest.mark.parametrize(
        "changes", [{"k": 0}, {"k": 2.0}, {"iterations": 0}]
    )
    def test_counts_below_one(self, changes):
        arguments = {"k": 1} | changes
        with pytest.raises(ValueError, match="Expected (k|iterations) >= 1"):
            analysis.top_singular_values(np.ones((3, 3)), **arguments)

    def test_a_row_that_is_not_finite(self):
        matrix = np.ones((5, 4))
        matrix[3, 2] = np.nan
        with pytest.raises(ValueError, match="NaN or infinity in row 3"):
            analysis.top_singular_values(matrix, 1)
        with pytest.raises(ValueError, match="NaN or infinity in row 3"):
            analysis.top_singular_values(matrix, 1, rows=slice(2, 5))

    def test_no_gradients(self):
        with pytest.raises(ValueError, match="one gradient at least"):
            analysis.top_singular_values(np.ones((0, 4)), 1)


class TestStableRank:
    def test_of_matrices(self):
        assert analysis.stable_rank(np.eye(5)) == pytest.approx(5)
        assert analysis.stable_rank(np.ones((4, 6))) == pytest.approx(1)
        assert analysis.stable_rank(np.zeros((4, 6))) == 0

    def test_of_singular_values(self):
        assert analysis.stable_rank([1.0, 2.0, 1.0]) == pytest.approx(1.5)


def test_explained_energy():
    matrix, values = decaying(30, 20)
    result = analysis.top_singular_values(matrix, 20, iterations=1)
    expected = np.cumsum(values**2) / np.sum(values**2)
    np.testing.assert_allclose(
        analysis.explained_energy(result), expected, rtol=1e-4
    )
    nothing = analysis.top_singular_values(np.zeros((4, 4)), 2)
    assert analysis.explained_energy(nothing).tolist() == [0, 0]


class TestDecayExponent:
    def test_of_a_power_law(self):
        ranks = np.arange(1, 101)
        fit = analysis.decay_exponent(3 * ranks**-0.6)
        assert fit.exponent == pytest.approx(0.6)
        np.testing.assert_allclose(fit(ranks), 3 * ranks**-0.6)
        low, high = fit.interval
        assert low == pytest.approx(high)

    def test_the_interval_has_its_coverage(self):
        ranks = np.arange(1, 41)
        covered = 0
        for _ in range(400):
            noise = np.exp(0.1 * _random.normal(size=40))
            fit = analysis.decay_exponent(ranks**-0.6 * noise, confidence=0.8)
            covered += fit.interval[0] < 0.6 < fit.interval[1]
        # 0.8, give or take four standard deviations.
        assert 0.72 < covered / 400 < 0.88

    def test_of_some_ranks(self):
        values = np.concatenate([np.ones(10), np.arange(11.0, 51) ** -2])
        fit = analysis.decay_exponent(values, first=11, last=50)
        assert fit.exponent == pytest.approx(2)

    def test_ends_where_values_are_zero(self):
        values = np.append(np.arange(1.0, 11) ** -1, np.zeros(5))
        assert analysis.decay_exponent(values).exponent == pytest.approx(1)

    @pytest.mark.parametrize(
        "values, changes",
        [
            ([1.0, 0.5], {}),
            ([1.0, 0.5, 0.0], {}),
            ([1.0, 0.5, 0.2, 0.1], {"first": 3}),
            ([1.0, 0.5, 0.2, 0.1], {"first": 0}),
        ],
    )
    def test_too_few(self, values, changes):
        with pytest.raises(ValueError, match="three singular values above 0"):
            analysis.decay_exponent(values, **changes)

    def test_no_confidence(self):
        with pytest.raises(ValueError, match="0 < confidence < 1, got 95"):
            analysis.decay_exponent([3.0, 2.0, 1.0], confidence=95)
