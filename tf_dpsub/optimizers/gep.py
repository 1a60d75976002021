"""GEP and B-GEP: a noisy embedding of gradients, and a noisy residual.

Implementation of "Do Not Let Privacy Overbill Utility: Gradient Embedding
Perturbation for Private Learning" (Yu, Zhang, Chen, Liu, ICLR 2021,
Algorithm 1).
"""

import math

import keras
import tensorflow as tf

from tf_dpsub.optimizers.subspace_optimizer import SubspaceOptimizer
from tf_dpsub.primitives.clipping import (
    clip_factors,
    clipped_row_sum,
    sum_factors,
    weighted_sum,
)
from tf_dpsub.primitives.release import Release, check_privacy

# PRIVACY: the squared norm of a residual is a difference, in which rounding and
# what V lacks to be orthonormal leave this share of the gradient's.
_RESIDUAL_MARGIN = 2.0**-10


@keras.saving.register_keras_serializable("tf_dpsub")
class GEP(SubspaceOptimizer):
    """Perturbs what lies in a subspace, and what is left, each by its own.

    With `V` the orthonormal basis of `subspace`, of k directions, a gradient
    `g_i` has the embedding `w_i = V^T g_i` and the residual
    `r_i = g_i - V w_i`. They are clipped one by one:

    `w = sum of clip(w_i, C0) + N(0, sigma0^2 C0^2 I_k)`,
    `r = sum of clip(r_i, C1) + N(0, sigma1^2 C1^2 I_p)`,
    `gradient = (V w + r) / B`,

    with `C0 = l2_norm_clip`, `C1 = residual_norm_clip`,
    `sigma0 = noise_multiplier`, `sigma1 = residual_noise_multiplier` and
    `B = batch_size`. Without the residual it is B-GEP.

    In a whitened subspace, with scales `s`, the embedding `s w_i` is clipped
    instead and has the noise, and its sum `u` comes back as `V (s u)`. The
    residual stays `g_i - V w_i`, without scales.

    Formal guarantees: what is released at a step is the noisy embedding and the
    noisy residual, of the same batch. Replacing one example by an empty one
    moves them by at most `C0` and `C1`. Divided by `sigma0 C0` and `sigma1 C1`
    both have unit noise, and move together by at most
    `sqrt(sigma0^-2 + sigma1^-2)`: a step is accounted for by one Gaussian event
    of multiplier `(sigma0^-2 + sigma1^-2)^(-1/2)`, under the sampling that
    drew the batch, and not by two. `||r_i||^2 = ||g_i||^2 - ||w_i||^2`, and
    the sum of residuals is a difference of sums, or one of vectors without
    what lies in the subspace: `subspaces.residuals`. Residual rows are never
    formed. Both rest on `||V^T V - I|| <= 2^-13`, and on the margin of
    `2^-10 ||g_i||^2` that is added. Scales are public float32 numbers: the
    norm of `s w_i` is that of the products in the sum, rounding included, and
    the residual is that of the same `w_i` before they are scaled. If either
    multiplier is 0, or the subspace is not public, no step is private.

    Args: as `PrivateOptimizer`.
        l2_norm_clip: float, the norm to which embeddings are clipped.
        subspace: `tf_dpsub.subspaces.Subspace`.
        residual: bool, whether the residual is released too. Defaults to
            `True`.
        residual_norm_clip: float, the norm to which residuals are clipped;
            required with a residual. Defaults to `None`.
        residual_noise_multiplier: float, standard deviation of the residual's
            noise relative to `residual_norm_clip`. Defaults to `None`, that of
            the embedding.

    Example:

    ```python
    optimizer = tf_dpsub.optimizers.GEP(
        keras.optimizers.SGD(0.1, momentum=0.9),
        subspace=tf_dpsub.subspaces.PublicSubspace(
            x_public, rank=500, groups=5
        ),
        l2_norm_clip=5.0, residual_norm_clip=2.0,
        noise_multiplier=2.73, batch_size=1000,
    )
    ```

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2102.12677)
    """

    def __init__(
        self,
        optimizer,
        *,
        subspace,
        residual: bool = True,
        residual_norm_clip: float | None = None,
        residual_noise_multiplier: float | None = None,
        **kwargs,
    ):
        super().__init__(optimizer, subspace=subspace, **kwargs)
        self._residual = bool(residual)
        if not self.residual:
            if (residual_norm_clip, residual_noise_multiplier) != (None, None):
                raise ValueError(
                    "Expected neither residual_norm_clip nor "
                    "residual_noise_multiplier with residual=False, got "
                    f"{residual_norm_clip} and {residual_noise_multiplier}."
                )
        elif residual_norm_clip is None:
            raise ValueError(
                "Expected residual_norm_clip with residual=True, got None. A "
                "fifth of l2_norm_clip is usual; residual=False is B-GEP."
            )
        else:
            if residual_noise_multiplier is None:
                multiplier = 1.0 if self.target else self.noise_multiplier
            else:
                multiplier = residual_noise_multiplier
            check_privacy(multiplier, residual_norm_clip, prefix="residual_")
            self.clipping_rule.check_clip(
                residual_norm_clip, "residual_norm_clip"
            )
        self._residual_norm_clip = residual_norm_clip
        self._residual_noise_multiplier = residual_noise_multiplier

    residual = property(lambda self: self._residual)
    residual_norm_clip = property(lambda self: self._residual_norm_clip)

    @property
    def residual_noise_multiplier(self):
        """Noise multiplier of the residual; None without one."""
        if self.residual and self._residual_noise_multiplier is None:
            return self.noise_multiplier
        return self._residual_noise_multiplier

    @property
    def description(self):
        scaled = ", in whitened coordinates" * self.subspace.is_whitened
        if not self.residual:
            return f"GEP without residual{scaled}"
        pair = (self.noise_multiplier, self.residual_noise_multiplier)
        return (
            f"GEP{scaled}, with a residual clipped at "
            f"{self.residual_norm_clip:g} and multipliers "
            f"{pair[0]:.6g} and {pair[1]:.6g}, which make one σ"
        )

    def calibrate(self, effective):
        if effective is not None and self.residual:
            effective = self._share_of_the_embedding(effective)
        super().calibrate(effective)

    def _share_of_the_embedding(self, effective):
        """The multiplier that makes one `effective` with the residual's."""
        residual = self._residual_noise_multiplier
        if residual is None:
            # Two Gaussians of equal multipliers make one.
            return effective * math.sqrt(2)
        if residual <= effective:
            raise ValueError(
                "Expected a residual_noise_multiplier that leaves a part of "
                f"the budget to the embedding, got {residual}: {self.target} "
                f"takes more than {effective:.4g}. Raise it, or leave it out."
            )
        # Precisions add up.
        return (effective**-2 - residual**-2) ** -0.5

    def sum_shapes(self):
        shape = tf.TensorShape([self.subspace.rank])
        if not self.residual:
            return [shape]
        return [shape, shape, *(v.shape for v in self._trainable_variables)]

    def clipped_sums(self, gradients, keep):
        embeddings = self.subspace.project(gradients)  # [batch, k]
        scaled = self.subspace.scaled(embeddings)
        sums = [
            clipped_row_sum(scaled, keep, self.l2_norm_clip, self.clipping_rule)
        ]
        if not self.residual:
            return sums
        # What the residual lacks is the embedding without scales.
        sq_norms = tf.reduce_sum(tf.square(embeddings), 1)
        residuals = self.subspace.residuals(gradients, embeddings)
        sq_norms = _sq_residuals(gradients.sq_norm_bounds(), sq_norms)
        if residuals.adds_in_float32:
            factors = sum_factors(
                gradients,
                sq_norms + residuals.sq_margins,
                self.residual_norm_clip,
                self.batch_size,
                self.clipping_rule,
                parts=residuals.parts,
            )
        else:
            factors = self._residual_factors(sq_norms)
        factors *= tf.cast(keep, factors.dtype)
        return sums + weighted_sum(
            residuals, factors, self.residual_norm_clip, self.clipping_rule
        )

    def _residual_factors(self, sq_norms):
        return clip_factors(
            sq_norms, self.residual_norm_clip, clipping=self.clipping_rule
        )

    def released_sums(self, sums):
        if not self.residual:
            return sums
        # The second and the others are never released: their difference is.
        embedding, inside, *whole = sums
        inside = self.subspace.lift(inside)
        return [embedding, *(a - b for a, b in zip(whole, inside))]

    def releases(self):
        releases = [
            Release(
                tensors=1,
                clip=self.l2_norm_clip,
                noise_multiplier=self.noise_multiplier,
            )
        ]
        if self.residual:
            releases.append(
                Release(
                    tensors=len(self._trainable_variables),
                    clip=self.residual_norm_clip,
                    noise_multiplier=self.residual_noise_multiplier,
                )
            )
        return releases

    def privatize(self, noisy_sums):
        embedding, *residuals = noisy_sums
        sums = self.subspace.lift(self.subspace.scaled(embedding))
        if self.residual:
            sums = [a + b for a, b in zip(sums, residuals)]
        return [s / self.batch_size for s in sums]

    def preview(self, coordinates, sq_norms, scales=None):
        scaled = coordinates if scales is None else scales * coordinates
        factors = clip_factors(
            tf.reduce_sum(tf.square(scaled), 1),
            self.l2_norm_clip,
            clipping=self.clipping_rule,
        )
        released = 0.0
        if self.residual:
            sq_embeddings = tf.reduce_sum(tf.square(coordinates), 1)
            residual_factors = self._residual_factors(
                _sq_residuals(sq_norms, sq_embeddings)
            )
            # Where rows are scaled up, relative to what the embedding is.
            shares = residual_factors / tf.maximum(factors, 1.0)
            released = tf.minimum(tf.reduce_mean(shares), 1.0)
        return factors[:, None] * scaled, released

    def get_config(self):
        return {
            **super().get_config(),
            "residual": self.residual,
            "residual_norm_clip": self._residual_norm_clip,
            "residual_noise_multiplier": self._residual_noise_multiplier,
        }


def _sq_residuals(sq_norms, sq_embeddings):
    """Upper bounds of squared norms of residuals, `[batch]`."""
    differences = tf.maximum(sq_norms - sq_embeddings, 0.0)
    return differences + _RESIDUAL_MARGIN * sq_norms
