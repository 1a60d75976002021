"""Speed-up of two workers over one, each on a core of its own.

One worker, and two on this machine that find each other by `TF_CONFIG`, train
by DP-SGD on batches of the same expected size, in turns. Time is that of the
epochs after the first one, in which everything is traced.
"""

import json
import os
import statistics
import time

import keras
import tensorflow as tf
from absl import app, flags

import tf_dpsub
from benchmarks import steps as timed
from tests import workers

_MODEL = flags.DEFINE_enum(
    "model", "resnet20", ["resnet20", "bert_frozen"], "Which."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Number of measurements of each.")
_CORE = flags.DEFINE_integer("core", None, "Of a worker; set by the program.")

_STEPS, _EPOCHS = 5, 3


class _EpochTimes(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._began)


def work(core, name):
    """Trains as one of the workers, and prints the seconds of a step."""
    os.sched_setaffinity(0, {core})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        plain, x, y = timed.built(name)
        model = tf_dpsub.make_private(plain)
        model.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(0.01),
                noise_multiplier=1.0,
                l2_norm_clip=1.0,
                batch_size=len(y),
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    times = _EpochTimes()
    model.fit(
        x,
        y,
        epochs=_EPOCHS,
        steps_per_epoch=_STEPS,
        callbacks=[times],
        verbose=0,
    )
    print(statistics.median(times.seconds[1:]) / _STEPS)


def measured(count, name):
    """Seconds per step of `count` workers, each on one core."""
    with workers.started(
        count,
        "-m",
        "benchmarks.scaling",
        "--core={index}",
        f"--model={name}",
    ) as processes:
        outputs = [p.communicate() for p in processes]
        for process, (_, log) in zip(processes, outputs):
            if process.returncode:
                raise RuntimeError(log[-2000:])
    return max(float(out.splitlines()[-1]) for out, _ in outputs)


def main(_):
    if _CORE.value is not None:
        return work(_CORE.value, _MODEL.value)
    pairs = [
        [measured(count, _MODEL.value) for count in (1, 2)]
        for _ in range(_ROUNDS.value)
    ]
    results = {
        "one worker, ms": 1e3 * statistics.median(p[0] for p in pairs),
        "two workers, ms": 1e3 * statistics.median(p[1] for p in pairs),
        "times as fast": [p[0] / p[1] for p in pairs],
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    app.run(main)
