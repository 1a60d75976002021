"""Time of an RGP step against the same model trained plainly by Keras.

One process; plain and private steps alternate in blocks, so that a ratio is
taken from one run. `refresh` is the share of a step that finding the carriers
takes, timed apart.
"""

import json
import statistics
import time

import keras
import tensorflow as tf
from absl import app, flags

import tf_dpsub
from benchmarks import steps as timed

_MODEL = flags.DEFINE_enum("model", "bert", ["bert", "wrn28_4"], "Which one.")
_POLICY = flags.DEFINE_enum(
    "policy", "float32", ["float32", "mixed_bfloat16"], "Its dtype policy."
)
_RANK = flags.DEFINE_integer("rank", 8, "Rank of the carriers.")
_BLOCKS = flags.DEFINE_integer("blocks", 7, "Blocks of steps of each kind.")


def measure(build, rank, blocks):
    model, x, y, count = build()
    batch = len(y)
    private = tf_dpsub.make_private(
        # Not a clone, in which embeddings would be trainable again.
        tf_dpsub.layers.reparametrize(build()[0], rank)
    )
    optimizer = tf_dpsub.optimizers.RGP(
        keras.optimizers.SGD(0.01),
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        batch_size=batch,
    )
    times = timed.measure_steps(
        {
            "plain": timed.step(model, x, y, keras.optimizers.SGD(0.01), batch),
            "RGP": timed.step(private, x, y, optimizer, batch),
        },
        count,
        blocks,
    )
    refresh = tf.function(lambda: optimizer.prepare(private), autograph=False)
    refresh()
    start = time.perf_counter()
    for _ in range(10):
        refresh()
    seconds = (time.perf_counter() - start) / 10
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {
        "parameters": model.count_params(),
        "batch": batch,
        "reparametrized layers": len(
            tf_dpsub.layers.reparametrized_layers(private.model)
        ),
        "ms": {name: 1e3 * t for name, t in medians.items()},
        "ratio": statistics.median(
            b / a for a, b in zip(times["plain"], times["RGP"])
        ),
        "refresh": seconds / medians["RGP"],
    }


def main(_):
    keras.config.set_dtype_policy(_POLICY.value)
    builders = {"bert": timed.bert, "wrn28_4": timed.wrn28_4}
    result = measure(builders[_MODEL.value], _RANK.value, _BLOCKS.value)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    app.run(main)
