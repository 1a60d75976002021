"""Batches of epochs in which every example is drawn once, at a random step."""

import tensorflow as tf

from tf_dpsub.data import poisson_batches


class OncePerEpoch(poisson_batches.PoissonBatches):
    """Draws every example once in an epoch, at a step of its own choice.

    An epoch has `ceil(n / batch_size)` steps. At its beginning each of the `n`
    examples chooses one of them, uniformly and independently of all others and
    of earlier epochs. So every example is in exactly one batch of an epoch;
    batches differ in size, as those of `PoissonBatches` do, and are padded in
    the same way.

    Formal guarantees: this is random allocation, the sampler of
    `accounting.random_allocation`, without any cap on the size of a batch. The
    number of examples, the batch size and the number of steps are public. Which
    step an example has chosen is private: keys are those of `PoissonBatches`,
    secret and new for each iterator. An iterator gives whole epochs, one after
    another; where it is left within an epoch, the next one begins a new
    allocation, and both count whole. With a fixed `seed` the steps can be
    predicted, so that no amplification may be claimed against who knows it.

    Args: as `PoissonBatches`.

    Attributes: as `PoissonBatches`, but
        sampling_rate: float, `1 / steps_per_epoch`, the probability of a step.

    Raises: as `PoissonBatches`.

    Example:

    ```python
    batches = tf_dpsub.data.OncePerEpoch(x, y, batch_size=250)
    model.fit(batches, epochs=30)
    ```
    """

    sampling = "once_per_epoch"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.largest_rate is not None:
            raise ValueError(
                "Expected no sampling_rates where each example is drawn once "
                "in an epoch, got some. Leave them out, or take PoissonBatches."
            )

    def _set_size(self, examples, batch_size):
        super()._set_size(examples, batch_size)
        self._sampling_rate = 1 / self.steps_per_epoch

    @property
    def ledger_fields(self):
        """Fields of a ledger's entry that say how its batches were drawn."""
        return {
            "sampler": "allocation",
            "examples": self.examples,
            "each_example_once_per_epoch": True,
            "epoch_steps": self.steps_per_epoch,
            "unit": self.unit,
        }

    def _draws(self, index, replicas, keys):
        shard_examples = len(range(index, self.own_examples, replicas))
        steps = self.steps_per_epoch

        @tf.autograph.experimental.do_not_convert
        def epoch(number, key):
            drawn, ends = _allocation(shard_examples, steps, key[:2], number)

            @tf.autograph.experimental.do_not_convert
            def draw(step):
                rows = tf.sort(drawn[ends[step] : ends[step + 1]])
                return index + replicas * rows, key, number * steps + step

            return tf.data.Dataset.range(steps).map(draw)

        return keys.enumerate().flat_map(epoch)


def _allocation(examples, steps, key, epoch):
    """Lets each of `range(examples)` choose a step of an epoch.

    Args:
        examples: int, number of units.
        steps: int.
        key: int64 tensor, [2].
        epoch: int64 tensor, its number.

    Returns:
        int64 tensors: `[examples]`, the units in the order of their steps, and
        `[steps + 1]`, where the units of each step begin and end in it.
    """
    # Of 2**64 values, no step is chosen by more than one more than another.
    chosen = tf.random.stateless_uniform(
        [examples],
        key + tf.stack([tf.constant(0, tf.int64), epoch]),
        0,
        steps,
        tf.int64,
    )
    counts = tf.math.bincount(tf.cast(chosen, tf.int32), minlength=steps)
    ends = tf.concat([[0], tf.cumsum(tf.cast(counts, tf.int64))], 0)
    return tf.cast(tf.argsort(chosen), tf.int64), ends
