"""DP-SGD with a clip that follows a quantile of gradient norms.

Implementation of "Differentially Private Learning with Adaptive Clipping"
(Andrew, Thakkar, McMahan, Ramaswamy, NeurIPS 2021, Algorithm 1).
"""

import math
import numbers

import keras
import tensorflow as tf

from tf_dpsub.checks import check_fraction, check_positive
from tf_dpsub.optimizers.private_optimizer import PrivateOptimizer
from tf_dpsub.primitives.clipping import clipped_sum
from tf_dpsub.primitives.release import SMALLEST_NORM, Release

# The share of the batch size that the noise in counts is by default.
_COUNT_NOISE = 0.05
# The clip stays within this factor of the first one.
_RANGE = 2.0**20
_LARGEST_CLIP = 1e20
# One example moves the count by at most that much.
_COUNT_CLIP = 0.5


@keras.saving.register_keras_serializable("tf_dpsub")
class AdaptiveDPSGD(PrivateOptimizer):
    """DP-SGD whose clip follows a private quantile of the gradients' norms.

    With `C_1 = l2_norm_clip`, a step releases a sum in units of the clip, and a
    count of the gradients that were not clipped:

    `s = sum of clip(g_i, C_t) / C_t + N(0, sigma_s^2 I)`,
    `b = sum of (1[||g_i|| <= C_t] - 1/2) + N(0, sigma_b^2)`,
    `gradient = C_t s / B`,
    `C_{t+1} = C_t exp(-eta (b / B + 1/2 - quantile))`,

    with `B = batch_size`, `eta = clip_learning_rate`,
    `quantile = target_unclipped_quantile` and `sigma_b =
    clipped_count_stddev`. What the count costs is made up for by more noise in
    the sum: `sigma_s = (sigma^-2 - (2 sigma_b)^-2)^(-1/2)`, with `sigma =
    noise_multiplier`.

    Formal guarantees: what is released at a step is the noisy sum and the noisy
    count. If one example is replaced by an empty one, the sum moves by at most
    1 in Euclidean norm, and the count by at most 1/2: an example that is not
    there, or whose gradient is zero or not finite, adds exactly 0 to both.
    Divided by `sigma_s` and `sigma_b` both have unit noise, and move together
    by at most `sqrt(sigma_s^-2 + (2 sigma_b)^-2) = 1 / sigma`: a step is
    accounted for by one Gaussian event of multiplier `sigma`, under the
    sampling that drew the batch. `C_{t+1}` follows from earlier releases and
    public numbers, so that it is public when it is used, and the event does not
    depend on it. The ledger holds the rule, and `C_1`.

    Args: as `PrivateOptimizer`.
        l2_norm_clip: float, the first clip. Later ones stay between 2^-20 and
            2^20 times that.
        target_unclipped_quantile: float in (0, 1), the share of gradients that
            are not to be clipped. Defaults to `0.5`.
        clip_learning_rate: float, the rate at which the logarithm of the clip
            follows. Defaults to `0.2`.
        clipped_count_stddev: float, standard deviation of the noise in the
            count, more than half of `noise_multiplier`. Defaults to `None`,
            `batch_size / 20`.

    Example:

    ```python
    optimizer = tf_dpsub.optimizers.AdaptiveDPSGD(
        keras.optimizers.SGD(0.1, momentum=0.9),
        l2_norm_clip=1.0, noise_multiplier=1.1, batch_size=256,
    )
    ```

    Reference:
        - [Andrew et al., 2021](https://arxiv.org/abs/1905.03871)
    """

    def __init__(
        self,
        optimizer,
        *,
        target_unclipped_quantile: float = 0.5,
        clip_learning_rate: float = 0.2,
        clipped_count_stddev: float | None = None,
        **kwargs,
    ):
        super().__init__(optimizer, **kwargs)
        check_fraction("target_unclipped_quantile", target_unclipped_quantile)
        check_positive("clip_learning_rate", clip_learning_rate)
        self._target_unclipped_quantile = float(target_unclipped_quantile)
        self._clip_learning_rate = float(clip_learning_rate)
        self._clipped_count_stddev = clipped_count_stddev
        self._check()
        if self.is_calibrated:
            self._check_count(self.noise_multiplier)

    target_unclipped_quantile = property(
        lambda self: self._target_unclipped_quantile
    )
    clip_learning_rate = property(lambda self: self._clip_learning_rate)

    @property
    def clipped_count_stddev(self) -> float:
        """Standard deviation of the noise in the count."""
        if self._clipped_count_stddev is None:
            return _COUNT_NOISE * self.batch_size
        return self._clipped_count_stddev

    def _check(self):
        if self.clipping_rule.rule != "flat":
            raise ValueError(
                "Expected clipping='flat' where the clip follows norms, got "
                f"{self.clipping_rule.rule!r}, with which no gradient is left "
                "unclipped. Use it with DPSGD."
            )
        if not SMALLEST_NORM * _RANGE <= self.l2_norm_clip <= _LARGEST_CLIP:
            raise ValueError(
                f"Expected {SMALLEST_NORM * _RANGE:.3g} <= l2_norm_clip <= "
                f"{_LARGEST_CLIP:g}, the first clip, got {self.l2_norm_clip}."
            )
        if not math.isfinite(self.clip_learning_rate):
            raise ValueError(
                "Expected a finite clip_learning_rate, got "
                f"{self.clip_learning_rate}."
            )

    def _check_count(self, noise_multiplier):
        stddev = self.clipped_count_stddev
        if not isinstance(stddev, numbers.Real) or not (
            noise_multiplier / 2 < stddev < math.inf
        ):
            raise ValueError(
                "Expected finite clipped_count_stddev > noise_multiplier / 2 = "
                f"{noise_multiplier / 2:g}, got {stddev!r}: the count "
                "alone would cost as much as a step may. Take larger batches, "
                "of which it is a twentieth by default, or state it."
            )

    def calibrate(self, effective):
        if effective is not None:
            self._check_count(effective)
        super().calibrate(effective)

    @property
    def description(self):
        return (
            f"AdaptiveDPSGD, whose clip starts from C and follows the "
            f"{self.target_unclipped_quantile:g} quantile of norms at rate "
            f"{self.clip_learning_rate:g}, by counts with noise of "
            f"{self.clipped_count_stddev:g}"
        )

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._clip = self.add_variable(
            (),
            initializer=lambda shape, dtype: tf.constant(
                self.l2_norm_clip, tf.float32
            ),
            aggregation="only_first_replica",
            name="l2_norm_clip",
        )

    @property
    def clip_variable(self):
        """The variable that holds the clip of the next step, C_t."""
        return self._clip

    @property
    def current_clip(self) -> float:
        """The clip of the next step, a public number."""
        return float(self._current_clip())

    def _current_clip(self):
        return tf.clip_by_value(
            tf.convert_to_tensor(self._clip),
            self.l2_norm_clip / _RANGE,
            self.l2_norm_clip * _RANGE,
        )

    def sum_shapes(self):
        return [*(v.shape for v in self._trainable_variables), ()]

    def clipped_sums(self, gradients, keep):
        clip = self._current_clip()
        bounds = gradients.sq_norm_bounds()
        signs = tf.where(tf.sqrt(bounds) <= clip, _COUNT_CLIP, -_COUNT_CLIP)
        # An empty example must not differ from one that is not there.
        counted = tf.where(gradients.nonzero(), signs, 0.0)
        return [
            *clipped_sum(gradients, keep, clip, self.batch_size),
            tf.reduce_sum(keep * counted),
        ]

    def released_sums(self, sums):
        *sums, count = sums
        clip = tf.cast(self._current_clip(), tf.float64)
        # In float64: rounding must not depend on how large the sum is.
        return [*(tf.cast(s, tf.float64) / clip for s in sums), count]

    def releases(self):
        count = Release(
            tensors=1,
            clip=_COUNT_CLIP,
            noise_multiplier=self.clipped_count_stddev / _COUNT_CLIP,
        )
        sums = Release(
            tensors=len(self._trainable_variables),
            clip=1.0,
            noise_multiplier=self._sum_multiplier(count.noise_multiplier),
        )
        return [sums, count]

    def _sum_multiplier(self, of_count):
        """The multiplier that makes one of `noise_multiplier` with another."""
        sigma = self.noise_multiplier
        # sigma / sqrt(1 - (sigma / of_count)^2), without loss of digits.
        ratio = sigma / of_count
        return sigma / math.sqrt((1 - ratio) * (1 + ratio))

    def privatize(self, noisy_sums):
        *sums, _ = noisy_sums
        scale = self._current_clip() / self.batch_size
        return [scale * s for s in sums]

    def apply_noisy(self, noisy_sums, regularization=None):
        clip = self._current_clip()
        super().apply_noisy(noisy_sums, regularization)
        unclipped = noisy_sums[-1] / self.batch_size + 0.5
        unclipped = tf.clip_by_value(unclipped, 0.0, 1.0)
        excess = unclipped - self.target_unclipped_quantile
        self._clip.assign(clip * tf.exp(-self.clip_learning_rate * excess))

    def get_config(self):
        return {
            **super().get_config(),
            "target_unclipped_quantile": self.target_unclipped_quantile,
            "clip_learning_rate": self.clip_learning_rate,
            "clipped_count_stddev": self._clipped_count_stddev,
        }
