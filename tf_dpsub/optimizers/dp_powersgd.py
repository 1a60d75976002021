"""DP-PowerSGD: the low-rank part of DP-SGD's gradients.

The baseline of "Large Scale Private Learning via Low-rank Reparametrization"
(Yu, Zhang, Chen, Yin, Liu, ICML 2021), after "PowerSGD" (Vogels, Karimireddy,
Jaggi, NeurIPS 2019, Algorithm 1).
"""

import math

import keras
import tensorflow as tf

from tf_dpsub.checks import check_count
from tf_dpsub.optimizers.dpsgd import DPSGD
from tf_dpsub.primitives.public_state import seed_variable
from tf_dpsub.subspaces import linear_algebra


@keras.saving.register_keras_serializable("tf_dpsub")
class DPPowerSGD(DPSGD):
    """DP-SGD whose noisy gradients are made low-rank afterwards.

    The gradient M of each kernel, as a matrix, is replaced by `P P^T M`, with
    P an orthonormal basis of `M Q`, and Q the last `M^T P`: one power iteration
    with a warm start, which keeps the `rank` largest directions and drops what
    noise the others have. Kernels that are not wider than the rank, and biases,
    keep their gradients.

    Formal guarantees: what is released at a step is the noisy sum of `DPSGD`,
    and its event accounts for it. All else is post-processing.

    Args: as `DPSGD`.
        rank: int, the rank of gradients.

    Example:

    ```python
    optimizer = tf_dpsub.optimizers.DPPowerSGD(
        keras.optimizers.SGD(0.1, momentum=0.9), rank=16,
        l2_norm_clip=1.0, noise_multiplier=1.1, batch_size=1000,
    )
    ```

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352)
        - [Vogels et al., 2019](https://arxiv.org/abs/1905.13727)
    """

    has_fixed_coordinates = False

    def __init__(self, optimizer, *, rank: int, **kwargs):
        super().__init__(optimizer, **kwargs)
        check_count("rank", rank)
        self._rank = int(rank)

    rank = property(lambda self: self._rank)

    @property
    def description(self):
        return f"DPPowerSGD of rank {self.rank}"

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        seed = seed_variable(self, self.seed)
        self._shapes = [matrix_shape(v.shape) for v in variables]
        self._right = [
            None
            if min(shape) <= self.rank
            else self._first_right(shape, k, seed)
            for k, shape in enumerate(self._shapes)
        ]

    def _first_right(self, shape, k, seed):
        key = tf.stack(
            [tf.convert_to_tensor(seed.value), tf.constant(k, tf.int64)]
        )
        return self.add_variable(
            (shape[1], self.rank),
            initializer=lambda shape, dtype: tf.random.stateless_normal(
                shape, key
            ),
            aggregation="only_first_replica",
            name="right",
        )

    def privatize(self, noisy_sums):
        return [
            mean if right is None else self._low_rank(mean, shape, right)
            for mean, shape, right in zip(
                super().privatize(noisy_sums), self._shapes, self._right
            )
        ]

    def _low_rank(self, gradient, shape, right):
        matrix = tf.reshape(gradient, shape)
        left = linear_algebra.normalized(matrix) @ tf.convert_to_tensor(right)
        left = tf.linalg.qr(left).q
        new = tf.matmul(matrix, left, transpose_a=True)
        # Of a gradient of zero nothing can be learned.
        right.assign(
            tf.cond(
                tf.reduce_any(new != 0),
                lambda: tf.linalg.qr(new).q,
                lambda: tf.convert_to_tensor(right),
            )
        )
        return tf.reshape(
            tf.matmul(left, new, transpose_b=True), gradient.shape
        )

    def get_config(self):
        return {**super().get_config(), "rank": self.rank}


def matrix_shape(shape: tuple):
    """The most nearly square matrix that a kernel's axes make, in their order.

    Args:
        shape: tuple of int.

    Returns:
        Two ints; of a vector, the second is 1.
    """
    size = math.prod(shape)
    rows = [math.prod(shape[:k]) for k in range(1, len(shape))] or [size]
    best = min(rows, key=lambda p: max(p, size // p))
    return best, size // best
