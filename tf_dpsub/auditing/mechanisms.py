"""Audits of single steps of a mechanism, on gradients that are given.

What a step releases is the noisy sums that its optimizer makes gradients of:
they are recorded where `privatize` takes them. All checks compare them with
what the mechanism claims, said here once more, apart from its own code.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from scipy import stats

from tf_dpsub import accounting, layers
from tf_dpsub.auditing.lower_bounds import epsilon_of_rates
from tf_dpsub.data import given_batches
from tf_dpsub.optimizers import GEP
from tf_dpsub.training.private_model import make_private

# Kernels [inputs, outputs] of the model whose gradients are given.
_KERNELS = ((6, 4), (5, 3))
_INPUTS = [p for p, _ in _KERNELS]
_OUTPUTS = [d for _, d in _KERNELS]
# Of all tests of one check together: what is right fails so seldom.
_SIGNIFICANCE = 1e-6
_LAGS = (1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check came to.

    Attributes:
        check: string.
        passed: bool.
        value: float, what was measured: a share of what is claimed, a
            distance, a correlation, or a lower bound on epsilon.
        detail: string, a sentence.
    """

    check: str
    passed: bool
    value: float
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """What a mechanism claims of a part of what it releases.

    Attributes:
        sensitivity: float, the norm by which one example moves the part.
        stddev: float, of the noise in each number.
    """

    sensitivity: float
    stddev: float


def claims(optimizer, parts: int) -> list:
    """What an optimizer claims of each tensor that it releases.

    Args:
        optimizer: `tf_dpsub.optimizers.PrivateOptimizer`.
        parts: int, the number of tensors.

    Returns:
        List of `Claim`. The sensitivity is that of all tensors with the same
        claim together.
    """
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


