"""A dense layer with low-rank gradient carriers."""

import keras
from keras import ops

from tf_dpsub.layers.carriers import Reparametrized


@keras.saving.register_keras_serializable("tf_dpsub")
class RGPDense(Reparametrized, keras.layers.Dense):
    """`keras.layers.Dense` whose gradient is learned through carriers.

    It computes the same as `Dense`, has the same weights, and trains like it,
    unless `tf_dpsub.optimizers.RGP` trains it.

    Args:
        units: int, number of outputs.
        rank: int, the rank of the carriers. A kernel that is narrower has none.
        **kwargs: the other arguments of `keras.layers.Dense`.

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352)
    """

    plain = keras.layers.Dense

    def __init__(self, units, *args, rank: int, **kwargs):
        super().__init__(units, *args, **kwargs)
        self._set_carrier_rank(rank)

    def call(self, inputs, training=None):
        x = ops.matmul(inputs, self.kernel)
        x = self._with_carriers(x, inputs, training)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)

    @staticmethod
    def _matrix_axes(layer):
        return (0, 1), 1

    def _carried(self, inputs):
        return ops.matmul(
            ops.matmul(inputs, self.carriers.left), self.carriers.right
        )
