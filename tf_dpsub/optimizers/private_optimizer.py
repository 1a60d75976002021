"""The base of all private optimizers."""

import abc
import difflib
import inspect
import math
import numbers

import keras
import tensorflow as tf

from tf_dpsub.checks import check_count, is_int
from tf_dpsub.primitives import grid, noise
from tf_dpsub.primitives.clipping import LARGEST_MICROBATCH

_SMALLEST_CLIP = 1e-12
PER_EXAMPLE = ("auto", "graph", "vectorized_map")


class PrivateOptimizer(keras.optimizers.Optimizer, abc.ABC):
    """Makes a Keras optimizer private: it sees only what a mechanism releases.

    A subclass is one mechanism. It says how the gradients of a microbatch are
    summed (`clipped_sums`), how noisy gradients follow from the sums of a whole
    batch (`privatize`), and which event accounts for one such release
    (`effective_noise_multiplier`).

    Args:
        optimizer: Keras optimizer, or its name. It applies the gradients.
        noise_multiplier: float, standard deviation of the noise relative to
            `l2_norm_clip`. With `0`, nothing is private.
        l2_norm_clip: float, the norm to which per-example gradients are
            clipped; `inf` for no clipping, if `noise_multiplier` is 0.
        batch_size: int, the public, expected batch size: the only number a sum
            is ever divided by.
        microbatch_size: int, how many examples are processed at a time, 512 at
            most. It changes speed and memory, never the result. Defaults to
            `None`: on a CPU 64, of a small model the whole batch; on a GPU 512.
        per_example: string, `"graph"` (raises where nothing can be proved),
            `"vectorized_map"` (one example at a time), or `"auto"` (the first
            that applies). Defaults to `"auto"`.
        seed: int, makes noise and sampling reproducible, for experiments: the
            statement then says so. Defaults to `None`, fresh entropy.
        secure_noise: bool, whether noise is drawn from the operating system's
            cryptographic generator, which is slow. Defaults to `False`.
        name: string. Defaults to `None`.

    Raises:
        ValueError: if an argument is out of range, or if `optimizer` is private
            itself or scales the loss.
    """

    def __init__(
        self,
        optimizer,
        *,
        noise_multiplier: float,
        l2_norm_clip: float,
        batch_size: int,
        microbatch_size: int | None = None,
        per_example: str = "auto",
        seed: int | None = None,
        secure_noise: bool = False,
        name: str | None = None,
        **unknown,
    ):
        if unknown:
            raise TypeError(_unknown_argument(type(self), next(iter(unknown))))
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = _checked_inner(optimizer)
        check_privacy(noise_multiplier, l2_norm_clip)
        check_count("batch_size", batch_size)
        if microbatch_size is not None:
            check_count("microbatch_size", microbatch_size)
            if microbatch_size > LARGEST_MICROBATCH:
                raise ValueError(
                    f"Expected microbatch_size <= {LARGEST_MICROBATCH}, got "
                    f"{microbatch_size}: rounding in longer sums would exceed "
                    "the clip."
                )
        if per_example not in PER_EXAMPLE:
            raise ValueError(
                f"Expected per_example in {PER_EXAMPLE}, got {per_example!r}."
            )
        if seed is not None and not (is_int(seed) and seed >= 0):
            raise ValueError(f"Expected seed >= 0 (int) or None, got {seed!r}.")
        self._noise_multiplier = float(noise_multiplier)
        self._l2_norm_clip = float(l2_norm_clip)
        self._batch_size = int(batch_size)
        self._microbatch_size = microbatch_size
        self.per_example = per_example
        self._seed = seed
        self.secure_noise = bool(secure_noise)

    # Public, and frozen: the ledger has recorded them.
    noise_multiplier = property(lambda self: self._noise_multiplier)
    l2_norm_clip = property(lambda self: self._l2_norm_clip)
    batch_size = property(lambda self: self._batch_size)
    microbatch_size = property(lambda self: self._microbatch_size)
    seed = property(lambda self: self._seed)

    # What it knows beside private data.

    def build_for(self, model):
        """Creates all state that is saved, for the weights of a model.

        Args:
            model: `tf_dpsub.PrivateModel`.

        Raises:
            ValueError: if the mechanism cannot train that model.
        """
        self.build(model.trainable_variables)

    @property
    def per_example_variables(self):
        """What per-example gradients are with respect to, list of variables."""
        return self._trainable_variables

    def attach(self, model):
        """Creates public state for a model, once its step is built.

        Args:
            model: `tf_dpsub.PrivateModel`.
        """

    def begin_run(self, steps: int | None):
        """To be told how many steps a run has, before the first of them.

        Args:
            steps: int, or None where that is not known.
        """

    def prepare(self):
        """Refreshes public state before a step. Touches nothing private."""

    @property
    def public_inputs(self):
        """Inputs of public examples, a structure of arrays; None if none."""
        return None

    @property
    def allow_private(self):
        """Whether public examples may be private ones as well."""
        return False

    @property
    def has_private_state(self):
        """Whether a step uses what was computed from private data."""
        return False

    @property
    def notes(self):
        """What the statement has to take as public, tuple of string."""
        return ()

    @property
    def is_compilable(self):
        """Whether XLA may compile the part of a step that sees private data."""
        return True

    # The mechanism.

    @property
    def description(self):
        """Name of the mechanism for the ledger, with what it alone has."""
        return type(self).__name__

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
        """What is released of the sums of a whole batch: noise is added to it.

        Args:
            sums: list of float32 or float64 tensors: the sums of `clipped_sums`
                over a whole batch.

        Returns:
            List of tensors, which depend on `sums` linearly.
        """
        return sums

    @abc.abstractmethod
    def noise_stddevs(self):
        """Standard deviations of the noise, by what `released_sums` returns."""

    @abc.abstractmethod
    def privatize(self, noisy_sums: list) -> list:
        """Reconstructs gradients from what was released.

        Args:
            noisy_sums: list of float32 tensors: what `released_sums` returned,
                with noise.

        Returns:
            List of float32 gradients, one for each trainable variable.
        """

    @property
    @abc.abstractmethod
    def effective_noise_multiplier(self):
        """Noise multiplier of the one Gaussian that accounts for a step.

        It is 0 if a step is not private.
        """

    def release_clips(self):
        """How far one example moves what `released_sums` returns, floats."""
        return [self.l2_norm_clip] * len(self.noise_stddevs())

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
        return [
            grid.GridNoise(stddev, grid.spacing(stddev, clip, count))
            if stddev
            else None
            for stddev, clip in zip(
                self.noise_stddevs(), self.release_clips(), strict=True
            )
        ]

    # One step.

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
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # The sums of replicas must not be rounded before they meet.
        dtype = "float32" if replicas == 1 else "float64"
        if not any(self.noise_stddevs()):
            sums = [tf.cast(s, dtype) for s in sums]
        elif _is_first_replica():
            sums = self.add_noise(key, sums, dtype)
        else:
            sums = [
                s if z is None else grid.rounded(s, z.spacing)
                for s, z in zip(sums, self._noises(sums), strict=True)
            ]
        if replicas > 1:
            sums = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, sums
            )
        return [tf.cast(s, tf.float32) for s in sums]

    def apply_noisy(self, noisy_sums: list, regularization: list | None = None):
        """Applies the gradients that follow from noisy sums.

        Args:
            noisy_sums: list of tensors, as `noisy` returns.
            regularization: list of gradients of weight regularisers, or None
                for each variable without one. They depend on weights alone and
                enter after the noise. Defaults to `None`.
        """
        gradients = self.privatize(noisy_sums)
        if regularization is not None:
            gradients = [
                g if r is None else g + tf.cast(r, tf.float32)
                for g, r in zip(gradients, regularization)
            ]
        # Keras adds the gradients of the replicas up again.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        gradients = [
            tf.cast(g / replicas if replicas > 1 else g, v.dtype)
            for g, v in zip(gradients, self._trainable_variables)
        ]
        self.inner_optimizer.apply(gradients, self._trainable_variables)

    # What Keras expects of an optimizer.

    def build(self, variables):
        if self.built:
            return
        self.inner_optimizer.build(variables)
        super().build(variables)
        # In a plain object, which neither Keras nor TensorFlow tracks.
        self._noise_key = noise.NoiseKey(self.seed)

    @property
    def variables(self):
        return self._variables + self.inner_optimizer.variables

    def save_own_variables(self, store):
        # The inner optimizer's are saved with it.
        for i, variable in enumerate(self._variables):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store):
        # In files of earlier versions the inner optimizer's follow.
        if len(store.keys()) not in (len(self._variables), len(self.variables)):
            super().load_own_variables(store)
            return
        for i, variable in enumerate(self._variables):
            variable.assign(store[str(i)])

    @property
    def learning_rate(self):
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self):
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list):
        self.inner_optimizer.finalize_variable_values(var_list)

    def apply(self, grads, trainable_variables=None):
        self._refuse()

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        self._refuse()

    def scale_loss(self, loss):
        self._refuse()

    def _refuse(self):
        raise RuntimeError(
            f"{type(self).__name__} was used outside of a private model: a "
            "plain model hands it gradients that are neither clipped nor "
            "noisy. Nothing was trained. Wrap the model first, "
            "`model = tf_dpsub.make_private(model)`, and train by `model.fit`; "
            "a loop of your own around gradients cannot be private."
        )

    def get_config(self):
        return {
            "optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            "noise_multiplier": self.noise_multiplier,
            "l2_norm_clip": self.l2_norm_clip,
            "batch_size": self.batch_size,
            "microbatch_size": self.microbatch_size,
            "per_example": self.per_example,
            "seed": self.seed,
            "secure_noise": self.secure_noise,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)


