"""Single steps of a mechanism, on gradients that are given.

What a step releases is the noisy sums that its optimizer makes gradients of. It
is compared with what the mechanism claims, said here once more, apart from the
mechanism's own code.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub import layers
from tf_dpsub.auditing import banded_steps
from tf_dpsub.optimizers import GEP, AdaptiveDPSGD
from tf_dpsub.training.private_model import make_private

# Kernels [inputs, outputs] of the model whose gradients are given.
_KERNELS = ((6, 4), (5, 3))
INPUTS = [p for p, _ in _KERNELS]
OUTPUTS = [d for _, d in _KERNELS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim of a mechanism on a part of what it releases.

    Attributes:
        sensitivity: float, the norm by which one example moves the part.
        stddev: float, of the noise in each number.
    """

    sensitivity: float
    stddev: float


def claims(optimizer, parts: int) -> list:
    """The claims of an optimizer on each tensor that it releases.

    Args:
        optimizer: `tf_dpsub.optimizers.PrivateOptimizer`.
        parts: int, the number of tensors.

    Returns:
        List of `Claim`. The sensitivity is that of all tensors with the same
        claim together.
    """
    if isinstance(optimizer, AdaptiveDPSGD):
        count = Claim(sensitivity=0.5, stddev=optimizer.clipped_count_stddev)
        # In units of the clip, with what the count leaves of the budget.
        precision = optimizer.noise_multiplier**-2 - (2 * count.stddev) ** -2
        unit = Claim(sensitivity=1.0, stddev=precision**-0.5)
        return [unit] * (parts - 1) + [count]
    first = Claim(
        sensitivity=optimizer.l2_norm_clip,
        stddev=optimizer.noise_multiplier * optimizer.l2_norm_clip,
    )
    if not (isinstance(optimizer, GEP) and optimizer.residual):
        return [first] * parts
    clip = optimizer.residual_norm_clip
    residual = Claim(
        sensitivity=clip, stddev=optimizer.residual_noise_multiplier * clip
    )
    return [first] + [residual] * (parts - 1)


