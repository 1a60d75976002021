"""Time of a private step against the same model trained plainly by Keras.

One process, one model after another; plain and private steps alternate in
blocks, so that a ratio is taken from one run. Prints a table, or JSON.
"""

import json
import statistics

import keras
from absl import app, flags

import tf_dpsub
from benchmarks.steps import built, measure_steps, step

_MODELS = flags.DEFINE_list(
    "models", ["cnn", "resnet20", "bert_frozen"], "Which of them to measure."
)
_BLOCKS = flags.DEFINE_integer("blocks", 7, "Blocks of steps of each kind.")
_JSON = flags.DEFINE_bool("json", False, "Prints JSON.")


def measure(name, blocks):
    """Median times of plain and private steps, and of the noise alone."""
    model, x, y = built(name)

    def private(noise_multiplier, **kwargs):
        return step(
            tf_dpsub.make_private(built(name)[0]),
            x,
            y,
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(0.01),
                l2_norm_clip=1.0,
                noise_multiplier=noise_multiplier,
                batch_size=len(y),
                **kwargs,
            ),
        )

    steps = {
        "plain": step(model, x, y, keras.optimizers.SGD(0.01)),
        "private": private(1.0),
        "without noise": private(0.0),
    }
    times = measure_steps(steps, blocks)
    medians = {name: statistics.median(t) for name, t in times.items()}
    # Ratios of neighbours in time: other load on the machine cancels.
    ratio = statistics.median(
        a / b for a, b in zip(times["private"], times["plain"])
    )
    noise = statistics.median(
        1 - b / a for a, b in zip(times["private"], times["without noise"])
    )
    return {
        "parameters": model.count_params(),
        "batch": len(y),
        "ms": {name: 1e3 * t for name, t in medians.items()},
        "ratio": ratio,
        "noise share": noise,
    }


def main(_):
    results = {}
    for name in _MODELS.value:
        results[name] = measure(name, _BLOCKS.value)
        keras.backend.clear_session()
    if _JSON.value:
        print(json.dumps(results, indent=2))
        return
    print(
        f"{'model':12} {'batch':>5} {'plain ms':>9} {'private ms':>10} "
        f"{'ratio':>6} {'noise share':>11}"
    )
    for name, r in results.items():
        print(
            f"{name:12} {r['batch']:5} {r['ms']['plain']:9.1f} "
            f"{r['ms']['private']:10.1f} {r['ratio']:6.2f} "
            f"{r['noise share']:11.0%}"
        )


if __name__ == "__main__":
    app.run(main)
