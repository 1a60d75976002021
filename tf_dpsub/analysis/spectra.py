"""Singular values of tall stacks of gradients, and how fast they decay."""

import dataclasses
import math

import numpy as np
from scipy import stats

from tf_dpsub.checks import check_count, check_fraction

# Numbers of a stack in memory at a time.
_BLOCK = 2**27
# Number of rows whose products all fit into memory, too.
_FEW = 2**14


@dataclasses.dataclass(frozen=True, eq=False)
class Spectrum:
    """The top of a singular value decomposition.

    Attributes:
        singular_values: float64 `[k]`, largest first.
        directions: float32 `[columns, k]`, the right singular vectors; None if
            they were not asked for.
        energy: float, the sum of squares of all singular values.
        gram: float64 `[rows, rows]`, the inner products of the rows; None if
            there are too many to form them.
    """

    singular_values: np.ndarray
    directions: np.ndarray | None
    energy: float
    gram: np.ndarray | None


def top_singular_values(
    stack,
    k: int,
    *,
    iterations: int = 10,
    rows=None,
    directions: bool = False,
    seed: int = 0,
):
    """Finds the largest singular values of a stack, by orthogonal iteration.

    From random directions, `U <- orthonormal basis of (G G^T U)`, and at the
    end the singular values of G in the span of U. The stack may exceed memory:
    it is read in blocks of columns, once for all iterations if rows are few,
    and once for each otherwise.

    Args:
        stack: array `[rows, columns]`, or `GradientStore`.
        k: int, how many.
        iterations: int. Defaults to `10`.
        rows: slice of the rows to take. Defaults to `None`: all.
        directions: bool, whether the right singular vectors are wanted, which
            take `4 k columns` bytes. Defaults to `False`.
        seed: int, of the directions at the start. Defaults to `0`.

    Returns:
        A `Spectrum`.

    Raises:
        ValueError: if k exceeds the number of rows or of columns, or a row is
            not finite.

    Example:

    ```python
    spectrum = tf_dpsub.analysis.top_singular_values(gradients, 100)
    fit = tf_dpsub.analysis.decay_exponent(spectrum.singular_values)
    ```

    Reference:
        - [Li et al., 2022](https://arxiv.org/abs/2207.00160), section 4 and
          Algorithm 2
        - [Golub, Van Loan, 2013](https://doi.org/10.56021/9781421407944),
          section 8.2.4
    """
    check_count("k", k)
    check_count("iterations", iterations)
    matrix = _Matrix(stack, rows)
    if k > min(matrix.shape):
        raise ValueError(
            f"Expected k <= {min(matrix.shape)}, got {k}: the stack has "
            f"{matrix.shape[0]} gradients of {matrix.shape[1]} numbers."
        )
    count = matrix.shape[0]
    # All products of few rows cost no more than the iterations.
    if count <= min(4 * k * iterations, _FEW):
        gram = matrix.gram()
        product, energy = gram.__matmul__, float(np.trace(gram))
    else:
        gram, product = None, matrix.times_transpose
        energy = matrix.energy()
    start = np.random.default_rng(seed).normal(size=(count, k))
    left_vectors, _ = np.linalg.qr(start)
    for _ in range(iterations):
        left_vectors, _ = np.linalg.qr(product(left_vectors))
    squares, rotation = np.linalg.eigh(left_vectors.T @ product(left_vectors))
    order = np.argsort(squares)[::-1]
    # Rounding can make zero eigenvalues slightly negative.
    values = np.sqrt(np.maximum(squares[order], 0.0))
    vectors = None
    if directions:
        vectors = matrix.right_vectors(
            left_vectors @ rotation[:, order], values
        )
    return Spectrum(values, vectors, energy, gram)


