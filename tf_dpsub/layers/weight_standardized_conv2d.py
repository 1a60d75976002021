"""A convolution whose kernel is standardised, as networks without norms need.

After "Characterizing signal propagation to close the performance gap in
unnormalized ResNets" (Brock, De, Smith, ICLR 2021), as "Unlocking High-Accuracy
Differentially Private Image Classification through Scale" (De et al., 2022)
uses it.
"""

import keras
from keras import ops

from tf_dpsub.checks import check_positive


@keras.saving.register_keras_serializable("tf_dpsub")
class WeightStandardizedConv2D(keras.layers.Conv2D):
    """A `keras.layers.Conv2D` with a standardised kernel, and a learned gain.

    The kernel W of an output channel, with m and v the mean and the variance of
    its n numbers, is `gain (W - m) / sqrt(max(n v, epsilon))` where it is
    applied: the sum of its squares is that of `gain`. What is trained, clipped
    and perturbed is W and the gain, one number for each output channel.

    With group normalisation it replaces batch normalisation, which mixes
    examples. The graph engine proves it; as the kernel is computed from
    weights, per-example gradients of it are stored, one kernel for each
    example of a microbatch.

    Args: as `keras.layers.Conv2D`.
        epsilon: float, the least that `n v` is taken for. Defaults to `1e-4`.

    Example:

    ```python
    model = keras.Sequential([
        keras.Input((32, 32, 3)),
        tf_dpsub.layers.WeightStandardizedConv2D(64, 3, padding="same"),
        keras.layers.GroupNormalization(16),
        keras.layers.Activation("relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(10),
    ])
    ```

    Reference:
        - [Brock et al., 2021](https://arxiv.org/abs/2101.08692)
        - [De et al., 2022](https://arxiv.org/abs/2204.13650)
    """

    def __init__(self, *args, epsilon: float = 1e-4, **kwargs):
        super().__init__(*args, **kwargs)
        check_positive("epsilon", epsilon)
        self.epsilon = epsilon

    def build(self, input_shape):
        super().build(input_shape)
        self.gain = self.add_weight(
            name="gain", shape=(self.filters,), initializer="ones"
        )

    def standardized(self, kernel):
        """The kernel that is applied, computed in float32.

        Args:
            kernel: tensor, `[height, width, input channels, filters]`.

        Returns:
            Tensor of the same shape and type.
        """
        w = ops.cast(kernel, "float32")
        centred = w - ops.mean(w, axis=(0, 1, 2))
        squares = ops.sum(ops.square(centred), axis=(0, 1, 2))  # [filters]
        gain = ops.cast(self.gain, "float32")
        scale = gain / ops.sqrt(ops.maximum(squares, self.epsilon))
        return ops.cast(centred * scale, kernel.dtype)

    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, self.standardized(kernel))

    # Keras saves the kernel and the bias of a convolution alone.

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["gain"] = self.gain

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.gain.assign(store["gain"])

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}
