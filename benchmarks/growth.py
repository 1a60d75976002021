"""Growth of time and memory of a private step with the size of its work.

    python -m benchmarks.growth --out=out/growth
    python -m benchmarks.growth --axis=batch --rounds=5

Along each axis one size grows, and nothing else: the batch (ResNet-20), the
parameters (an MLP, by its width), the length of sequences (BERT), the rank k
and the number m of public examples of PDP-SGD, the rank of carriers of RGP.
Every point is a process of its own, so that memory is counted from its start;
points take turns, round by round. `runs.jsonl` keeps the measurements, so that
an interrupted run goes on where it was. `table.md` and `growth.png` show
medians, and the slope of time on logarithmic axes.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
from matplotlib import ticker

from tf_dpsub import files
from tf_dpsub.launchers.reports import figures

_TICKS = (1, 1.5, 2, 3, 5, 7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A size that grows.

    Attributes:
        title: string, of the model and its training.
        label: string, names the sizes.
        sizes: tuple of ints.
        build: function of a size and of whether the step is private, which
            returns a model, inputs, labels, and the optimizer.
        has_plain: bool, whether Keras's own step has that size, too.
    """

    title: str
    label: str
    sizes: tuple
    build: Callable
    has_plain: bool = True


def _inner():
    import keras

    return keras.optimizers.SGD(0.01)


def _settings(batch_size):
    return {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 1.0,
        "batch_size": batch_size,
    }


def _dpsgd(model, x, y, private):
    import tf_dpsub

    if not private:
        return model, x, y, _inner()
    optimizer = tf_dpsub.optimizers.DPSGD(_inner(), **_settings(len(y)))
    return tf_dpsub.make_private(model), x, y, optimizer


def _images(examples, shape, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, *shape)).astype("float32")
    return x, rng.integers(0, 10, examples)


def _batch(size, private):
    import tf_dpsub

    model = tf_dpsub.models.resnet20_gn()
    return _dpsgd(model, *_images(size, (32, 32, 3)), private)


def _parameters(width, private):
    import tf_dpsub

    model = tf_dpsub.models.get("mlp", (784,), 10, hidden=(width, width))
    return _dpsgd(model, *_images(128, (784,)), private)


def _length(tokens, private):
    from benchmarks import steps

    model = steps.bert(length=tokens)
    return _dpsgd(model, *steps.bert_data(8, tokens), private)


def _pdpsgd(k, m):
    import tf_dpsub

    subspace = tf_dpsub.subspaces.PublicSubspace(
        *_images(m, (28, 28, 1), seed=1), rank=k, method="gram"
    )
    x, y = _images(250, (28, 28, 1))
    optimizer = tf_dpsub.optimizers.ProjectedDPSGD(
        _inner(), subspace=subspace, **_settings(len(y))
    )
    model = tf_dpsub.make_private(tf_dpsub.models.mnist_cnn())
    return model, x, y, optimizer


def _carriers(rank):
    import tf_dpsub
    from benchmarks import steps

    model = steps.bert()
    tf_dpsub.layers.reparametrize(model, rank)
    x, y = steps.bert_data(32, 64)
    optimizer = tf_dpsub.optimizers.RGP(_inner(), **_settings(len(y)))
    return tf_dpsub.make_private(model), x, y, optimizer


AXES = {
    "batch": Axis(
        title="DP-SGD, ResNet-20",
        label="batch size",
        sizes=(64, 128, 256, 512),
        build=_batch,
    ),
    "parameters": Axis(
        title="DP-SGD, MLP, batch 128",
        label="width of two hidden layers",
        sizes=(512, 1024, 2048, 4096),
        build=_parameters,
    ),
    "length": Axis(
        title="DP-SGD, BERT 6 × 384, batch 8",
        label="tokens",
        sizes=(32, 64, 128, 256, 512),
        build=_length,
    ),
    "k": Axis(
        title="PDP-SGD, CNN, m = 200",
        label="rank k",
        sizes=(10, 25, 50, 100, 200),
        build=lambda k, private: _pdpsgd(k, 200),
        has_plain=False,
    ),
    "m": Axis(
        title="PDP-SGD, CNN, k = 25",
        label="public examples m",
        sizes=(50, 100, 200, 400, 800),
        build=lambda m, private: _pdpsgd(25, m),
        has_plain=False,
    ),
    "rank": Axis(
        title="RGP, BERT 6 × 384, 32 × 64",
        label="rank of carriers",
        sizes=(2, 8, 32, 128),
        build=lambda rank, private: _carriers(rank),
        has_plain=False,
    ),
}


def point(axis, size, private, seconds):
    """Measures steps in this process.

    Args:
        axis: string, of `AXES`.
        size: int.
        private: bool, whether the step is private.
        seconds: float, how long to make steps.

    Returns:
        dict of `ms`, the median, `peak_mib`, and the number of `parameters`.
    """
    from benchmarks import steps
    from benchmarks.peers import timing

    model, x, y, optimizer = AXES[axis].build(size, private)
    run = steps.step(model, x, y, optimizer, metrics=())

    def finished():
        return float(run()["loss"])

    timing.warm_up(finished)
    times = timing.times(finished, seconds)
    return {
        "ms": float(np.median(times)),
        "peak_mib": timing.peak_mib(),
        "parameters": model.count_params(),
    }


