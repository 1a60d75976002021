"""Time and memory of a private training step, on this machine."""

import dataclasses
import math
import pathlib
import time

import tensorflow as tf
from keras import tree

_TIMED = 3
_PAGES = pathlib.Path("/proc/self/smaps_rollup")
_CLEAR = pathlib.Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of a step, by the size of its batch.

    Attributes:
        microbatch_size: int.
        seconds_once: float, what a step takes however large its batch is:
            refreshes, noise, the inner optimizer.
        seconds_each: float, what it takes for each microbatch.
        state_bytes: int, of weights and of the optimizer's state, a basis
            included.
        memory_bytes: int, what a step uses: state, and all that it computes;
            None if unknown.
    """

    microbatch_size: int
    seconds_once: float
    seconds_each: float
    state_bytes: int
    memory_bytes: int | None

    def seconds(self, batch_size):
        """Seconds of a step with this expected batch size, a float."""
        passes = math.ceil(batch_size / self.microbatch_size)
        return self.seconds_once + passes * self.seconds_each


def measure_step(model, x, y):
    """Measures steps of one and of two microbatches.

    The steps change the weights of the model.

    Args:
        model: compiled `tf_dpsub.PrivateModel`.
        x: array, or structure of arrays, public examples; they are repeated
            where there are too few.
        y: the same for targets.

    Returns:
        A `StepCost`.
    """
    size = model.microbatch_size
    count = len(tree.flatten(x)[0])
    indices = [k % count for k in range(2 * size)]
    batch = tree.map_structure(
        lambda a: tf.gather(tf.convert_to_tensor(a), indices), {"x": x, "y": y}
    )
    batch["real"] = tf.ones([2 * size])
    half = batch | {"real": tf.cast(tf.range(2 * size) < size, tf.float32)}
    model.prepare_training(tree.map_structure(tf.type_spec_from_value, batch))

    @tf.function(autograph=False)
    def step(data):
        model.optimizer.prepare()
        noisy_sums = model.optimizer.noisy(model.training_step(data))
        model.optimizer.apply_noisy(noisy_sums)

    iterations = int(model.optimizer.iterations.numpy())
    step(half)
    times = []
    for part in (half, batch):
        repeats = []
        for _ in range(_TIMED):
            start = time.perf_counter()
            step(part)
            repeats.append(time.perf_counter() - start)
        times.append(min(repeats))
    each = max(times[1] - times[0], 0.0)
    memory_bytes = _memory_of(lambda: step(batch))
    # No ledger counts steps on public examples.
    model.optimizer.iterations.assign(iterations)
    return StepCost(
        microbatch_size=size,
        seconds_once=max(times[0] - each, 0.0),
        seconds_each=each,
        state_bytes=_state_bytes(model),
        memory_bytes=memory_bytes,
    )


def _state_bytes(model):
    total = sum(
        math.prod(v.shape) * tf.as_dtype(v.dtype).size
        for v in [*model.weights, *model.optimizer.variables]
    )
    subspace = getattr(model.optimizer, "subspace", None)
    if subspace is not None:
        total += sum(
            4 * group.size * rank
            for group, rank in zip(subspace.groups, subspace.ranks)
        )
    return total


def _memory_of(function):
    """Memory that a function uses, in bytes; None if unknown.

    TensorFlow keeps memory that it once had: the peak of a process says little
    about one of its functions. Linux tells which pages were touched. It forgets
    some when it looks for old ones: the most of three runs counts.
    """
    if tf.config.list_logical_devices("GPU"):
        tf.config.experimental.reset_memory_stats("GPU:0")
        function()
        return tf.config.experimental.get_memory_info("GPU:0")["peak"]
    touched = []
    try:
        for _ in range(3):
            _CLEAR.write_text("1")
            function()
            lines = _PAGES.read_text("utf-8").splitlines()
            (line,) = (v for v in lines if v.startswith("Referenced:"))
            touched.append(1024 * int(line.split()[1]))
    except OSError:
        return None
    return max(touched)
