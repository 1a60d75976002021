"""A convolution with low-rank gradient carriers."""

import keras
from keras import ops

from tf_dpsub.layers.carriers import Reparametrized


@keras.saving.register_keras_serializable("tf_dpsub")
class RGPConv2D(Reparametrized, keras.layers.Conv2D):
    """`keras.layers.Conv2D` whose gradient is learned through carriers.

    It computes the same as `Conv2D`, has the same weights, and trains like it,
    unless `tf_dpsub.optimizers.RGP` trains it. The kernel is taken as a matrix
    from patches to filters: L is a convolution of `rank` filters of the same
    size, R one of size 1×1.

    Args:
        filters: int, number of outputs at each place.
        kernel_size: int, or pair of int, height and width of a patch.
        rank: int, the rank of the carriers. A kernel that is narrower has none.
        **kwargs: the other arguments of `keras.layers.Conv2D`, with `groups=1`.

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352)
    """

    plain = keras.layers.Conv2D

    def __init__(self, filters, kernel_size, *args, rank: int, **kwargs):
        super().__init__(filters, kernel_size, *args, **kwargs)
        self._matrix_axes(self)
        self._set_carrier_rank(rank)

    def call(self, inputs, training=None):
        x = self.convolution_op(inputs, self.kernel)
        x = self._with_carriers(x, inputs, training)
        if self.use_bias:
            shape = [1, 1, 1, 1]
            shape[self._channel_axis] = self.filters
            x = ops.add(x, ops.reshape(self.bias, shape))
        return x if self.activation is None else self.activation(x)

    @property
    def _channel_axis(self):
        return -1 if self.data_format == "channels_last" else 1

    @staticmethod
    def _matrix_axes(layer):
        if layer.groups != 1:
            raise ValueError(
                f"Expected groups=1, got {layer.groups}: the kernel is not one "
                "matrix. Use keras.layers.Conv2D."
            )
        return (0, 1, 2, 3), 3

    def _carried(self, inputs):
        # From patches to `rank` channels, and from these to the filters.
        coordinates = self.convolution_op(inputs, self.carriers.left)
        return ops.conv(
            coordinates,
            ops.reshape(self.carriers.right, [1, 1, -1, self.filters]),
            data_format=self.data_format,
        )