class MechanismAudit:
    """Lets a mechanism make single steps on gradients that are given.

    The model has two kernels, and a loss that is linear in them: the gradient
    of an example is an outer product of its inputs and its targets for each.

    Args:
        make_optimizer: function of an inner optimizer and of the number of
            weights, which returns a `tf_dpsub.optimizers.PrivateOptimizer` with
            noise, without a seed.
        carrier_rank: int, for `RGP`, the rank of carriers. Defaults to `None`.
        batch_size: int, rows of a batch. Defaults to `16`.
        dtype_policy: string, of the model; in `"mixed_float16"` large numbers
            overflow on the way. Defaults to `"float32"`.

    Attributes:
        optimizer: what `make_optimizer` returned.
    """

    def __init__(
        self,
        make_optimizer: Callable,
        *,
        carrier_rank: int | None = None,
        batch_size: int = 16,
        dtype_policy: str = "float32",
    ):
        self.batch_size = batch_size
        self._dtype_policy = dtype_policy
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
            tf.nest.map_structure(tf.type_spec_from_value, empty)
        )
        self._weights = self._model.trainable_variables
        self._start = [tf.identity(w) for w in self._weights]
        self.optimizer.prepare(self._model)
        shapes = [
            s.shape
            for s in self.optimizer.released_sums(
                self._model.training_step(empty)
            )
        ]
        self._sizes = [math.prod(shape) for shape in shapes]
        self._claims = claims(self.optimizer, len(shapes))
        self._many = tf.function(self._traced_steps, autograph=False)
        self._scores = tf.function(self._traced_scores, autograph=False)
        self._low_bits = tf.function(self._traced_low_bits, autograph=False)
        self._sums = tf.function(self._traced_sums, autograph=False)
        self._ascent = tf.function(self._traced_ascent, autograph=False)

    # What the mechanism does.

    def nothing(self):
        """A batch of examples without gradients: inputs and targets."""
        return (
            np.zeros((self.batch_size, sum(_INPUTS)), np.float32),
            np.zeros((self.batch_size, sum(_OUTPUTS)), np.float32),
        )

    def random(self, generator, scale=1.0):
        """A batch of examples with gradients of about some norm."""
        x, y = (
            generator.normal(size=a.shape).astype(np.float32)
            for a in self.nothing()
        )
        norms = np.sqrt(_sq_norms(x, y))[:, None]
        return x, (y * (scale / norms)).astype(np.float32)

    def released(self, batch: tuple, steps: int, rows: int | None = None):
        """What so many steps on the same batch release, each from the start.

        Args:
            batch: tuple of inputs and targets.
            steps: int.
            rows: int, only so many rows are real. Defaults to `None`, all.

        Returns:
            Float arrays `[steps, numbers]`, of what is released, in claimed
            standard deviations of the noise; and `[steps, weights]`, of the
            gradients that follow.
        """
        data = self._batch(batch, rows)
        released, gradients = self._many(data, tf.constant(steps))
        return released.numpy().astype(float) / self._stddevs(), (
            gradients.numpy().astype(float)
        )

    def scores(self, batch: tuple, steps: int, rows: int | None = None):
        """How far steps go along what the last example of a batch moves.

        Each along its own direction: carriers and bases, which may be new at a
        step, are known to an attacker.

        Args:
            batch: tuple of inputs and targets.
            steps: int.
            rows: int, only so many rows are real. Defaults to `None`, all.

        Returns:
            Float arrays `[steps]`, in claimed standard deviations of the noise:
            of what is released, and of what the last example adds to it.
        """
        with_it, without = (
            self._batch(batch, r) for r in (None, self.batch_size - 1)
        )
        found = self._scores(
            self._batch(batch, rows), with_it, without, tf.constant(steps)
        )
        return [values.numpy()[:, 0].astype(float) for values in found]

    def sums(self, batch, rows=None) -> list:
        """What would be released of a batch without noise.

        Returns:
            List of float64 vectors, one for each part.
        """
        found = self._sums(self._batch(batch, rows))
        return [np.ravel(s).astype(float) for s in found]

    def ascent(self, batch) -> tuple:
        """Along what inputs and targets the last example moves sums further.

        Returns:
            Tuple of arrays as those of the batch; zeros where nothing does.
        """
        return tuple(g.numpy() for g in self._ascent(*batch))

    def _traced_sums(self, data):
        return self.optimizer.released_sums(self._model.training_step(data))

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
            found = tape.gradient(parts, [x, y], output_gradients=along)
            ascent = [
                a if f is None else a + tf.where(tf.math.is_finite(f), f, 0)
                for a, f in zip(ascent, found)
            ]
        return ascent

    def _traced_steps(self, data, steps):
        def step():
            self.optimizer.prepare(self._model)
            noisy = self._noisy_sums(data)
            moved = [s - w for s, w in zip(self._start, self._weights)]
            return _flat(noisy), _flat(moved)

        weights = sum(math.prod(w.shape) for w in self._weights)
        return self._repeated(step, [sum(self._sizes), weights], steps)

    def _traced_scores(self, data, with_it, without, steps):
        stddevs = tf.constant(self._stddevs(), tf.float32)

        def step():
            self.optimizer.prepare(self._model)
            sums = (self._traced_sums(d) for d in (with_it, without))
            shift = _flat([a - b for a, b in zip(*sums)]) / stddevs
            size = tf.norm(shift)
            score = tf.reduce_sum(
                _flat(self._noisy_sums(data)) / stddevs * shift
            )
            return [tf.math.divide_no_nan(score, size)], [size]

        return self._repeated(step, [1, 1], steps)

    def _traced_low_bits(self, data, with_it, without, steps):
        def step():
            self.optimizer.prepare(self._model)
            sums = [self._traced_sums(d) for d in (with_it, without)]
            noisy = _flat(self._noisy_sums(data))
            refuted = [
                tf.math.count_nonzero(~_is_reachable(noisy, s), dtype="float32")
                for s in sums
            ]
            return [[refuted[1] - refuted[0]]]

        return self._repeated(step, [1], steps)

    def _repeated(self, step, sizes, steps):
        """Stacks what so many steps return, each from the start."""
        written = [
            tf.TensorArray(tf.float32, steps, element_shape=[size])
            for size in sizes
        ]

        def body(k, *arrays):
            for w, start in zip(self._weights, self._start):
                w.assign(start)
            return k + 1, *(a.write(k, s) for a, s in zip(arrays, step()))

        _, *written = tf.while_loop(
            lambda k, *_: k < steps,
            body,
            (tf.constant(0), *written),
            parallel_iterations=1,
        )
        for w, start in zip(self._weights, self._start):
            w.assign(start)
        return [array.stack() for array in written]

    def _noisy_sums(self, data):
        """Ends a step, and returns the noisy sums that it made gradients of."""
        optimizer, seen = self.optimizer, []
        privatize = optimizer.privatize

        def recorded(noisy_sums):
            seen.append(noisy_sums)
            return privatize(noisy_sums)

        object.__setattr__(optimizer, "privatize", recorded)
        try:
            optimizer.release(self._model.training_step(data))
        finally:
            object.__delattr__(optimizer, "privatize")
        (noisy,) = seen
        return noisy

    def _batch(self, batch, rows=None):
        data = given_batches.padded(
            given_batches.named(*batch), self._model.microbatch_size
        )
        if rows is not None:
            is_real = tf.range(data["real"].shape[0]) < rows
            data["real"] *= tf.cast(is_real, tf.float32)
        return data

    def _stddevs(self):
        return np.repeat([c.stddev for c in self._claims], self._sizes)

    # Checks.

    def check_noise(self, steps: int = 2000) -> list:
        """Whether each number that is released has the noise that is claimed.

        The sum of squares of each over steps is that of so many standard
        normal numbers, all of them together are distributed as such, and no two
        of them, in a step or in steps that follow each other, are correlated.

        Args:
            steps: int. Defaults to `2000`.

        Returns:
            List of `Finding`.
        """
        z, _ = self.released(self.nothing(), steps)
        return [_variance(z), _distribution(z), _independence(z)]

    def check_restart(self, other, steps: int = 500) -> list:
        """Whether the noise of another audit, a process anew, is another.

        Args:
            other: `MechanismAudit` of the same mechanism.
            steps: int. Defaults to `500`.

        Returns:
            List of one `Finding`.
        """
        pairs = [a.released(self.nothing(), steps)[0] for a in (self, other)]
        correlation = _correlation(*pairs)
        return [
            Finding(
                check="restart",
                passed=_is_likely(correlation, pairs[0].size, 1),
                value=correlation,
                detail=f"The noise of two starts is correlated by "
                f"{correlation:.4f}.",
            )
        ]

    def check_divisor(self, steps: int = 2000) -> list:
        """Whether gradients are divided by a number that is public.

        With one real row fewer the noise in the gradients has to be the same.

        Args:
            steps: int. Defaults to `2000`.

        Returns:
            List of one `Finding`.
        """
        empty, few = self.nothing(), max(1, self.batch_size - 1)
        variances = [
            np.mean(self.released(empty, steps, rows)[1] ** 2)
            for rows in (None, few)
        ]
        ratio = variances[1] / variances[0] if variances[0] else math.inf
        # Sums of squares of as many normal numbers as are released.
        spread = 2 / math.sqrt(steps * sum(self._sizes))
        limit = stats.norm.isf(_SIGNIFICANCE / 2) * spread
        return [
            Finding(
                check="divisor",
                passed=bool(abs(math.log(ratio)) < limit),
                value=float(ratio),
                detail=f"With {few} rows instead of {self.batch_size} the "
                f"gradient's noise has {ratio:.4f} times the variance.",
            )
        ]

    def check_sensitivity(self, cases: int = 300, seed: int = 0) -> list:
        """Whether one example moves what is released by what is claimed.

        Neighbouring batches are drawn of kinds that are hard: gradients that
        are huge, tiny, zero, not finite, denormal, repeated, of one kernel
        alone, as large as the clip, or such that rounding of sums differs. The
        search goes on from the worst of them by changing it at random, and from
        others by gradient ascent.

        Args:
            cases: int, pairs of batches. Defaults to `300`.
            seed: int. Defaults to `0`.

        Returns:
            List of one `Finding`.
        """
        generator = np.random.default_rng(seed)
        worst, worst_batch = 0.0, None
        climb = _Climb(self, generator)
        for k in range(cases):
            if k % 3 == 0 or worst_batch is None:
                batch = _hard_batch(self, generator, k // 3)
            elif k % 3 == 1:
                batch = _mutated(worst_batch, generator)
            else:
                batch = climb.next_batch()
            moved = self.movement(batch)
            if k % 3 == 2:
                climb.tell(batch, moved)
            if not moved <= worst:
                worst, worst_batch = moved, batch
            if math.isnan(worst):
                break
        policy = self._dtype_policy
        in_policy = "" if policy == "float32" else f", {policy}"
        return [
            Finding(
                check=f"sensitivity{in_policy}",
                passed=worst <= 1,
                value=worst,
                detail=f"Of {cases} pairs of batches, one example moves what "
                f"is released by at most {worst:.6f} of what is claimed.",
            )
        ]

    def movement(self, batch: tuple) -> float:
        """How far the last example moves what is released.

        Args:
            batch: tuple of inputs and targets.

        Returns:
            Float, as a share of the claimed sensitivity; of several parts with
            claims of their own, the largest share.
        """
        moved: dict[Claim, float] = {}
        for claim, part in zip(self._claims, self._moved(batch)):
            moved[claim] = moved.get(claim, 0.0) + float(np.sum(part**2))
        return max(math.sqrt(m) / c.sensitivity for c, m in moved.items())

    def check_epsilon(
        self,
        *,
        delta: float = 1e-5,
        runs: int = 4000,
        confidence: float = 0.999,
    ) -> list:
        """Whether an attacker proves no more than the claimed epsilon.

        Half of the runs of one step have an example with a huge gradient, half
        do not; the attacker knows all else, and looks along the direction in
        which the example moves what is released.

        Args:
            delta: float. Defaults to `1e-5`.
            runs: int, of each kind. Defaults to `4000`.
            confidence: float, of the bound. Defaults to `0.999`.

        Returns:
            List of one `Finding`.
        """
        batch = self.canary()
        claimed = self._claimed_epsilon(delta)
        (inside, shifts), (outside, _) = (
            self.scores(batch, runs, rows)
            for rows in (None, self.batch_size - 1)
        )
        bound, shift = 0.0, float(np.mean(shifts))
        if shift > 0:
            threshold = _best_threshold(shift, runs, delta, confidence)
            bound = epsilon_of_rates(
                int(np.sum(inside >= threshold)),
                len(inside),
                int(np.sum(outside >= threshold)),
                len(outside),
                delta=delta,
                confidence=confidence,
            )
        return [
            Finding(
                check="epsilon",
                passed=bound <= claimed,
                value=bound,
                detail=f"An attacker proves ε ≥ {bound:.3f}, of ε = "
                f"{claimed:.3f} claimed, at δ = {delta:g}.",
            )
        ]

    def check_low_bits(
        self, *, delta: float = 1e-5, runs: int = 500, confidence: float = 0.999
    ) -> list:
        """Whether low bits of what is released tell what noise was added to.

        As `check_epsilon`, by an attacker who knows both sums that are
        possible, and asks of each number that is released whether any float32
        noise makes it of the one sum, and of the other.

        Args:
            delta: float. Defaults to `1e-5`.
            runs: int, of each kind. Defaults to `500`.
            confidence: float, of the bound. Defaults to `0.999`.

        Returns:
            List of one `Finding`.

        Reference:
            - [Mironov, 2012](https://doi.org/10.1145/2382196.2382264)
        """
        batch = self.random(np.random.default_rng(0))
        with_it, without = (
            self._batch(batch, rows) for rows in (None, self.batch_size - 1)
        )
        inside, outside = (
            self._low_bits(data, with_it, without, tf.constant(runs))[0].numpy()
            for data in (with_it, without)
        )
        claimed = self._claimed_epsilon(delta)
        bound = epsilon_of_rates(
            int(np.sum(inside > 0)),
            runs,
            int(np.sum(outside > 0)),
            runs,
            delta=delta,
            confidence=confidence,
        )
        return [
            Finding(
                check="low bits",
                passed=bound <= claimed,
                value=bound,
                detail=f"By low bits an attacker proves ε ≥ {bound:.3f}, of "
                f"ε = {claimed:.3f} claimed, at δ = {delta:g}.",
            )
        ]

    def _claimed_epsilon(self, delta):
        """Of one step on a batch that is given."""
        return accounting.epsilon(
            noise_multiplier=self.optimizer.effective_noise_multiplier,
            sampling_rate=1.0,
            steps=1,
            delta=delta,
            accountant="pld",
        )

    def canary(self, tries=100, seed=0):
        """A batch with one huge gradient, of its last example.

        Of some directions the one that moves most, in claimed noise.
        """
        generator = np.random.default_rng(seed)
        found, most = None, -1.0
        for _ in range(tries):
            x, y = self.nothing()
            x[-1], y[-1] = (
                1e3 * generator.normal(size=a.shape[1]) for a in (x, y)
            )
            shift = np.linalg.norm(self._shift((x, y)))
            if shift > most:
                found, most = (x, y), shift
        return found

    def _shift(self, batch):
        """How the last example moves what is released, in claimed noise."""
        return np.concatenate(self._moved(batch)) / self._stddevs()

    def _moved(self, batch):
        """By what the last example moves each part."""
        with_it, without = (
            self.sums(batch, rows) for rows in (None, self.batch_size - 1)
        )
        return [a - b for a, b in zip(with_it, without)]

    def run(self, *, steps=2000, cases=300, runs=4000) -> list:
        """All checks but that of a restart.

        Returns:
            List of `Finding`.
        """
        return [
            *self.check_noise(steps),
            *self.check_divisor(steps),
            *self.check_sensitivity(cases),
            *self.check_epsilon(runs=runs),
            *self.check_low_bits(runs=max(1, runs // 2)),
        ]


def _linear_model(dtype_policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype_policy)
    try:
        return _two_kernels()
    finally:
        keras.config.set_dtype_policy(before)


def _two_kernels():
    inputs = keras.Input([sum(_INPUTS)])
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


def _sq_norms(x, y):
    """Squared norms of the gradients of examples, over both kernels."""
    parts = zip(
        np.split(x, np.cumsum(_INPUTS)[:-1], 1),
        np.split(y, np.cumsum(_OUTPUTS)[:-1], 1),
    )
    return sum((a**2).sum(1) * (b**2).sum(1) for a, b in parts)


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


def _flat(tensors):
    return tf.concat(
        [tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], 0
    )


# Statistics of what should be standard normal numbers, [steps, numbers].


def _variance(z):
    steps, numbers = z.shape
    sums = np.sum(z**2, 0)
    tails = np.minimum(stats.chi2.cdf(sums, steps), stats.chi2.sf(sums, steps))
    worst = int(np.argmin(tails))
    return Finding(
        check="variance",
        passed=bool(tails[worst] > _SIGNIFICANCE / (2 * numbers)),
        value=float(sums[worst] / steps),
        detail=f"Of {numbers} numbers, the noise in number {worst} has "
        f"{sums[worst] / steps:.3f} times the claimed variance; those of all "
        f"are {sums.min() / steps:.3f} to {sums.max() / steps:.3f}.",
    )


def _distribution(z):
    statistic, p_value = stats.kstest(z.ravel(), "norm")
    return Finding(
        check="distribution",
        passed=bool(p_value > _SIGNIFICANCE),
        value=float(statistic),
        detail=f"Kolmogorov–Smirnov distance {statistic:.4f}, p = "
        f"{p_value:.2g}.",
    )


def _independence(z):
    """Correlations of numbers in a step, and with those of later steps."""
    steps, numbers = z.shape
    scaled = z / np.maximum(np.sqrt(np.mean(z**2, 0)), 1e-30)
    largest, tests = 0.0, 0
    for lag in (0, *_LAGS):
        products = scaled[lag:].T @ scaled[: steps - lag] / (steps - lag)
        if lag == 0:
            np.fill_diagonal(products, 0.0)
        largest = max(largest, float(np.abs(products).max()))
        tests += products.size
    return Finding(
        check="independence",
        passed=_is_likely(largest, steps, tests),
        value=largest,
        detail=f"Among {tests:,} pairs of numbers, of one step and of up to "
        f"{max(_LAGS)} steps later, the largest correlation is {largest:.3f}.",
    )


def _correlation(first, second):
    products = np.sum(first * second)
    sizes = math.sqrt(np.sum(first**2) * np.sum(second**2))
    return float(products / sizes) if sizes else 0.0


def _is_likely(correlation, samples, tests):
    """Whether the largest of many correlations may be one by chance."""
    limit = stats.norm.isf(_SIGNIFICANCE / (2 * tests))
    # A little more: of products of normal numbers, not of normal ones.
    return bool(abs(correlation) * math.sqrt(samples) < 1.2 * limit)


def _best_threshold(shift, runs, delta, confidence):
    """The threshold that is expected to prove most, of two normal scores."""

    def expected(threshold):
        counts = [
            round(runs * stats.norm.sf(threshold - mean)) for mean in (shift, 0)
        ]
        return epsilon_of_rates(
            counts[0], runs, counts[1], runs, delta=delta, confidence=confidence
        )

    return max(np.linspace(-3, shift + 3, 121), key=expected)


# Batches whose last example is hard.


def _hard_batch(audit, generator, k):
    x, y = audit.random(generator, _scale(audit, generator))
    kinds = (
        _huge, _tiny, _denormal, _not_finite, _one_kernel, _repeated,
        _at_the_clip, _alternating, _nothing_else, _opposed,
    )  # fmt: skip
    return kinds[k % len(kinds)](audit, x, y, generator)


def _scale(audit, generator):
    clip = audit.optimizer.l2_norm_clip
    return clip * float(generator.choice([1e-3, 0.5, 1.0, 3.0, 1e3, 1e8]))


def _huge(audit, x, y, generator):
    x[-1] *= np.float32(generator.choice([1e6, 1e15, 1e18]))
    return x, y


def _tiny(audit, x, y, generator):
    y[-1] *= np.float32(1e-18)
    return x, y


def _denormal(audit, x, y, generator):
    x[-1] = np.float32(1e-42)
    y[-1] = np.float32(generator.choice([1.0, 1e-3, 1e30]))
    return x, y


def _not_finite(audit, x, y, generator):
    x[-1, int(generator.integers(x.shape[1]))] = generator.choice(
        [np.nan, np.inf, -np.inf, 3e38]
    )
    return x, y


def _one_kernel(audit, x, y, generator):
    x[-1, : _INPUTS[0]] = 0
    x[-1] *= np.float32(1e3)
    return x, y


def _repeated(audit, x, y, generator):
    x[:], y[:] = x[-1], y[-1]
    return x, y


def _at_the_clip(audit, x, y, generator):
    """Norms as near to the clip as floats are, on either side."""
    norms = np.sqrt(_sq_norms(x.astype(float), y.astype(float)))
    nudge = 1 + generator.choice([-1, 0, 1]) * 2.0**-23
    y *= (audit.optimizer.l2_norm_clip * nudge / norms)[:, None]
    return x, y.astype(np.float32)


def _alternating(audit, x, y, generator):
    """Rows whose float32 sum is rounded anew by each."""
    x[:], y[:] = x[:1], y[:1]
    y[::2] *= np.float32(1 + 2.0**-11)
    y[-1] *= np.float32(2.0)
    return x, y


def _nothing_else(audit, x, y, generator):
    x[:-1] = 0
    return x, y


def _opposed(audit, x, y, generator):
    x[:-1] = -x[-1] / np.float32(len(x) - 1)
    y[:-1] = y[-1]
    return x, y


def _mutated(batch, generator):
    """A batch near one that was bad."""
    x, y = (a.copy() for a in batch)
    rows = slice(-1, None) if generator.random() < 0.5 else slice(None)
    part = x if generator.random() < 0.5 else y
    size = generator.choice([2.0**-20, 1e-3, 0.3])
    with np.errstate(all="ignore"):
        part[rows] *= (
            1 + size * generator.normal(size=part[rows].shape)
        ).astype(np.float32)
        if generator.random() < 0.3:
            part[rows] *= np.float32(generator.choice([0.5, 2.0, 100.0]))
    return x, y


class _Climb:
    """Gradient ascent on how far the last example moves what is released.

    Args:
        audit: `MechanismAudit`.
        generator: `numpy.random.Generator`, of where it begins.
    """

    _STEPS = 30

    def __init__(self, audit, generator):
        self._audit = audit
        self._generator = generator
        self._begin()

    def _begin(self):
        clip = self._audit.optimizer.l2_norm_clip
        scale = clip * float(self._generator.choice([0.03, 0.3, 1.0, 30.0]))
        self._batch = self._audit.random(self._generator, scale)
        self._ascent = None
        self._moved, self._size, self._left = -1.0, 0.3, self._STEPS

    def next_batch(self):
        """The batch to look at."""
        if self._left == 0:
            self._begin()
        self._left -= 1
        if self._moved < 0:
            return self._batch
        if self._ascent is None:
            self._ascent = self._audit.ascent(self._batch)
        return tuple(
            _along(a, g, self._size) for a, g in zip(self._batch, self._ascent)
        )

    def tell(self, batch, moved):
        """How far it moves: from there on, or less far from before."""
        if moved > self._moved:
            self._batch, self._moved, self._ascent = batch, moved, None
        else:
            self._size /= 4


def _along(array, gradient, size):
    norm = np.linalg.norm(gradient.astype(float))
    if norm == 0:
        return array
    step = size * np.linalg.norm(array.astype(float)) / norm
    return (array + step * gradient).astype(np.float32)
