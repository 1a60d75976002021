"""DP-SGD.

Implementation of "Deep Learning with Differential Privacy" (Abadi et al.,
2016, Algorithm 1).
"""

import keras

from tf_dpsub.optimizers.private_optimizer import PrivateOptimizer
from tf_dpsub.primitives.clipping import clipped_sum
from tf_dpsub.primitives.release import Release


@keras.saving.register_keras_serializable("tf_dpsub")
class DPSGD(PrivateOptimizer):
    """Clips per-example gradients, adds them up, and adds noise to each weight.

    `gradient = (sum of clip(g_i, C) + N(0, sigma^2 C^2 I)) / B`, with
    `C = l2_norm_clip`, `sigma = noise_multiplier` and `B = batch_size`.

    Formal guarantees: what is released at a step is the noisy sum. If one
    example is replaced by an empty one, the sum moves by at most `C` in
    Euclidean norm. A step is accounted for by one Gaussian event of
    multiplier `sigma`, under the sampling that drew the batch; all that
    follows, any inner optimizer included, is post-processing.

    Args: as `PrivateOptimizer`.

    Example:

    ```python
    optimizer = tf_dpsub.optimizers.DPSGD(
        keras.optimizers.SGD(0.1, momentum=0.9),
        l2_norm_clip=1.0, noise_multiplier=1.1, batch_size=256,
    )
    ```

    Reference:
        - [Abadi et al., 2016](https://arxiv.org/abs/1607.00133)
    """

    def sum_shapes(self):
        return [v.shape for v in self.per_example_variables]

    def clipped_sums(self, gradients, keep):
        return clipped_sum(gradients, keep, self.l2_norm_clip, self.batch_size)

    def releases(self):
        return [
            Release(
                tensors=len(self.per_example_variables),
                clip=self.l2_norm_clip,
                noise_multiplier=self.noise_multiplier,
            )
        ]

    def privatize(self, noisy_sums):
        return [s / self.batch_size for s in noisy_sums]
