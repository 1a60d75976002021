"""The base of all private optimizers."""

import abc

import tensorflow as tf

from tf_dpsub.checks import check_choice, check_count, check_seed
from tf_dpsub.optimizers import unknown_arguments
from tf_dpsub.optimizers.noise_setting import NoiseSetting
from tf_dpsub.optimizers.optimizer_wrapper import OptimizerWrapper
from tf_dpsub.primitives import grid, noise, replicas
from tf_dpsub.primitives.clipping import Clipping, check_microbatch_size
from tf_dpsub.primitives.public_state import PublicState
from tf_dpsub.primitives.release import effective_noise_multiplier

PER_EXAMPLE = ("auto", "graph", "vectorized_map")


class PrivateOptimizer(OptimizerWrapper, abc.ABC):
    """Makes a Keras optimizer private: it sees only what a mechanism releases.

    A subclass is one mechanism. It says how the gradients of a microbatch are
    summed (`clipped_sums`), how noisy gradients follow from the sums of a whole
    batch (`privatize`), and what it claims of one such release (`releases`),
    from which its noise and the event that accounts for it follow.

    Args:
        optimizer: Keras optimizer, or its name. It applies the gradients.
        noise_multiplier: float, standard deviation of the noise relative to
            `l2_norm_clip`. With `0`, nothing is private. Defaults to `None`,
            found for `epsilon` and `delta`.
        epsilon: float, > 0, instead of a noise multiplier: up to where `fit`
            may spend, by PLD accounting, earlier steps in the ledger included.
            It finds the noise for its examples and steps. Defaults to `None`.
        delta: float in (0, 1), with `epsilon`. Defaults to `None`.
        l2_norm_clip: float, the norm to which per-example gradients are
            clipped; `inf` for no clipping, if `noise_multiplier` is 0.
        batch_size: int, the public, expected batch size: the only number a sum
            is ever divided by.
        clipping: string, the rule that scales a gradient g to a norm of at
            most `C = l2_norm_clip`: `"flat"`, by `min(1, C / ||g||)`;
            `"automatic"`, by `C / (||g|| + stability)`; or `"unit_norm"`, by
            `C / ||g||`, and a gradient of zero contributes zero. With the last
            two C takes part in the learning rate alone: 1 is usual. Defaults
            to `"flat"`.
        stability: float, for automatic clipping. Defaults to `None`, 0.01.
        microbatch_size: int, how many examples are processed at a time, 448 at
            most. It changes speed and memory, never the result. Defaults to
            `None`, the size that should be the fastest.
        per_example: string, `"graph"` (raises where nothing can be proved),
            `"vectorized_map"` (one example at a time), or `"auto"` (the first
            that applies). Defaults to `"auto"`.
        seed: int, makes noise and sampling reproducible, for experiments: the
            statement then says so. Defaults to `None`, fresh entropy.
        secure_noise: bool, whether noise is drawn from the operating system's
            cryptographic generator, which is slow. Defaults to `False`.
        ema_warmup: bool, whether the moving average of the weights, which
            `use_ema=True` of `optimizer` makes, forgets the first steps sooner:
            by `min(ema_momentum, (1 + t) / (10 + t))` after `t` steps. Defaults
            to `False`.
        name: string. Defaults to `None`.

    Raises:
        ValueError: if an argument is out of range, or if `optimizer` is private
            itself or scales the loss.
        TypeError: if there is no such argument.
    """

    def __init__(
        self,
        optimizer,
        *,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        l2_norm_clip: float,
        batch_size: int,
        clipping: str = "flat",
        stability: float | None = None,
        microbatch_size: int | None = None,
        per_example: str = "auto",
        seed: int | None = None,
        secure_noise: bool = False,
        ema_warmup: bool = False,
        name: str | None = None,
        **unknown,
    ):
        calibrated = unknown.pop("found_noise_multiplier", None)
        if unknown:
            raise TypeError(unknown_arguments.message(type(self), *unknown))
        super().__init__(optimizer, ema_warmup=ema_warmup, name=name)
        self._noise_setting = NoiseSetting(
            noise_multiplier, epsilon, delta, calibrated, l2_norm_clip
        )
        self._clipping_rule = Clipping(clipping, stability)
        self._clipping_rule.check_clip(l2_norm_clip)
        check_count("batch_size", batch_size)
        check_microbatch_size(microbatch_size)
        check_choice("per_example", per_example, PER_EXAMPLE)
        check_seed(seed)
        self._l2_norm_clip = float(l2_norm_clip)
        self._batch_size = int(batch_size)
        self._microbatch_size = microbatch_size
        self.per_example = per_example
        self._seed = seed
        self.secure_noise = bool(secure_noise)
        self._public_state = PublicState()

    bands = property(lambda self: 1)  # steps that share their noise
    # Public, and frozen: the ledger has recorded them.
    noise_multiplier = property(lambda self: self._noise_setting.multiplier)
    target = property(lambda self: self._noise_setting.target)
    is_calibrated = property(lambda self: self._noise_setting.is_known)
    l2_norm_clip = property(lambda self: self._l2_norm_clip)
    clipping_rule = property(lambda self: self._clipping_rule)
    batch_size = property(lambda self: self._batch_size)
    microbatch_size = property(lambda self: self._microbatch_size)
    seed = property(lambda self: self._seed)

    @property
    def public_state(self) -> PublicState:
        """State that follows public data or released weights."""
        return self._public_state

    def calibrate(self, effective: float | None):
        """Sets the noise of an optimizer that has a target; `fit` calls it.

        Args:
            effective: float, > 0, the `effective_noise_multiplier` to have; or
                None, which is to be found yet.
        """
        self._noise_setting.multiplier = effective

    def build_for(self, model):
        """Creates all state that is saved, for the weights of a model.

        Args:
            model: `tf_dpsub.PrivateModel`.

        Raises:
            ValueError: if the mechanism cannot train that model.
        """
        self.build(model.trainable_variables)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        # In a plain object, which neither Keras nor TensorFlow tracks.
        self._noise_key = noise.NoiseKey(self.seed)
        self.public_state.build(self)

    @property
    def per_example_variables(self):
        """Variables that per-example gradients are with respect to, a list."""
        return self._trainable_variables

    def prepare(self):
        """Refreshes the public state before a step: `PublicState.prepare`."""
        return self.public_state.prepare(self.iterations)

    # The mechanism.

    @property
    def description(self):
        """Name of the mechanism, with what it alone has."""
        return type(self).__name__

    @property
    def mechanism(self):
        """Description for the ledger, with the rule by which it clips."""
        return self.description + self.clipping_rule.description

    @abc.abstractmethod
    def sum_shapes(self):
        """Shapes of what `clipped_sums` returns."""

    @abc.abstractmethod
    def clipped_sums(self, gradients, keep) -> list:
        """Sums the clipped contributions of the examples of a microbatch.

        Args:
            gradients: `tf_dpsub.gradients.PerExampleGradients`.
            keep: float32 tensor of shape `[batch]`, 0 for rows that only pad
                the batch and 1 for examples.

        Returns:
            List of float32 tensors, which add over microbatches.
        """

    def released_sums(self, sums: list) -> list:
        """Computes from the sums of a whole batch what noise is added to.

        Args:
            sums: list of float32 or float64 tensors: the sums of `clipped_sums`
                over a whole batch.

        Returns:
            List of tensors, which depend on `sums` linearly.
        """
        return sums

    @abc.abstractmethod
    def releases(self) -> list:
        """Claims of what `released_sums` returns, in its order.

        Returns:
            List of `tf_dpsub.primitives.release.Release`.
        """

    def noise_stddevs(self) -> list:
        """Standard deviations of the noise, by what `released_sums` returns."""
        return [
            r.noise_stddev for r in self.releases() for _ in range(r.tensors)
        ]

    @property
    def effective_noise_multiplier(self):
        """Noise multiplier of the one Gaussian that accounts for a step.

        It is 0 if a step is not private.
        """
        return effective_noise_multiplier(self.releases())

    @abc.abstractmethod
    def privatize(self, noisy_sums: list) -> list:
        """Reconstructs gradients from what was released.

        Args:
            noisy_sums: list of float32 tensors: what `released_sums` returned,
                with noise.

        Returns:
            List of float32 gradients, one for each trainable variable.
        """

    def add_noise(self, key, sums: list, dtype: str) -> list:
        """Adds the noise of one step.

        Formal guarantees: a sum is rounded to a public grid before, whose
        spacing moves a release by at most 2^-12 of its clip: clipping keeps
        that margin. Noise lies on the same grid, and is added exactly.

        Args:
            key: int64 tensor of shape `[2]`, for this call alone.
            sums: list of tensors, what is released.
            dtype: string, of the results.

        Returns:
            List of tensors.
        """
        return noise.noisy(
            key, sums, self._noises(sums), self.secure_noise, dtype
        )

    def _noises(self, sums):
        """The noise on a grid of each sum; None for one without noise."""
        count = sum(s.shape.num_elements() for s in sums)
        clips = [r.clip for r in self.releases() for _ in range(r.tensors)]
        return [
            grid.GridNoise(stddev, grid.spacing(stddev, clip, count))
            if stddev
            else None
            for stddev, clip in zip(self.noise_stddevs(), clips, strict=True)
        ]

    def noisy(self, sums: list) -> list:
        """Adds the noise of one step to the sums of a batch.

        Over several replicas the sums are added up first, and the noise is
        drawn once, on the first replica, inside that one reduction.

        Args:
            sums: list of tensors, the sums of this replica.

        Returns:
            List of float32 tensors, `released_sums` with noise: the same on
            all replicas.
        """
        sums = self.released_sums(sums)
        key = self._noise_key.advance()
        # The sums of replicas must not be rounded before they meet.
        dtype = "float64" if replicas.are_several() else "float32"
        if not any(self.noise_stddevs()):
            sums = [tf.cast(s, dtype) for s in sums]
        elif replicas.is_first():
            sums = self.add_noise(key, sums, dtype)
        else:
            sums = [
                s if z is None else grid.rounded(s, z.spacing)
                for s, z in zip(sums, self._noises(sums), strict=True)
            ]
        return [tf.cast(s, tf.float32) for s in replicas.summed(sums)]

    def apply_noisy(self, noisy_sums: list, regularization: list | None = None):
        """Applies the gradients that follow from noisy sums.

        Args:
            noisy_sums: list of tensors, as `noisy` returns.
            regularization: list of gradients of weight regularisers, or None
                for each variable without one. They depend on weights alone and
                enter after the noise. Defaults to `None`.
        """
        gradients = self.privatize(noisy_sums)
        for k, added in enumerate(regularization or []):
            if added is not None:
                gradients[k] += tf.cast(added, tf.float32)
        # Keras adds the gradients of the replicas up again.
        count = tf.distribute.get_strategy().num_replicas_in_sync
        gradients = [
            tf.cast(g / count if count > 1 else g, v.dtype)
            for g, v in zip(gradients, self._trainable_variables)
        ]
        self.apply_inner(gradients)

    def get_config(self):
        return {
            **super().get_config(),
            **self._noise_setting.get_config(),
            "l2_norm_clip": self.l2_norm_clip,
            "batch_size": self.batch_size,
            "clipping": self.clipping_rule.rule,
            "stability": self.clipping_rule.stability,
            "microbatch_size": self.microbatch_size,
            "per_example": self.per_example,
            "seed": self.seed,
            "secure_noise": self.secure_noise,
        }