class StepAudit:
    """Makes single steps of a mechanism on gradients that are given.

    The model has two kernels, and a loss that is linear in them: the gradient
    of an example is an outer product of its inputs and its targets for each,
    or the mean of those of its views.

    Args:
        make_optimizer: function of an inner optimizer and of the number of
            weights, which returns a `tf_dpsub.optimizers.PrivateOptimizer` with
            noise, without a seed.
        carrier_rank: int, for `RGP`, the rank of carriers. Defaults to `None`.
        batch_size: int, rows of a batch. Defaults to `16`.
        views: int, views of each example, which stand side by side in its
            inputs and targets. Defaults to `1`.
        dtype_policy: string, of the model; in `"mixed_float16"` large numbers
            overflow on the way. Defaults to `"float32"`.

    Attributes:
        optimizer: what `make_optimizer` returned.
        batch_size: int.
        dtype_policy: string.
        released_numbers: int, how many numbers a step releases.
    """

    def __init__(
        self,
        make_optimizer: Callable,
        *,
        carrier_rank: int | None = None,
        batch_size: int = 16,
        views: int = 1,
        dtype_policy: str = "float32",
    ):
        self.batch_size = batch_size
        self.views = views
        self.dtype_policy = dtype_policy
        model = _linear_model(dtype_policy)
        if carrier_rank is not None:
            layers.reparametrize(model, carrier_rank)
        self.optimizer = make_optimizer(
            keras.optimizers.SGD(1.0), model.count_params()
        )
        self._model = make_private(model)
        self._model.compile(self.optimizer, loss=_product)
        empty = self._batch(self.nothing())
        self._model.prepare_training(
            tf.nest.map_structure(tf.type_spec_from_value, empty), views
        )
        self._weights = self._model.trainable_variables
        # The weights, and a clip that follows what is released.
        self._changed = [*self._weights]
        if isinstance(self.optimizer, AdaptiveDPSGD):
            self._changed.append(self.optimizer.clip_variable)
        self._start = [tf.identity(w) for w in self._changed]
        self.optimizer.prepare()
        shapes = [
            s.shape
            for s in self.optimizer.released_sums(
                self._model.training_step(empty)
            )
        ]
        self._sizes = [math.prod(shape) for shape in shapes]
        self.released_numbers = sum(self._sizes)
        self._claims = claims(self.optimizer, len(shapes))
        self._ratios = banded_steps.ratios_of(self.optimizer)
        self._many = tf.function(self._traced_steps, autograph=False)
        self._attacks = tf.function(self._traced_attacks, autograph=False)
        self._pairs = tf.function(
            self._traced_pairs,
            autograph=False,
            # Of any number of batches.
            input_signature=[
                tf.TensorSpec([None, *part.shape]) for part in self.nothing()
            ],
        )
        self._sums = tf.function(
            lambda x, y, rows: self._traced_sums(self._batch((x, y), rows)),
            autograph=False,
        )
        self._ascent = tf.function(self._traced_ascent, autograph=False)

    def nothing(self):
        """A batch of examples without gradients: inputs and targets."""
        return tuple(
            np.zeros((self.batch_size, self.views * numbers), np.float32)
            for numbers in (sum(INPUTS), sum(OUTPUTS))
        )

    def random(self, generator, scale=1.0):
        """A batch of examples with gradients of about some norm."""
        x, y = (
            generator.normal(size=a.shape).astype(np.float32)
            for a in self.nothing()
        )
        norms = np.sqrt(sq_norms(x, y))[:, None]
        return x, (y * (scale / norms)).astype(np.float32)

    def released(self, batch: tuple, steps: int, rows: int | None = None):
        """Makes steps on one batch, each from the same start.

        Args:
            batch: tuple of inputs and targets.
            steps: int.
            rows: int, only so many rows are real. Defaults to `None`, all.

        Returns:
            Float arrays `[steps, numbers]`, of what is released, in claimed
            standard deviations of the noise; and `[steps, weights]`, of the
            gradients that follow. Where steps share noise, both are what
            remains when all that is claimed to be shared is taken out.
        """
        banded_steps.begin(self.optimizer)
        released, gradients = self._many(
            *self._arguments(batch, rows), tf.constant(steps)
        )
        return [
            banded_steps.fresh(values, self._ratios)
            for values in (
                released.numpy().astype(float) / self._stddevs(),
                gradients.numpy().astype(float),
            )
        ]

    def scores(self, batch: tuple, steps: int, rows: int | None = None):
        """Released sums along the direction that the last example moves them.

        Each step has a direction of its own: an attacker knows carriers and
        bases, which may be new at a step. Where steps share noise, the attacker
        looks at all of those that follow a step, without the example, and that
        share noise with it.

        Args:
            batch: tuple of inputs and targets.
            steps: int.
            rows: int, only so many rows are real. Defaults to `None`, all.

        Returns:
            Float arrays `[steps]`, in claimed standard deviations of the noise:
            of what is released, and of what the last example adds to it.
        """
        scores, shifts, _ = self._attacked(batch, steps, rows)
        return [scores.astype(float), shifts.astype(float)]

    def refuted(self, batch: tuple, steps: int, rows: int | None = None):
        """Counts numbers whose low bits tell that the last example is there.

        A released number rules out a sum, that with or that without the
        example, if no float32 noise added to this sum rounds to the number.

        Args: as `scores`.

        Returns:
            Float array `[steps]`, numbers that rule out the sum without the
            example, less those that rule out the sum with it.
        """
        return self._attacked(batch, steps, rows)[2]

    def sums(self, batch, rows=None) -> list:
        """The sums that a batch would release without noise.

        Args:
            batch: tuple of inputs and targets.
            rows: int, only so many rows are real. Defaults to `None`, all.

        Returns:
            List of float64 vectors, one for each part.
        """
        sums = self._sums(*self._arguments(batch, rows))
        return [np.ravel(s).astype(float) for s in sums]

    def ascent(self, batch) -> tuple:
        """Directions of a batch in which its last example moves sums further.

        Args:
            batch: tuple of inputs and targets.

        Returns:
            Tuple of arrays as those of the batch; zeros where nothing does.
        """
        return tuple(g.numpy() for g in self._ascent(*batch))

    def _attacked(self, batch, steps, rows):
        """Arrays `[steps]`: those of `scores`, and that of `refuted`."""
        attacks = self._attacks(
            *self._arguments(batch, rows), tf.constant(steps)
        )
        return [values.numpy()[:, 0] for values in attacks]

    def _arguments(self, batch, rows):
        """A batch, and how many of its rows are real, for a traced function."""
        rows = self.batch_size if rows is None else rows
        return *batch, tf.constant(rows)

    def _traced_sums(self, data):
        return self.optimizer.released_sums(self._model.training_step(data))

    def _traced_pair(self, x, y):
        """The sums with the last example, and those without it."""
        return [
            self._traced_sums(self._batch((x, y), rows))
            for rows in (None, self.batch_size - 1)
        ]

    def _traced_pairs(self, xs, ys):
        """The sums of several batches, `[batches, 2, numbers]`."""

        def sums(k):
            """Of batch k // 2: with the last example, then without it."""
            rows = self.batch_size - k % 2
            parts = self._traced_sums(
                self._batch((xs[k // 2], ys[k // 2]), rows)
            )
            return _flat(parts, tf.float64)

        flat = tf.map_fn(
            sums,
            tf.range(2 * tf.shape(xs)[0]),
            fn_output_signature=tf.TensorSpec(
                [self.released_numbers], tf.float64
            ),
            parallel_iterations=1,
        )
        return tf.reshape(flat, [-1, 2, self.released_numbers])

    def _traced_ascent(self, x, y):
        """Gradients of how far the last example moves the part it moves most.

        Zero where they are not finite, as those of a norm of zero.
        """
        sums, tapes = [], []
        for rows in (None, self.batch_size - 1):
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                sums.append(self._traced_sums(self._batch((x, y), rows)))
            tapes.append(tape)
        moved = [a - b for a, b in zip(*sums)]
        shares = {}
        for claim, m in zip(self._claims, moved):
            share = tf.reduce_sum(tf.cast(m, tf.float64) ** 2)
            shares[claim] = shares.get(claim, 0.0) + share
        shares = {c: s / c.sensitivity**2 for c, s in shares.items()}
        most = functools.reduce(tf.maximum, shares.values())
        ascent = [tf.zeros_like(x), tf.zeros_like(y)]
        for sign, tape, parts in zip((1, -1), tapes, sums):
            along = [
                sign * m * tf.cast(shares[c] >= most, m.dtype)
                for c, m in zip(self._claims, moved)
            ]
            gradients = tape.gradient(parts, [x, y], output_gradients=along)
            ascent = [
                a if g is None else a + tf.where(tf.math.is_finite(g), g, 0)
                for a, g in zip(ascent, gradients)
            ]
        return ascent

    def _traced_steps(self, x, y, rows, steps):
        data = self._batch((x, y), rows)

        def step():
            self.optimizer.prepare()
            noisy = self._noisy_sums(data)
            moved = [s - w for s, w in zip(self._start, self._weights)]
            return _flat(noisy), _flat(moved)

        weights = sum(math.prod(w.shape) for w in self._weights)
        return self._repeated(step, [self.released_numbers, weights], steps)

    def _traced_attacks(self, x, y, rows, steps):
        """Scores, shifts and refuted sums of steps: one trace serves both."""
        data = self._batch((x, y), rows)
        others = self._batch((x, y), self.batch_size - 1)
        stddevs = tf.constant(self._stddevs(), tf.float32)

        def step():
            banded_steps.begin(self.optimizer)
            self.optimizer.prepare()
            sums = with_it, without = self._traced_pair(x, y)
            moved = [a - b for a, b in zip(with_it, without)]
            shift = _flat(moved) / stddevs
            size = tf.norm(shift)
            noisy = [
                _flat(self._noisy_sums(others if later else data))
                for later in range(len(self._ratios))
            ]
            score = tf.reduce_sum(
                banded_steps.matched(noisy, self._ratios) / stddevs * shift
            )
            refuted = [
                tf.math.count_nonzero(
                    ~_is_reachable(noisy[0], s), dtype="float32"
                )
                for s in sums
            ]
            return (
                [tf.math.divide_no_nan(score, size)],
                [size],
                [refuted[1] - refuted[0]],
            )

        return self._repeated(step, [1, 1, 1], steps)

    def _repeated(self, step, sizes, steps):
        """Stacks what so many steps return, each from the start."""
        written = [
            tf.TensorArray(tf.float32, steps, element_shape=[size])
            for size in sizes
        ]

        def body(k, *arrays):
            for w, start in zip(self._changed, self._start):
                w.assign(start)
            return k + 1, *(a.write(k, s) for a, s in zip(arrays, step()))

        _, *written = tf.while_loop(
            lambda k, *_: k < steps,
            body,
            (tf.constant(0), *written),
            parallel_iterations=1,
        )
        for w, start in zip(self._changed, self._start):
            w.assign(start)
        return [array.stack() for array in written]

    def _noisy_sums(self, data):
        """Ends a step, and returns the noisy sums that it made gradients of."""
        noisy_sums = self.optimizer.noisy(self._model.training_step(data))
        self.optimizer.apply_noisy(noisy_sums)
        return noisy_sums

    def _batch(self, batch, rows=None):
        """A batch as a step takes it: its first rows are real, all or some.

        Shapes are static, so the step is traced once.
        """
        if self.views > 1:
            batch = [
                tf.reshape(part, [part.shape[0], self.views, -1])
                for part in batch
            ]
        size = batch[0].shape[0]
        padding = -size % self._model.microbatch_size_of(self.views)
        x, y = (
            tf.pad(part, [[0, padding]] + [[0, 0]] * (len(part.shape) - 1))
            for part in batch
        )
        is_real = tf.range(size + padding) < (size if rows is None else rows)
        return {"x": x, "y": y, "real": tf.cast(is_real, tf.float32)}

    def _stddevs(self):
        return np.repeat([c.stddev for c in self._claims], self._sizes)

    def movement(self, batch: tuple) -> float:
        """The distance by which the last example moves what is released.

        Args:
            batch: tuple of inputs and targets.

        Returns:
            Float, as a share of the claimed sensitivity; of several parts with
            claims of their own, the largest share.
        """
        ends = np.cumsum(self._sizes)[:-1]
        moved: dict[Claim, float] = {}
        for claim, part in zip(
            self._claims, np.split(self._moved([batch])[0], ends)
        ):
            moved[claim] = moved.get(claim, 0.0) + float(np.sum(part**2))
        return max(math.sqrt(m) / c.sensitivity for c, m in moved.items())

    def canary(self, tries=100, seed=0):
        """A batch whose last example has a huge gradient.

        Of some random directions, the one that moves what is released most, in
        claimed noise.
        """
        generator = np.random.default_rng(seed)
        batches = []
        for _ in range(tries):
            x, y = self.nothing()
            x[-1], y[-1] = (
                1e3 * generator.normal(size=a.shape[1]) for a in (x, y)
            )
            batches.append((x, y))
        shifts = np.linalg.norm(self._moved(batches) / self._stddevs(), axis=1)
        return batches[int(np.argmax(np.nan_to_num(shifts, nan=-1.0)))]

    def _moved(self, batches):
        """The last example's share of what is released, `[batches, numbers]`.

        One by one for each of the batches.
        """
        pairs = self._pairs(*map(np.stack, zip(*batches))).numpy()
        return pairs[:, 0] - pairs[:, 1]


def _linear_model(dtype_policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype_policy)
    try:
        return _two_kernels()
    finally:
        keras.config.set_dtype_policy(before)


def _two_kernels():
    inputs = keras.Input([sum(INPUTS)])
    outputs, start = [], 0
    for k, (p, d) in enumerate(_KERNELS):
        layer = keras.layers.Dense(
            d, use_bias=False, kernel_initializer="ones", name=f"kernel{k}"
        )
        outputs.append(layer(inputs[:, start : start + p]))
        start += p
    return keras.Model(inputs, keras.layers.Concatenate()(outputs))


def _product(y_true, y_pred):
    return keras.ops.sum(y_true * y_pred, -1)


def sq_norms(x, y):
    """Squared norms of the gradients of examples, over both kernels."""
    views = x.shape[1] // sum(INPUTS)
    x, y = (a.reshape(len(a), views, -1) for a in (x, y))
    parts = zip(
        np.split(x, np.cumsum(INPUTS)[:-1], 2),
        np.split(y, np.cumsum(OUTPUTS)[:-1], 2),
    )
    # The inner product of the gradients of two views is that of their inputs
    # times that of their targets.
    products = sum(_gram(a) * _gram(b) for a, b in parts)
    return np.maximum(products.sum((1, 2)), 0) / views**2


def _gram(a):
    return a @ a.swapaxes(1, 2)


def _is_reachable(noisy, sums):
    """Whether a float32 number added to a sum rounds to the noisy one."""
    sums = tf.concat(
        [tf.reshape(tf.cast(s, tf.float64), [-1]) for s in sums], 0
    )
    nearest = tf.cast(tf.cast(noisy, tf.float64) - sums, tf.float32)
    reached = tf.zeros_like(noisy, tf.bool)
    for towards in (-math.inf, nearest, math.inf):
        noise = tf.math.nextafter(nearest, tf.zeros_like(nearest) + towards)
        made = tf.cast(sums + tf.cast(noise, tf.float64), tf.float32)
        reached |= made == noisy
    return reached


def _flat(tensors, dtype=tf.float32):
    return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], 0)
