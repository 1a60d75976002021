"""Time and memory of an RGP step against plain training by Keras.

Time: one process; plain and private steps alternate in blocks, so that a ratio
is taken from one run. `refresh` is the share of a step that finding the
carriers takes, timed apart.

Memory, with `--memory`: the peak of a process that makes two steps of
BERT-base, batch 32 x 128, for RGP in microbatches of 32 and of 16; one process
for each.
"""

import functools
import json
import multiprocessing
import resource
import statistics
import time

import keras
import tensorflow as tf
from absl import app, flags

import tf_dpsub
from benchmarks import steps as timed

_MODEL = flags.DEFINE_enum(
    "model", "bert_frozen", ["bert_frozen", "wrn28_4"], "Which one."
)
_POLICY = flags.DEFINE_enum(
    "policy", "float32", ["float32", "mixed_bfloat16"], "Its dtype policy."
)
_RANK = flags.DEFINE_integer("rank", 8, "Rank of the carriers.")
_BLOCKS = flags.DEFINE_integer("blocks", 7, "Blocks of steps of each kind.")
_MEMORY = flags.DEFINE_bool("memory", False, "Memory of BERT-base instead.")


def _bert_base():
    return timed.bert(12, 768, 128), *timed.bert_data(32, 128)


def _plain_step(build):
    model, x, y = build()
    return timed.step(model, x, y, keras.optimizers.SGD(0.01)), model


def _rgp_step(build, rank, microbatch_size=None):
    model, x, y = build()
    # Not a clone, in which embeddings would be trainable again.
    private = tf_dpsub.make_private(tf_dpsub.layers.reparametrize(model, rank))
    optimizer = tf_dpsub.optimizers.RGP(
        keras.optimizers.SGD(0.01),
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        batch_size=len(y),
        microbatch_size=microbatch_size,
    )
    return timed.step(private, x, y, optimizer), private


def _peak(rank, microbatch_size):
    """MiB at the peak of this process, which makes two steps."""
    if rank is None:
        step, _ = _plain_step(_bert_base)
    else:
        step, _ = _rgp_step(_bert_base, rank, microbatch_size)
    for _ in range(2):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def memory(rank):
    """Peaks of plain training and of RGP, and their ratio."""
    fresh = multiprocessing.get_context("spawn")
    kinds = {
        "plain": (None, None),
        "RGP, microbatches of 32": (rank, 32),
        "RGP, microbatches of 16": (rank, 16),
    }
    peaks = {}
    for name, arguments in kinds.items():
        with fresh.Pool(1) as pool:
            peaks[name] = pool.apply(_peak, arguments)
    return {
        "MiB": peaks,
        "ratio": {k: peak / peaks["plain"] for k, peak in peaks.items()},
    }


def measure(build, rank, blocks):
    """Step times of plain training and of RGP, and their ratio."""
    plain, model = _plain_step(build)
    rgp, private = _rgp_step(build, rank)
    optimizer = private.optimizer
    times = timed.measure_steps({"plain": plain, "RGP": rgp}, blocks)
    refresh = tf.function(optimizer.prepare, autograph=False)
    refresh()
    start = time.perf_counter()
    for _ in range(10):
        refresh()
    seconds = (time.perf_counter() - start) / 10
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {
        "parameters": model.count_params(),
        "batch": int(optimizer.batch_size),
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
    if _MEMORY.value:
        print(json.dumps(memory(_RANK.value), indent=2))
        return
    keras.config.set_dtype_policy(_POLICY.value)
    build = functools.partial(timed.built, _MODEL.value)
    result = measure(build, _RANK.value, _BLOCKS.value)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    app.run(main)
