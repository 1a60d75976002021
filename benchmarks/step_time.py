"""Time of a private step against the same model trained plainly by Keras.

Once on a fixed batch of the expected size, and once in `fit`, as a mean over
whole epochs: batches that are drawn by Poisson sampling differ in size. One
process, one model after another; plain and private steps, and epochs,
alternate, so that a ratio is taken from one run. Prints a table, or JSON.
"""

import argparse
import json
import statistics

import keras

import tf_dpsub
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.steps import (
    built,
    epoch_of,
    loss_of,
    measure_epochs,
    measure_steps,
    prepared,
    step_of,
)


def measure(name, blocks, epochs):
    """Median times of plain and private steps, and of the noise alone.

    Args:
        name: string, a workload.
        blocks: int, blocks of steps of each kind.
        epochs: int, epochs of `fit` of each kind.

    Returns:
        dict: `parameters`, `batch`, `ms` of each kind of steps on a fixed batch
        and of `fit`, `ratio` and `fit ratio` to plain ones, `fit to step` of
        private ones, and `noise share`.
    """
    model, x, y = built(name)
    models = {
        kind: tf_dpsub.make_private(built(name)[0])
        for kind in ("private", "without noise")
    }
    models = {"plain": model, **models}

    def optimizer(kind):
        inner = keras.optimizers.SGD(0.01)
        if kind == "plain":
            return inner
        return tf_dpsub.optimizers.DPSGD(
            inner,
            l2_norm_clip=1.0,
            noise_multiplier=1.0 if kind == "private" else 0.0,
            batch_size=len(y),
        )

    datasets = {
        kind: prepared(made, x, y, optimizer(kind))
        for kind, made in models.items()
    }
    times = measure_steps(
        {kind: step_of(models[kind], datasets[kind]) for kind in models},
        blocks,
    )
    del models["without noise"]
    for kind, made in models.items():
        # No ledger has counted the steps above.
        made.compile(optimizer(kind), loss_of(made), metrics=["accuracy"])
    fits = measure_epochs(
        {
            kind: epoch_of(made, x, y, WORKLOADS[name].steps_of_epoch)
            for kind, made in models.items()
        },
        epochs,
    )
    times |= {f"fit, {kind}": seconds for kind, seconds in fits.items()}
    medians = {kind: statistics.median(t) for kind, t in times.items()}
    # Ratios of neighbours in time: other load on the machine cancels.
    noise = statistics.median(
        1 - b / a for a, b in zip(times["private"], times["without noise"])
    )
    ratio, fit_ratio = (
        statistics.median(a / b for a, b in zip(private, plain))
        for private, plain in (
            (times["private"], times["plain"]),
            (times["fit, private"], times["fit, plain"]),
        )
    )
    return {
        "parameters": model.count_params(),
        "batch": len(y),
        "ms": {kind: 1e3 * t for kind, t in medians.items()},
        "ratio": ratio,
        "fit ratio": fit_ratio,
        "fit to step": medians["fit, private"] / medians["private"],
        "noise share": noise,
    }


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--models", default="cnn,resnet20,bert_frozen", help="by commas"
    )
    parser.add_argument(
        "--blocks", type=int, default=7, help="blocks of steps of each kind"
    )
    parser.add_argument(
        "--fit_epochs", type=int, default=5, help="epochs of fit of each kind"
    )
    parser.add_argument("--json", action="store_true", help="prints JSON")
    args = parser.parse_args()
    results = {}
    for name in args.models.split(","):
        results[name] = measure(name, args.blocks, args.fit_epochs)
        keras.backend.clear_session()
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(table(results))


def table(results):
    """Lines of text with the results of models.

    Args:
        results: dict of what `measure` returned, by name.
    """
    lines = [
        f"{'':18} {'a step on a fixed batch':>29}   {'a step in fit':>29}",
        f"{'model':12} {'batch':>5} {'plain ms':>9} {'private ms':>10} "
        f"{'ratio':>8}   {'plain ms':>9} {'private ms':>10} {'ratio':>8} "
        f"{'fit/step':>8} {'noise share':>11}",
    ]
    for name, r in results.items():
        ms = r["ms"]
        lines.append(
            f"{name:12} {r['batch']:5} {ms['plain']:9.1f} "
            f"{ms['private']:10.1f} {r['ratio']:8.2f}   "
            f"{ms['fit, plain']:9.1f} {ms['fit, private']:10.1f} "
            f"{r['fit ratio']:8.2f} {r['fit to step']:8.2f} "
            f"{r['noise share']:11.0%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
