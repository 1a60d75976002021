"""Top eigenspaces of the second moments of public gradients.

With G the public gradients of one parameter group, `[m, size]`, these are the
spans of the top right singular vectors of G. A basis is a list of blocks of
rows, one for each variable of the group: see `linear_algebra`. Each method
takes the `SecondMoments` of all groups and a basis of each, to start from or
to fill up with, and returns a basis of each and its orthonormality error.
"""

import tensorflow as tf

from tf_dpsub.gradients.rows import combine_rows, inner_products
from tf_dpsub.subspaces import linear_algebra

# Blocks of one cycle of the block Lanczos method.
_DEPTH = 3
# Eigenvalues below this share of the largest one are rounding errors.
_NULL = 1e-6


class SecondMoments:
    """`G^T G` of each group, through which chunks of rows of G pass.

    Args:
        gradients: `PublicGradients`.
        batch: what its `draw` returned.
        groups: list of `Group`.
        dtype: string, of the products that `times` takes. Defaults to
            `"float32"`.
    """

    def __init__(self, gradients, batch, groups: list, dtype: str = "float32"):
        self._groups, self._dtype = groups, dtype
        self._chunks, self._chunk_size = batch["real"].shape
        self._only = None
        if self._chunks == 1:
            self._only = gradients.rows(batch, 0)
        self._gradients, self._batch = gradients, batch

    def _fold(self, function, state):
        """As `PublicGradients.fold`."""
        if self._only is not None:
            return function(tf.constant(0), self._only, state)
        return self._gradients.fold(self._batch, function, state)

    def times(self, bases):
        """`G^T G V` of each group, in one pass over the rows.

        Args:
            bases: list over groups of lists of blocks.

        Returns:
            The same structure, of float32 tensors.
        """

        def cast(structure, dtype):
            return tf.nest.map_structure(lambda t: tf.cast(t, dtype), structure)

        def product(rows, basis):
            rows = cast(rows, self._dtype)
            coordinates = linear_algebra.multiply(rows, basis)
            return [combine_rows(coordinates, block) for block in rows]

        narrow = cast(bases, self._dtype)

        def add(_, rows, totals):
            products = [
                product(rows.of(group), basis)
                for group, basis in zip(self._groups, narrow)
            ]
            products = cast(products, tf.float32)
            return tf.nest.map_structure(tf.add, totals, products)

        return self._fold(add, _zeros_like(bases))

    def energies(self, bases) -> list:
        """Sums of squares of the rows along each direction of a basis.

        Args:
            bases: as for `times`.

        Returns:
            List over groups of `[k]`.
        """

        def add(_, rows, totals):
            coordinates = [
                linear_algebra.multiply(rows.of(group), basis)
                for group, basis in zip(self._groups, bases)
            ]
            return [
                total + tf.reduce_sum(tf.square(c), 0)
                for total, c in zip(totals, coordinates)
            ]

        return self._fold(add, [tf.zeros(b[0].shape[1]) for b in bases])

    def gram_matrices(self):
        """`G G^T` of each group, `[rows, rows]`, those that pad included."""
        if self._only is not None:
            return [self._only.gram(group) for group in self._groups]
        n, size = self._chunks, self._chunk_size

        def left(i, rows_i, arrays):
            def right(j, rows_j, arrays):
                return [
                    array.write(
                        i * n + j,
                        tf.add_n(
                            [*map(inner_products, rows_i.of(g), rows_j.of(g))]
                        ),
                    )
                    for array, g in zip(arrays, self._groups)
                ]

            return self._fold(right, arrays)

        arrays = self._fold(
            left,
            [
                tf.TensorArray(tf.float32, n * n, element_shape=[size, size])
                for _ in self._groups
            ],
        )
        return [
            tf.reshape(
                tf.transpose(
                    tf.reshape(array.stack(), [n, n, size, size]), [0, 2, 1, 3]
                ),
                [n * size, n * size],
            )
            for array in arrays
        ]

    def combinations(self, weights, bases) -> list:
        """`G^T U` of each group.

        Args:
            weights: list over groups of `[rows, k]`.
            bases: list over groups of lists of blocks, for their shapes.

        Returns:
            List over groups of lists of blocks `[size, k]`.
        """
        parts = [
            tf.reshape(w, [self._chunks, self._chunk_size, -1]) for w in weights
        ]

        def add(i, rows, totals):
            sums = [
                rows.combinations(group, part[i])
                for group, part in zip(self._groups, parts)
            ]
            return tf.nest.map_structure(tf.add, totals, sums)

        return self._fold(add, _zeros_like(bases))