def _checked_inner(optimizer):
    if isinstance(optimizer, type):
        raise ValueError(
            f"Expected an optimizer, got the class {optimizer.__name__}. Call "
            f"it: {optimizer.__name__}()."
        )
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            f"Expected a plain inner optimizer, got {type(optimizer).__name__},"
            " which is private itself. Wrap its `inner_optimizer` instead."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or (
        optimizer.loss_scale_factor is not None
    ):
        raise ValueError(
            "Expected an inner optimizer without loss scaling, got "
            f"{type(optimizer).__name__} with it: scaling would move the "
            "gradients against the clip. A private model scales float16 losses "
            "itself, by a constant. Pass the plain optimizer."
        )
    return optimizer


def _unknown_argument(kind, name):
    """What is wrong with an argument that an optimizer does not have."""
    wrong = f"{kind.__name__} has no argument {name!r}"
    # Those of other libraries.
    if name in ("learning_rate", "lr", "momentum", "weight_decay"):
        return f"{wrong}: give it to the inner optimizer."
    if name in ("num_microbatches", "gradient_accumulation_steps"):
        return f"{wrong}: leave it out, each example is clipped alone."
    known = {
        parameter
        for parent in kind.__mro__
        if issubclass(parent, PrivateOptimizer)
        for parameter in inspect.signature(parent.__init__).parameters
    } - {"self", "unknown", "kwargs"}
    close = difflib.get_close_matches(name, sorted(known), n=1)
    if close:
        return f"{wrong}. Did you mean {close[0]!r}?"
    return f"{wrong}. It has {', '.join(sorted(known))}."


