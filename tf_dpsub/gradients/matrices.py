"""Kernels as matrices from inputs to outputs."""

import math

import tensorflow as tf


class KernelMatrix:
    """The matrix `[inputs, outputs]` that a kernel of any shape is.

    Args:
        shape: sequence of int, that of the kernel.
        order: tuple of int, the axes of the kernel, those of the inputs first.
        split: int, the number of axes that are those of the inputs.

    Attributes:
        inputs: int, number of rows.
        outputs: int, number of columns.
    """

    def __init__(self, shape, order: tuple, split: int):
        self._order = tuple(order)
        self._split = split
        self._shape = tuple(shape[axis] for axis in self._order)
        self.inputs = math.prod(self._shape[:split])
        self.outputs = math.prod(self._shape[split:])

    @property
    def keeps_order(self) -> bool:
        """Whether the matrix has the numbers of the kernel in their order."""
        return self._order == tuple(sorted(self._order))

    @property
    def is_transposed(self) -> bool:
        """Whether its transpose has the numbers of the kernel in order."""
        swapped = self._order[self._split :] + self._order[: self._split]
        return swapped == tuple(sorted(self._order))

    def matrix(self, tensor):
        """A tensor of the kernel's shape, as a matrix `[inputs, outputs]`."""
        return tf.reshape(
            tf.transpose(tensor, self._order), [self.inputs, self.outputs]
        )

    def matrices(self, rows):
        """Rows `[batch, *shape of the kernel]`, `[batch, inputs, outputs]`."""
        order = [0, *(axis + 1 for axis in self._order)]
        return tf.reshape(
            tf.transpose(rows, order), [-1, self.inputs, self.outputs]
        )

    def like_kernel(self, matrix):
        """A matrix `[inputs, outputs]`, in the kernel's shape."""
        inverse = [self._order.index(axis) for axis in range(len(self._order))]
        return tf.transpose(tf.reshape(matrix, self._shape), inverse)
