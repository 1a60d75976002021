"""PDP-SGD and RPDP-SGD: DP-SGD in a subspace.

Implementation of "Bypassing the Ambient Dimension: Private SGD with Gradient
Subspace Identification" (Zhou, Wu, Banerjee, ICLR 2021, Algorithm 1).
"""

import keras
import tensorflow as tf

from tf_dpsub.checks import check_choice, check_nonnegative
from tf_dpsub.optimizers.subspace_optimizer import SubspaceOptimizer
from tf_dpsub.primitives import noise as noise_draws
from tf_dpsub.primitives.clipping import clip_factors, clipped_sum
from tf_dpsub.primitives.release import Release

_NOISE = ("subspace", "ambient")


@keras.saving.register_keras_serializable("tf_dpsub")
class ProjectedDPSGD(SubspaceOptimizer):
    """DP-SGD whose sum of clipped gradients is projected on a subspace.

    `gradient = V (V^T (sum of clip(g_i, C)) + N(0, sigma^2 C^2 I_k)) / B`, with
    `V` the orthonormal basis of `subspace`, of k directions, and the other
    letters as for `DPSGD`. The noise has k dimensions, not as many as there
    are weights. Before `start_step` it is `DPSGD`.

    Formal guarantees: what is released at a step is the k noisy coordinates of
    the sum (before `start_step`, the noisy sum). V is public and orthonormal
    up to `||V^T V - I|| <= 2^-13`, so that replacing one example by an empty
    one moves the coordinates by at most `C`. A step is accounted for by one
    Gaussian event of multiplier `sigma`. With `noise="ambient"` the projected
    sum is released, with noise in all dimensions, of the same sensitivity. If
    the subspace is not public, no step is private.

    Args: as `PrivateOptimizer`.
        subspace: `tf_dpsub.subspaces.Subspace`.
        start_step: int, the number of steps of DP-SGD before the first that
            projects. Defaults to `0`.
        noise: string, `"subspace"`, or `"ambient"` for noise in all
            dimensions, which is for analysis only. Defaults to `"subspace"`.

    Example:

    ```python
    optimizer = tf_dpsub.optimizers.ProjectedDPSGD(
        keras.optimizers.SGD(0.1),
        subspace=tf_dpsub.subspaces.PublicSubspace(
            x_public, y_public, rank=50, method="gram"
        ),
        l2_norm_clip=1.0, noise_multiplier=18.0, batch_size=250,
    )
    ```

    Reference:
        - [Zhou et al., 2021](https://arxiv.org/abs/2007.03813)
    """

    def __init__(
        self,
        optimizer,
        *,
        subspace,
        start_step: int = 0,
        noise: str = "subspace",
        **kwargs,
    ):
        super().__init__(optimizer, subspace=subspace, **kwargs)
        check_nonnegative("start_step", start_step)
        check_choice("noise", noise, _NOISE)
        self._start_step = int(start_step)
        self._noise = noise

    start_step = property(lambda self: self._start_step)
    noise = property(lambda self: self._noise)

    @property
    def description(self):
        text = type(self).__name__
        if self.start_step > 0:
            text += f" from step {self.start_step} on, DPSGD before"
        if self._is_ambient:
            text += ", with noise in all dimensions"
        return text

    @property
    def _is_ambient(self):
        return self.noise == "ambient"

    def _where_projecting(self, projected, plain):
        """Calls the first function if the step projects, else the second."""
        if self.start_step == 0:
            return projected()
        return tf.cond(self._is_projecting(), projected, plain)

    def _is_projecting(self):
        return self.start_step == 0 or self.iterations >= self.start_step

    def prepare(self):
        self.public_state.prepare(self.iterations, self._is_projecting())

    def sum_shapes(self):
        return [v.shape for v in self._trainable_variables]

    def clipped_sums(self, gradients, keep):
        return clipped_sum(
            gradients,
            keep,
            self.l2_norm_clip,
            self.batch_size,
            self.clipping_rule,
        )

    # What is released is the sums of the weights (before `start_step`, and with
    # ambient noise), or coordinates. Where a run has both, it is the
    # coordinates and then the sums, of which either are zero.

    def released_sums(self, sums):
        # In float64: rounding must not depend on how large the sum is.
        sums = [tf.cast(s, tf.float64) for s in sums]

        def coordinates():
            return [self.subspace.coordinates(sums)]

        if self._is_ambient:
            return self._where_projecting(
                lambda: self.subspace.lift(*coordinates()), lambda: sums
            )
        if self.start_step == 0:
            return coordinates()
        return self._where_projecting(
            lambda: coordinates() + [tf.zeros_like(s) for s in sums],
            lambda: [tf.zeros([self.subspace.rank], tf.float64)] + sums,
        )

    def releases(self):
        count = len(self._trainable_variables)
        if not self._is_ambient:
            count = 1 if self.start_step == 0 else count + 1
        return [
            Release(
                tensors=count,
                clip=self.l2_norm_clip,
                noise_multiplier=self.noise_multiplier,
            )
        ]

    def add_noise(self, key, sums, dtype):
        if self._is_ambient or self.start_step == 0:
            return super().add_noise(key, sums, dtype)
        noises = self._noises(sums)
        zeros = [tf.zeros(s.shape, dtype) for s in sums]

        def draw(first, last):
            return noise_draws.noisy(
                key,
                sums[first:last],
                noises[first:last],
                self.secure_noise,
                dtype,
            )

        return self._where_projecting(
            lambda: draw(0, 1) + zeros[1:],
            lambda: zeros[:1] + draw(1, None),
        )

    def privatize(self, noisy_sums):
        if not self._is_ambient:
            coordinates, *sums = noisy_sums
            noisy_sums = self._where_projecting(
                lambda: self.subspace.lift(coordinates), lambda: sums
            )
        return [s / self.batch_size for s in noisy_sums]

    def preview(self, coordinates, sq_norms):
        factors = clip_factors(
            sq_norms, self.l2_norm_clip, clipping=self.clipping_rule
        )
        return factors[:, None] * coordinates, 0.0

    def get_config(self):
        return {
            **super().get_config(),
            "start_step": self.start_step,
            "noise": self.noise,
        }
