"""Share of a step that Keras's GroupNormalization takes.

The same model with and without these layers, plain and private; the steps of
all four alternate in blocks in one process.
"""

import statistics

import keras
from absl import app, flags

import tf_dpsub
from benchmarks.steps import built, measure_steps, step

_NETWORKS = flags.DEFINE_list(
    "networks", ["resnet20", "wrn28_4"], "Which of them to measure."
)
_TURNS = flags.DEFINE_integer("turns", 5, "Blocks of steps of each kind.")


def without_normalization(model):
    """A copy that passes on what GroupNormalization would normalise."""
    return keras.models.clone_model(
        model,
        clone_function=lambda layer: (
            keras.layers.Identity()
            if isinstance(layer, keras.layers.GroupNormalization)
            else layer.__class__.from_config(layer.get_config())
        ),
    )


def measure(name, blocks):
    """Times of steps, and the share that normalization has of them.

    Args:
        name: string, a workload.
        blocks: int.

    Returns:
        Dict from `"plain"` and `"private"` to a dict with `ms`, of the whole
        model, and `share`.
    """
    steps = {}
    for has_norms in (True, False):
        for kind in ("plain", "private"):
            model, x, y = built(name)
            if not has_norms:
                model = without_normalization(model)
            optimizer = keras.optimizers.SGD(0.01)
            if kind == "private":
                model = tf_dpsub.make_private(model)
                optimizer = tf_dpsub.optimizers.DPSGD(
                    optimizer,
                    l2_norm_clip=1.0,
                    noise_multiplier=1.0,
                    batch_size=len(y),
                )
            steps[kind, has_norms] = step(model, x, y, optimizer)
    times = measure_steps(steps, blocks)
    return {
        kind: {
            "ms": 1e3 * statistics.median(times[kind, True]),
            "share": statistics.median(
                1 - short / whole
                for whole, short in zip(times[kind, True], times[kind, False])
            ),
        }
        for kind in ("plain", "private")
    }


def main(_):
    print(
        "| model | plain Keras | of it normalization | DP-SGD "
        "| of it normalization |"
    )
    print("|---|---|---|---|---|")
    for name in _NETWORKS.value:
        times = measure(name, _TURNS.value)
        cells = [
            f"{times[kind]['ms']:.0f} ms | {times[kind]['share']:.0%}"
            for kind in ("plain", "private")
        ]
        print(f"| {name} | {' | '.join(cells)} |")
        keras.backend.clear_session()


if __name__ == "__main__":
    app.run(main)
