"""A dense layer of any axes, with low-rank gradient carriers."""

import string

import keras
from keras import ops

from tf_dpsub.layers.carriers import Reparametrized


@keras.saving.register_keras_serializable("tf_dpsub")
class RGPEinsumDense(Reparametrized, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense` whose gradient is learned through carriers.

    It computes the same as `EinsumDense`, has the same weights, and trains like
    it, unless `tf_dpsub.optimizers.RGP` trains it. The kernel is taken as a
    matrix from the axes that it sums over to those that it adds.

    Args:
        equation: string, as for `einsum`. No axis of the kernel may be one of
            the inputs and of the outputs.
        output_shape: int, or tuple of int, without the batch axis.
        rank: int, the rank of the carriers. A kernel that is narrower has none.
        **kwargs: the other arguments of `keras.layers.EinsumDense`.

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352)
    """

    plain = keras.layers.EinsumDense

    def __init__(self, equation, output_shape, *args, rank: int, **kwargs):
        super().__init__(equation, output_shape, *args, **kwargs)
        self._matrix_axes(self)
        self._set_carrier_rank(rank)

    def call(self, inputs, training=None):
        x = ops.einsum(self.equation, inputs, self.kernel)
        x = self._with_carriers(x, inputs, training)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)

    @staticmethod
    def _matrix_axes(layer):
        try:
            return matrix_axes(layer.equation)
        except ValueError as e:
            raise ValueError(f"{e} Use keras.layers.EinsumDense.") from e

    def _carried(self, inputs):
        labels, kernel, outputs = _terms(self.equation)
        order, split = self._matrix_axes(self)
        summed = "".join(kernel[k] for k in order[:split])
        added = "".join(kernel[k] for k in order[split:])
        rank = next(c for c in string.ascii_letters if c not in self.equation)
        kept = "".join(c for c in labels if c not in summed)
        coordinates = ops.einsum(
            f"{labels},{summed}{rank}->{kept}{rank}",
            inputs,
            self.carriers.left,
        )
        return ops.einsum(
            f"{kept}{rank},{rank}{added}->{outputs}",
            coordinates,
            self.carriers.right,
        )


def matrix_axes(equation: str) -> tuple:
    """Axes by which a kernel is a matrix from inputs to outputs.

    Args:
        equation: string, that of an `EinsumDense` layer.

    Returns:
        The order of the kernel's axes, those that the equation sums over first,
        and the number of these.

    Raises:
        ValueError: if there are none of either kind, or others.
    """
    inputs, kernel, outputs = _terms(equation)
    summed = [k for k, label in enumerate(kernel) if label not in outputs]
    added = [k for k, label in enumerate(kernel) if label in outputs]
    if not summed or not added or {kernel[k] for k in added} & set(inputs):
        raise ValueError(
            "Expected an equation whose kernel is a matrix from axes of the "
            f"inputs to others of the outputs, got '{equation}'."
        )
    return (*summed, *added), len(summed)


def _terms(equation):
    """Labels of the inputs, of the kernel and of the outputs."""
    inputs, kernel, outputs = equation.replace("->", ",").split(",")
    return inputs, kernel, outputs
