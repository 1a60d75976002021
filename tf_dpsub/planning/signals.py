"""Signal and noise of mechanisms, measured on public examples."""

import dataclasses
import math

import tensorflow as tf
from keras import tree

from tf_dpsub.training.private_model import make_private

# Draws of the noise, whose energy is averaged.
_DRAWS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signal:
    """Energies of what a mechanism releases, in the space of weights.

    All are estimates from public examples. Products are of different examples,
    so that what single examples have of their own does not enter; from few
    examples they may come out negative.

    Attributes:
        gradient: float, squared norm of the mean gradient of the loss.
        common: float, inner product of that and the expectation of what is
            released of an example, as a gradient of the weights.
        released: float, squared norm of this expectation.
        example: float, mean squared norm of what is released of an example.
        noise: float, expected squared norm of the noise of a sum at an
            effective noise multiplier of 1.
    """

    gradient: float
    common: float
    released: float
    example: float
    noise: float

    def noise_energy(self, noise_multiplier: float, batch_size: int):
        """Expected squared norm of the noise in the mean over a batch.

        Args:
            noise_multiplier: float, the effective one.
            batch_size: int.
        """
        return self.noise * (noise_multiplier / batch_size) ** 2

    def snr(self, noise_multiplier, batch_size):
        """Signal-to-noise ratio of a step: of energies, a float.

        Args: as `noise_energy`.
        """
        energy = self.noise_energy(noise_multiplier, batch_size)
        if energy == 0:
            return math.inf
        return max(self.released, 0.0) / energy

    def alignment(
        self, noise_multiplier: float, batch_size: int, steps: int
    ) -> float:
        """Cosine between the gradient and the mean of what steps release.

        What a mechanism loses or distorts of the gradient it loses at every
        step; noise, and what the examples of a batch have of their own,
        average out over steps.

        Args:
            noise_multiplier: float, the effective one.
            batch_size: int.
            steps: int, over how many the mean is.

        Returns:
            float, in [0, 1]; 1 is the direction of the gradient.
        """
        drawn = max(self.example - self.released, 0.0) / batch_size
        noise = self.noise_energy(noise_multiplier, batch_size)
        energy = max(self.released, 0.0) + (drawn + noise) / steps
        if not (self.gradient > 0 and energy > 0):
            return 0.0
        cosine = self.common / math.sqrt(self.gradient * energy)
        return min(max(cosine, 0.0), 1.0)


def mean_signal(signals: list):
    """The signal with the means of all energies, such as those along a path.

    Args:
        signals: list of `Signal`.
    """
    names = [field.name for field in dataclasses.fields(Signal)]
    return Signal(
        **{
            name: math.fsum(getattr(s, name) for s in signals) / len(signals)
            for name in names
        }
    )


class SignalMeter:
    """Lets mechanisms work on public batches, at any weights of a model.

    Formal guarantees: all batches are public. Nothing is released.

    Args:
        model: built plain `keras.Model`, whose weights are not changed.
        loss: as for `keras.Model.compile`.
        optimizers: list of `tf_dpsub.optimizers.PrivateOptimizer` of one
            class, which differ in clips alone; those with a subspace share it.
        batches: list of dicts of `x` and `y`, tensors of one number of
            examples, two at least; two batches or more.
    """

    def __init__(self, model, loss, optimizers: list, batches: list):
        size = len(tree.flatten(batches[0]["x"])[0])
        self._batches = [b | {"real": tf.ones([size])} for b in batches]
        self._size = size
        self.optimizers = optimizers
        self.model = make_private(model)
        first = optimizers[0]
        self.model.compile(first, loss=loss)
        self.model.prepare_training(
            tree.map_structure(tf.type_spec_from_value, self._batches[0])
        )
        for optimizer in optimizers[1:]:
            optimizer.build_for(self.model)
            optimizer.public_state.attach(self.model)
        step = self.model.training_step
        self._prepare = tf.function(first.prepare, autograph=False)
        self._means = tf.function(
            self._traced_means, autograph=False, jit_compile=step.is_compiled
        )
        # Layers may get carriers later, which are no weights of this model.
        self._means.get_concrete_function(self._batches[0])

    def prepare(self):
        """Refreshes the public state of the mechanisms."""
        self._prepare()

    def means(self):
        """Means that the mechanisms release of each batch, without noise.

        Returns:
            For each optimizer and each batch a list of float32 tensors, one
            for each trainable variable.
        """
        by_batch = [self._means(batch) for batch in self._batches]
        return [list(by_optimizer) for by_optimizer in zip(*by_batch)]

    def measure(self, gradients: list) -> list:
        """The signal of each mechanism at the current weights.

        Args:
            gradients: list of lists of tensors, the mean gradients of the
                batches.

        Returns:
            List of `Signal`, one for each optimizer.
        """
        self.prepare()
        whole = _squared_mean(gradients, gradients)
        signals = []
        for optimizer, means in zip(self.optimizers, self.means()):
            released = _squared_mean(means, means)
            of_batch = sum(_product(m, m) for m in means) / len(means)
            signals.append(
                Signal(
                    gradient=whole,
                    common=_squared_mean(means, gradients),
                    released=released,
                    example=self._size * (of_batch - released) + released,
                    noise=_noise_energy(optimizer),
                )
            )
        return signals

    def _traced_means(self, batch):
        step = self.model.training_step
        gradients, _ = step.per_example_gradients(batch)
        by_optimizer = []
        for optimizer in self.optimizers:
            sums = optimizer.clipped_sums(gradients, batch["real"])
            sums = [tf.cast(s, tf.float64) for s in sums]
            released = optimizer.released_sums(sums)
            means = optimizer.privatize(
                [tf.cast(r, tf.float32) for r in released]
            )
            share = optimizer.batch_size / self._size
            by_optimizer.append([share * m for m in means])
        return by_optimizer


def _noise_energy(optimizer):
    """Expected energy of the noise of a sum at effective multiplier 1."""
    multiplier = optimizer.effective_noise_multiplier
    if multiplier == 0:
        return 0.0
    nothing = [tf.zeros(s, tf.float64) for s in optimizer.sum_shapes()]
    shapes = [r.shape for r in optimizer.released_sums(nothing)]
    energies = []
    for _ in range(_DRAWS):
        draws = [
            stddev * tf.random.normal(shape)
            for shape, stddev in zip(shapes, optimizer.noise_stddevs())
        ]
        noise = optimizer.privatize(draws)
        energies.append(_product(noise, noise))
    scale = optimizer.batch_size / multiplier
    return scale**2 * math.fsum(energies) / _DRAWS


def _squared_mean(first, second):
    """Inner product of two expectations, from different batches."""
    count = len(first)
    sums = [
        [tf.add_n(parts) for parts in zip(*side)] for side in (first, second)
    ]
    same = sum(_product(a, b) for a, b in zip(first, second))
    return (_product(*sums) - same) / (count * (count - 1))


def _product(first, second):
    products = [
        tf.reduce_sum(tf.cast(a, tf.float64) * tf.cast(b, tf.float64))
        for a, b in zip(first, second)
    ]
    return float(tf.add_n(products))
