"""Which weights of a model are matrices from inputs to outputs."""

import re
from collections.abc import Mapping

import keras

from tf_dpsub.checks import is_int
from tf_dpsub.gradients.matrices import KernelMatrix
from tf_dpsub.layers.einsum_dense import matrix_axes

_FILTERS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)


def check_splits(splits):
    """Raises `ValueError` unless `splits` is what `kernel_matrices` takes."""
    if splits is not None and not (
        isinstance(splits, Mapping)
        and all(
            isinstance(pattern, str) and is_int(split) and split >= 0
            for pattern, split in splits.items()
        )
    ):
        raise ValueError(
            "Expected splits from regular expressions to numbers of axes >= 0, "
            f"got {splits!r}."
        )


def kernel_matrices(model, variables: list, splits=None) -> list:
    """The matrix that each weight is; None for one that is a vector.

    Kernels of dense and recurrent layers, embeddings, and all other weights of
    two axes have inputs along the first; filters have them along all axes but
    the last, and kernels of `EinsumDense` along those that the equation sums
    over. Biases are vectors, and so are weights with one axis longer than 1.

    Args:
        model: built `keras.Model`.
        variables: list of its trainable variables.
        splits: dict from regular expressions, which a weight's path matches
            somewhere, to the number of its first axes that are those of the
            inputs, or to 0 for a vector. Defaults to `None`, none.

    Returns:
        List of `tf_dpsub.gradients.matrices.KernelMatrix` or None.

    Raises:
        ValueError: if a weight has no split that is known, a pattern matches
            none, or a number of axes is out of range.
    """
    splits = dict(splits or {})
    for pattern in splits:
        if not any(re.search(pattern, v.path) for v in variables):
            raise ValueError(
                f"Expected patterns of splits that match a weight of "
                f"'{model.name}', got {pattern!r}. There are "
                f"{', '.join(v.path for v in variables)}."
            )
    owners = {
        id(v): layer
        for layer in model._flatten_layers(include_self=True)
        for v in layer._trainable_variables
    }
    return [_matrix(v, owners.get(id(v)), splits) for v in variables]


def _matrix(variable, layer, splits):
    shape = tuple(variable.shape)
    axes = tuple(range(len(shape)))
    if sum(size > 1 for size in shape) < 2:
        return None
    given = [n for p, n in splits.items() if re.search(p, variable.path)]
    if given:
        if given[0] >= len(shape):
            raise ValueError(
                f"Expected a split of {variable.path} below {len(shape)}, its "
                f"number of axes, got {given[0]}."
            )
        return KernelMatrix(shape, axes, given[0]) if given[0] else None
    if isinstance(layer, keras.layers.EinsumDense):
        if variable is layer.bias:
            return None
        if variable is layer._kernel:
            try:
                return KernelMatrix(shape, *matrix_axes(layer.equation))
            except ValueError as e:
                raise _no_split(variable, layer) from e
    if isinstance(layer, _FILTERS) and getattr(layer, "groups", 1) == 1:
        return KernelMatrix(shape, axes, len(shape) - 1)
    if len(shape) == 2:
        return KernelMatrix(shape, axes, 1)
    raise _no_split(variable, layer)


def _no_split(variable, layer):
    return ValueError(
        "Expected weights that are matrices from inputs to outputs, got "
        f"{variable.path} of shape {tuple(variable.shape)}, of a "
        f"{type(layer).__name__} layer, for which no such split is known. "
        f"Pass splits={{{variable.path!r}: n}}, where the first n axes are "
        "those of the inputs, or n = 0 to take it as a vector."
    )