class _Matrix:
    """A stack through which blocks of columns pass."""

    def __init__(self, stack, rows):
        self._stack = stack if hasattr(stack, "block") else np.asarray(stack)
        self._rows = slice(*(rows or slice(None)).indices(stack.shape[0]))
        count = len(range(stack.shape[0])[self._rows])
        self.shape = count, stack.shape[1]
        if not count:
            raise ValueError("Expected one gradient at least, got none.")

    def _blocks(self):
        """Pairs of a slice of columns and their block, `[rows, columns]`."""
        size = max(1, _BLOCK // self.shape[0])
        for first in range(0, self.shape[1], size):
            columns = slice(first, min(first + size, self.shape[1]))
            yield columns, self._block(columns)

    def _block(self, columns):
        if hasattr(self._stack, "block"):
            return self._stack.block(self._rows, columns)
        block = np.asarray(self._stack[self._rows, columns], np.float32)
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            raise ValueError(
                "Expected finite gradients, got NaN or infinity in row "
                f"{range(len(self._stack))[self._rows][np.argmin(finite)]}."
            )
        return block

    def gram(self):
        """`G G^T`, float64 `[rows, rows]`."""
        total = np.zeros((self.shape[0],) * 2)
        for _, block in self._blocks():
            total += block @ block.T
        return total

    def energy(self):
        return float(
            sum(
                np.sum(np.square(b), dtype=np.float64)
                for _, b in self._blocks()
            )
        )

    def times_transpose(self, left_vectors):
        """`G G^T U`."""
        left_vectors = left_vectors.astype(np.float32)
        total = np.zeros(left_vectors.shape)
        for _, block in self._blocks():
            total += block @ (block.T @ left_vectors)
        return total

    def right_vectors(self, left_vectors, values):
        """`G^T U / S`, orthonormal columns; zero where S is."""
        scale = np.where(
            values > 1e-6 * values[0], 1 / np.maximum(values, 1e-300), 0.0
        )
        scaled = (left_vectors * scale).astype(np.float32)
        vectors = np.empty((self.shape[1], left_vectors.shape[1]), np.float32)
        for columns, block in self._blocks():
            np.matmul(block.T, scaled, out=vectors[columns])
        return vectors


def stable_rank(matrix) -> float:
    """Stable rank of a matrix: its number of directions, weighed by energy.

    Args:
        matrix: array `[p, d]`, or its singular values `[k]`, all of them.

    Returns:
        float, `||A||_F^2 / ||A||_2^2`; 0 for a matrix of zeros.
    """
    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim == 2:
        matrix = np.linalg.svd(matrix, compute_uv=False)
    squares = np.sort(matrix**2)[::-1]
    return float(squares.sum() / squares[0]) if squares[0] else 0.0


def explained_energy(spectrum):
    """Shares of the energy of a stack in its first directions.

    Args:
        spectrum: `Spectrum`.

    Returns:
        Float array `[k]`, of the first 1, 2, ..., k directions.
    """
    inside = np.cumsum(spectrum.singular_values**2)
    return inside / spectrum.energy if spectrum.energy else inside


@dataclasses.dataclass(frozen=True)
class DecayFit:
    """A power law through singular values, `scale * rank^-exponent`.

    Attributes:
        exponent: float.
        interval: pair of floats, the confidence interval of the exponent.
        scale: float.
    """

    exponent: float
    interval: tuple
    scale: float

    def __call__(self, ranks):
        """The values of the fit at some ranks."""
        return self.scale * np.asarray(ranks, float) ** -self.exponent


def decay_exponent(
    singular_values,
    *,
    first: int = 1,
    last: int | None = None,
    confidence: float = 0.95,
):
    """Fits a line to logarithms of singular values by those of their ranks.

    The interval is that of ordinary least squares. It takes deviations from the
    line for independent, which those of neighbouring singular values are not:
    it shows how straight the line is, not how another run would differ.

    Args:
        singular_values: array, largest first.
        first: int, the first rank to take. Defaults to `1`, the largest value.
        last: int, the last rank. Defaults to `None`: that of the smallest
            value above 0.
        confidence: float in (0, 1). Defaults to `0.95`.

    Returns:
        A `DecayFit`.

    Raises:
        ValueError: if there are fewer than three values above 0 to fit.
    """
    check_fraction("confidence", confidence)
    values = np.asarray(singular_values, np.float64)[first - 1 : last]
    values = values[: int(np.sum(np.cumprod(values > 0)))]
    if first < 1 or len(values) < 3:
        raise ValueError(
            "Expected three singular values above 0 at least, from rank 1 on, "
            f"got {len(values)} from rank {first} on."
        )
    ranks = np.arange(first, first + len(values))
    fit = stats.linregress(np.log(ranks), np.log(values))
    quantile = stats.t.ppf(0.5 + confidence / 2, len(values) - 2)
    reach = quantile * fit.stderr
    return DecayFit(
        exponent=-float(fit.slope),
        interval=(float(-fit.slope - reach), float(-fit.slope + reach)),
        scale=math.exp(fit.intercept),
    )