def check_privacy(
    noise_multiplier: float, l2_norm_clip: float, prefix: str = ""
):
    """Checks a noise multiplier and the clip that it belongs to.

    Args:
        noise_multiplier: float.
        l2_norm_clip: float.
        prefix: string, of the names in messages. Defaults to `""`.

    Raises:
        ValueError: if one is out of range.
    """
    multiplier = f"{prefix}noise_multiplier"
    clip = f"{prefix}norm_clip" if prefix else "l2_norm_clip"
    for name, value in ((multiplier, noise_multiplier), (clip, l2_norm_clip)):
        if not isinstance(value, numbers.Real):
            raise ValueError(f"Expected {name} to be a number, got {value!r}.")
    if not noise_multiplier >= 0 or math.isinf(noise_multiplier):
        raise ValueError(
            f"Expected finite {multiplier} >= 0, got {noise_multiplier}."
        )
    if not l2_norm_clip > 0:
        raise ValueError(f"Expected {clip} > 0, got {l2_norm_clip}.")
    if l2_norm_clip < _SMALLEST_CLIP:
        raise ValueError(
            f"Expected {clip} >= {_SMALLEST_CLIP}, got {l2_norm_clip}: "
            "squares of smaller norms may be flushed to zero. Scale the loss "
            "and the clip up."
        )
    if math.isinf(l2_norm_clip) and noise_multiplier > 0:
        raise ValueError(
            f"Expected a finite {clip} with {multiplier} > 0, got "
            "inf: without a clip no amount of noise makes a sum private."
        )


def _is_first_replica():
    context = tf.distribute.get_replica_context()
    index = tf.get_static_value(context.replica_id_in_sync_group)
    if index is None:
        raise NotImplementedError(
            "The distribution strategy does not tell which replica a step is "
            "traced for. Use MirroredStrategy or MultiWorkerMirroredStrategy."
        )
    return int(index) == 0