def power(moments, bases, iterations):
    """Subspace iteration: `iterations` times `V <- orthonormal(G^T G V)`."""
    for _ in range(iterations):
        bases, errors = _orthonormal(moments.times(bases), bases)
    return bases, errors


def gram(moments, bases, iterations):
    """The exact eigenspaces, through the Gram matrices `G G^T`."""
    weights = []
    for products, basis in zip(moments.gram_matrices(), bases):
        values, vectors = tf.linalg.eigh(products)  # ascending
        k = min(basis[0].shape[1], values.shape[0])
        values, vectors = values[::-1][:k], vectors[:, ::-1][:, :k]
        vectors *= _inverse_roots(values, values[0])
        weights.append(tf.pad(vectors, [[0, 0], [0, basis[0].shape[1] - k]]))
    return _orthonormal(moments.combinations(weights, bases), bases)


def lanczos(moments, bases, iterations):
    """Block Lanczos with full reorthogonalisation, restarted.

    A cycle spans the Krylov space of the last basis, of up to three blocks of
    its width, and takes the top Ritz vectors.
    """
    for _ in range(iterations):
        bases, errors = _lanczos_cycle(moments, bases)
    return bases, errors


def _lanczos_cycle(moments, bases):
    krylov, images = [bases], [moments.times(bases)]
    for _ in range(_DEPTH - 1):
        krylov.append(
            [
                _new_directions(image, [block[g] for block in krylov])
                for g, image in enumerate(images[-1])
            ]
        )
        images.append(moments.times(krylov[-1]))
    vectors = [
        _ritz_vectors([k[g] for k in krylov], [i[g] for i in images])
        for g in range(len(bases))
    ]
    return _orthonormal(vectors, bases)


def _new_directions(image, earlier):
    """Orthonormal rest orthogonal to earlier blocks; zero where nothing is."""
    image = linear_algebra.normalized(image)
    for _ in range(2):  # the second time removes what rounding left
        for basis in earlier:
            inside = linear_algebra.right_multiply(
                basis, linear_algebra.gram(basis, image)
            )
            image = [a - b for a, b in zip(image, inside)]
        values, vectors = tf.linalg.eigh(linear_algebra.gram(image))
        image = linear_algebra.right_multiply(
            image, vectors * _inverse_roots(values, values[-1])
        )
    return image


def _ritz_vectors(krylov, images):
    """The best approximations of the top eigenvectors in a Krylov space."""
    images = linear_algebra.normalized(images)
    projected = tf.concat(
        [
            tf.concat([linear_algebra.gram(v, image) for image in images], 1)
            for v in krylov
        ],
        0,
    )
    width = krylov[0][0].shape[1]
    _, vectors = tf.linalg.eigh((projected + tf.transpose(projected)) / 2)
    weights = tf.split(vectors[:, ::-1][:, :width], len(krylov))
    parts = map(linear_algebra.right_multiply, krylov, weights)
    return [tf.add_n(blocks) for blocks in zip(*parts)]


def _inverse_roots(values, largest):
    """`values ** -0.5`, zero where a value is but a rounding error."""
    kept = values > _NULL * largest
    return tf.where(kept, tf.math.rsqrt(tf.where(kept, values, 1.0)), 0.0)


def _orthonormal(matrices, fills):
    pairs = map(linear_algebra.orthonormalize, matrices, fills)
    bases, errors = zip(*pairs)
    return list(bases), tf.reduce_max(errors)


def _zeros_like(structure):
    return tf.nest.map_structure(tf.zeros_like, structure)
