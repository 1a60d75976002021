"""Time of a private step over Poisson batches, by the size of its passes.

    python -m benchmarks.pass_times --model=wrn28_4 --sizes=8,16,32,64

A step works through a batch in passes of one size. Steps of one full pass and
of two take turns: the difference is what a pass costs, and the rest what a step
costs beside its passes. From both follows the mean over Poisson batches.
"""

import argparse
import statistics
import time

import keras
import numpy as np

import tf_dpsub
from benchmarks import steps
from tf_dpsub.primitives import clipping
from tf_dpsub.training import microbatches


def measure(name: str, sizes: list, blocks: int) -> dict:
    """Milliseconds of steps by the size of a pass.

    Args:
        name: string, a workload.
        sizes: list of ints.
        blocks: int, steps of each kind.

    Returns:
        Dict by size of dicts: `pass`, `beside` its passes, `rows`, those of an
        expected batch with padding, relative to it, and `step`, its mean.
    """
    _, _, labels = steps.built(name)
    runs = {
        (size, passes): _step(name, size, passes, len(labels))
        for size in sizes
        for passes in (1, 2)
    }
    for run in runs.values():
        run()
    times: dict = {key: [] for key in runs}
    for _ in range(blocks):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            times[key].append(1e3 * (time.perf_counter() - start))
    medians = {key: statistics.median(t) for key, t in times.items()}
    results = {}
    for size in sizes:
        one = medians[size, 2] - medians[size, 1]
        beside = medians[size, 1] - one
        number = microbatches.expected_number(len(labels), size)
        results[size] = {
            "pass": one,
            "beside": beside,
            "rows": number * size / len(labels),
            "step": beside + number * one,
        }
    return results


def _step(name, size, passes, batch_size):
    """A function that makes one step of so many passes.

    They are full, where optimizers of that batch size take so many rows, and
    else padded, which takes as long.
    """
    model, x, y = steps.built(name)
    count = min(passes * size, clipping.largest_batch(batch_size))
    rows = np.arange(count) % batch_size
    x, y = keras.tree.map_structure(lambda a: a[rows], (x, y))
    private = tf_dpsub.make_private(model)
    private.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.01),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=batch_size,
            microbatch_size=size,
        ),
        steps.loss_of(private),
    )
    return lambda: private.train_on_batch(x, y)


def main():
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert_frozen", help="A workload.")
    parser.add_argument("--sizes", default="8,16,32", help="Of a pass.")
    parser.add_argument("--blocks", type=int, default=5)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    results = measure(arguments.model, sizes, arguments.blocks)
    print("size  pass, ms  beside, ms  rows  a Poisson batch, ms")
    for size, row in results.items():
        print(
            f"{size:4} {row['pass']:9.1f} {row['beside']:11.1f} "
            f"{row['rows']:5.2f} {row['step']:20.0f}"
        )


if __name__ == "__main__":
    main()
