"""PDP-SGD and RPDP-SGD: DP-SGD in a subspace.

Implementation of "Bypassing the Ambient Dimension: Private SGD with Gradient
Subspace Identification" (Zhou, Wu, Banerjee, ICLR 2021, Algorithm 1).
"""

import keras
import tensorflow as tf

from tf_dpsub.checks import check_choice, check_nonnegative
from tf_dpsub.optimizers.subspace_optimizer import SubspaceOptimizer
from tf_dpsub.primitives import noise as noise_draws
from tf_dpsub.primitives.clipping import (
    clip_factors,
    clipped_row_sum,
    clipped_sum,
)
from tf_dpsub.primitives.release import Release

_NOISE = ("subspace", "ambient")
# PRIVACY: the squared norm of a gradient that is scaled along all directions is
# a difference, in which rounding and what V lacks to be orthonormal leave this
# share of the largest scale's square times the gradient's.
_OUTER_MARGIN = 2.0**-10


@keras.saving.register_keras_serializable("tf_dpsub")
class ProjectedDPSGD(SubspaceOptimizer):
    """DP-SGD whose sum of clipped gradients is projected on a subspace.

    `gradient = V (V^T (sum of clip(g_i, C)) + N(0, sigma^2 C^2 I_k)) / B`, with
    `V` the orthonormal basis of `subspace`, of k directions, and the other
    letters as for `DPSGD`. The noise has k dimensions, not as many as there
    are weights. Before `start_step` it is `DPSGD`.

    In a whitened subspace, with scales `s`, it is
    `gradient = V s (sum of clip(s V^T g_i, C) + N(0, sigma^2 C^2 I_k)) / B`:
    scaled coordinates are clipped, and not whole gradients. With
    `truncate=False`, directions outside of the subspace stay, and have the
    largest scale `t` of their group: with the linear map
    `S = t I + V (diag(s) - t I) V^T` of gradients,
    `gradient = S (sum of clip(S g_i, C) + N(0, sigma^2 C^2 I_p)) / B`.

    Formal guarantees: what is released at a step is the k noisy coordinates of
    the sum (before `start_step`, the noisy sum). V is public and orthonormal
    up to `||V^T V - I|| <= 2^-13`, so that replacing one example by an empty
    one moves the coordinates by at most `C`. A step is accounted for by one
    Gaussian event of multiplier `sigma`. With `noise="ambient"` the projected
    sum is released, with noise in all dimensions, of the same sensitivity. In
    a whitened subspace the k noisy scaled coordinates are released, which one
    example moves by at most `C`: their norm is that of the float32 products
    `s_j w_j` in the sum, rounding included, whatever the public scales are.
    With `truncate=False` the noisy sum of `S g_i` is released, which one
    example moves by at most `C`. Its norm is taken as
    `||S g_i||^2 = t^2 ||g_i||^2 - sum of (t^2 - s_j^2) w_j^2`, of each group,
    and rests on `||V^T V - I|| <= 2^-13` and on the margin of
    `2^-10 t^2 ||g_i||^2` that is added; what is not finite contributes 0. If
    the subspace is not public, no step is private.

    Args: as `PrivateOptimizer`.
        subspace: `tf_dpsub.subspaces.Subspace`.
        start_step: int, the number of steps of DP-SGD before the first that
            projects. Defaults to `0`.
        noise: string, `"subspace"`, or `"ambient"` for noise in all
            dimensions, which is for analysis only. Defaults to `"subspace"`.
        truncate: bool, whether what lies outside of the subspace is left out;
            `False` needs a whitened one, of a fixed rank. Defaults to `True`.

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
        truncate: bool = True,
        **kwargs,
    ):
        super().__init__(optimizer, subspace=subspace, **kwargs)
        check_nonnegative("start_step", start_step)
        check_choice("noise", noise, _NOISE)
        if noise == "ambient" and subspace.is_whitened:
            raise ValueError(
                "Expected noise='subspace' with a whitened subspace, got "
                "noise='ambient': scales are those of its coordinates. Set "
                "whiten=0, or leave the noise in the subspace."
            )
        if not truncate and not subspace.is_whitened:
            raise ValueError(
                "Expected a whitened subspace with truncate=False, got one "
                "without scales: that would be DPSGD."
            )
        if not truncate and subspace.chooses_rank:
            raise ValueError(
                "Expected a fixed rank with truncate=False, got rank='auto': "
                "no direction is left out."
            )
        if not truncate and self.clipping_rule.rule != "flat":
            raise ValueError(
                "Expected clipping='flat' with truncate=False, got "
                f"{self.clipping_rule.rule!r}."
            )
        self._truncate = bool(truncate)
        self._start_step = int(start_step)
        self._noise = noise

    start_step = property(lambda self: self._start_step)
    noise = property(lambda self: self._noise)
    truncate = property(lambda self: self._truncate)

    @property
    def description(self):
        text = type(self).__name__
        if self.start_step > 0:
            text += f" from step {self.start_step} on, DPSGD before"
        if self.noise == "ambient":
            text += ", with noise in all dimensions"
        if self.subspace.is_whitened:
            text += ", in whitened coordinates"
        if not self.truncate:
            text += " of all dimensions"
        return text

    @property
    def _is_ambient(self):
        """Whether a step releases numbers of all dimensions."""
        return self.noise == "ambient" or not self.truncate

    def _where_projecting(self, projected, plain):
        """Calls the first function if the step projects, else the second."""
        if self.start_step == 0:
            return projected()
        return tf.cond(self._is_projecting(), projected, plain)

    def _is_projecting(self):
        return self.start_step == 0 or self.iterations >= self.start_step

    def prepare(self):
        return self.public_state.prepare(self.iterations, self._is_projecting())

    def sum_shapes(self):
        shapes = [v.shape for v in self._trainable_variables]
        if not self.subspace.is_whitened or not self.truncate:
            return shapes
        coordinates = tf.TensorShape([self.subspace.rank])
        return [coordinates] if self.start_step == 0 else [coordinates, *shapes]

    def clipped_sums(self, gradients, keep):
        if not self.truncate:
            return self._untruncated_sums(gradients, keep)
        if self.subspace.is_whitened:
            return self._scaled_sums(gradients, keep)
        return clipped_sum(
            gradients,
            keep,
            self.l2_norm_clip,
            self.batch_size,
            self.clipping_rule,
        )

    def _scaled_sums(self, gradients, keep):
        """Sums of scaled coordinates, and those of the steps before any."""
        scaled = self.subspace.scaled(self.subspace.project(gradients))
        clip, rule = self.l2_norm_clip, self.clipping_rule
        if self.start_step == 0:
            return [clipped_row_sum(scaled, keep, clip, rule)]
        is_projecting = tf.cast(self._is_projecting(), keep.dtype)
        return [
            clipped_row_sum(scaled, keep * is_projecting, clip, rule),
            *clipped_sum(
                gradients,
                keep * (1 - is_projecting),
                clip,
                self.batch_size,
                rule,
            ),
        ]

    def _untruncated_sums(self, gradients, keep):
        """Sums of gradients, which are scaled once they are added up."""
        sq_norms = gradients.sq_norm_bounds()
        if self.start_step == 0:
            sq_norms = self._scaled_sq_norms(gradients)
        else:
            sq_norms = tf.where(
                self._is_projecting(),
                self._scaled_sq_norms(gradients),
                sq_norms,
            )
        factors = keep * clip_factors(sq_norms, self.l2_norm_clip)
        # In float64: the scaled sum is a difference of sums that may be as
        # large as 32 clips of each row.
        return gradients.weighted_sum(tf.cast(factors, tf.float64))

    def _scaled_sq_norms(self, gradients):
        """Upper bounds of `||S g_i||^2`, `[batch]`; infinite if too large."""
        subspace = self.subspace
        total = 0.0
        for group, outer, scales, embeddings in zip(
            subspace.groups,
            subspace.outer_scales,
            tf.split(subspace.scales, subspace.ranks),
            tf.split(subspace.project(gradients), subspace.ranks, 1),
        ):
            whole = tf.square(outer) * gradients.sq_norm_bounds(
                [gradients.variables[k] for k in group.indices]
            )
            lacking = tf.square(outer) - tf.square(scales)
            lacking = tf.reduce_sum(lacking * tf.square(embeddings), 1)
            total += tf.maximum(whole - lacking, 0.0) + _OUTER_MARGIN * whole
        return tf.where(tf.math.is_finite(total), total, float("inf"))

    # What is released is the sums of the weights (before `start_step`, and with
    # ambient noise), or coordinates. Where a run has both, it is the
    # coordinates and then the sums, of which either are zero.

    def released_sums(self, sums):
        # In float64: rounding must not depend on how large the sum is.
        sums = [tf.cast(s, tf.float64) for s in sums]
        if not self.truncate:
            return self._where_projecting(
                lambda: self.subspace.scaled_weights(sums), lambda: sums
            )
        if self.subspace.is_whitened:
            return sums

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
        if not self.truncate:
            noisy_sums = self._where_projecting(
                lambda: self.subspace.scaled_weights(noisy_sums),
                lambda: noisy_sums,
            )
        elif not self._is_ambient:
            coordinates, *sums = noisy_sums
            noisy_sums = self._where_projecting(
                lambda: self.subspace.lift(self.subspace.scaled(coordinates)),
                lambda: sums,
            )
        return [s / self.batch_size for s in noisy_sums]

    def preview(self, coordinates, sq_norms, scales=None):
        if scales is not None:
            outside = sq_norms - tf.reduce_sum(tf.square(coordinates), 1)
            coordinates = scales * coordinates
            sq_norms = tf.reduce_sum(tf.square(coordinates), 1)
            if not self.truncate:
                sq_norms += tf.square(tf.reduce_max(scales)) * outside
        factors = clip_factors(
            sq_norms, self.l2_norm_clip, clipping=self.clipping_rule
        )
        return factors[:, None] * coordinates, 0.0

    def get_config(self):
        return {
            **super().get_config(),
            "start_step": self.start_step,
            "noise": self.noise,
            "truncate": self.truncate,
        }