def measure(folder, names, rounds, seconds):
    """Runs the points that have not run yet, each in a process.

    Args:
        folder: `pathlib.Path`, of `runs.jsonl`.
        names: list of strings, of `AXES`.
        rounds: int.
        seconds: float, of steps, for each point.

    Returns:
        List of dicts, all runs so far.
    """
    files.make_folder(folder)
    file = folder / "runs.jsonl"
    runs = []
    if file.exists():
        lines = file.read_text("utf-8").splitlines()
        runs = [json.loads(line) for line in lines]
    measured_points = {tuple(run["point"]) for run in runs}
    for key in [
        (k, name, size, private)
        for k in range(rounds)
        for name in names
        for size in AXES[name].sizes
        for private in ((False, True) if AXES[name].has_plain else (True,))
    ]:
        if key in measured_points:
            continue
        _, name, size, private = key
        command = [sys.executable, "-m", "benchmarks.growth"]
        command += [f"--axis={name}", f"--size={size}", f"--seconds={seconds}"]
        process = subprocess.run(
            command + ["--private"] * private,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        run = {"point": key, **json.loads(process.stdout.splitlines()[-1])}
        runs.append(run)
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(run) + "\n")
        kind = "private" if private else "plain"
        print(f"{name} {size} {kind}: {run['ms']:.1f} ms", flush=True)
    return runs


def summarized(runs):
    """Medians over rounds, and slopes.

    Args:
        runs: list of dicts, as `measure` returns them.

    Returns:
        dict from axes to lists of dicts with `size`, `parameters`, and, of the
        private and of the plain step, `ms` and `peak_mib`, each a pair.
    """
    points = {}
    for run in runs:
        _, name, size, private = run["point"]
        rows = points.setdefault(name, {}).setdefault(size, {})
        rows.setdefault(private, []).append(run)
    return {
        name: [
            {
                "size": size,
                "parameters": kinds[True][0]["parameters"],
                **{
                    quantity: tuple(
                        float(np.median([r[quantity] for r in kinds[p]]))
                        if p in kinds
                        else None
                        for p in (True, False)
                    )
                    for quantity in ("ms", "peak_mib")
                },
            }
            for size, kinds in sorted(sizes.items())
            if True in kinds
        ]
        for name, sizes in points.items()
    }


def slope(sizes, times):
    """Slope of time on logarithmic axes: 1 for growth in proportion."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def markdown(summary):
    """Tables, one for each axis."""
    lines = []
    for name, rows in summary.items():
        axis = AXES[name]
        sizes = [r["size"] for r in rows]
        if name == "parameters":
            sizes = [r["parameters"] for r in rows]
        lines += [f"## {axis.title}", ""]
        if len(rows) > 1:
            power = slope(sizes, [r["ms"][0] for r in rows])
            size = "parameters" if name == "parameters" else axis.label
            lines += [f"Time grows as {size}^{power:.2f}.", ""]
        lines += [
            f"| {axis.label} | parameters | ms | plain | ratio | MiB | plain |",
            "|---|---|---|---|---|---|---|",
        ]
        for r in rows:
            (ms, plain), (peak, plain_peak) = r["ms"], r["peak_mib"]
            cells = [str(r["size"]), f"{r['parameters']:,}", f"{ms:.1f}"]
            cells += ["", ""]
            if plain is not None:
                cells[-2:] = [f"{plain:.1f}", f"{ms / plain:.2f}"]
            cells.append(f"{peak:,.0f}")
            cells.append("" if plain_peak is None else f"{plain_peak:,.0f}")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def draw(summary):
    """Figure of times above and memory below, a column for each axis."""
    canvas = figures.new(3 * len(summary) + 1, 5, "A step, by what it works on")
    grid = canvas.subplots(2, len(summary), squeeze=False, sharex="col")
    for column, (name, rows) in enumerate(summary.items()):
        sizes = [r["size"] for r in rows]
        for line, quantity, unit in ((0, "ms", "ms"), (1, "peak_mib", "MiB")):
            axes = grid[line][column]
            for kind, label, colour in (
                (0, "private", figures.BLUE),
                (1, "plain Keras", figures.GREY),
            ):
                values = [r[quantity][kind] for r in rows]
                if None not in values:
                    axes.plot(
                        sizes, values, marker="o", color=colour, label=label
                    )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(sizes, [str(s) for s in sizes])
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=_TICKS))
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
            for part in (axes.xaxis, axes.yaxis):
                part.set_minor_locator(ticker.NullLocator())
            axes.set_ylabel(unit)
            figures.tidy(axes)
        figures.subtitle(grid[0][column], AXES[name].title)
        grid[1][column].set_xlabel(AXES[name].label)
    grid[0][0].legend(frameon=False)
    return canvas


def main():
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--axis", action="append", choices=AXES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=pathlib.Path, default="out/growth")
    parser.add_argument("--size", type=int, help="one point, in this process")
    parser.add_argument("--private", action="store_true", help="of that point")
    args = parser.parse_args()
    if args.size is not None:
        (axis,) = args.axis
        print(json.dumps(point(axis, args.size, args.private, args.seconds)))
        return 0
    runs = measure(args.out, args.axis or list(AXES), args.rounds, args.seconds)
    summary = summarized(runs)
    text = markdown(summary)
    files.write_text(args.out / "table.md", text)
    figures.write(draw(summary), args.out / "growth.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
