"""Batches of 50 million rows in a file: time, bytes read, memory.

    python -m benchmarks.large_data --out=out/large_data

The file is sparse: it has all its bytes, which are zeros, and takes no disk.
Each measurement is a process of its own, whose peak memory is printed. Pages
that the system keeps of the file are no memory of the process: the first epoch
finds none of them.

- `draw`: numbers of the drawn rows alone, of an epoch.
- `read`: batches of an epoch, with all rows.
- `fit`: steps of DP-SGD of a linear model on these batches.
- `map`: batches read through the memory map, as NumPy does it, for comparison.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import numpy as np

from tf_dpsub import files

KINDS = ("draw", "read", "fit", "map")


def point(kind, path, rows, columns, batch_size, steps, read_ahead):
    """Measures one kind of work in this process.

    Args:
        kind: string, of `KINDS`.
        path: `pathlib.Path` of the file.
        rows, columns: ints, its shape, in float32.
        batch_size: int, expected.
        steps: int, how many batches; None for an epoch.
        read_ahead: int, as for `PoissonBatches`.

    Returns:
        dict of `seconds`, `cpu_seconds` of all threads, `steps`, drawn `rows`,
        `bytes` that were read of the file by calls of the system, `cached`
        bytes, by which the pages grew that the system keeps of files, and
        `peak_mib` of the process.
    """
    import keras
    import tensorflow as tf

    import tf_dpsub
    from benchmarks.peers import timing

    x = np.memmap(path, "float32", "r", shape=(rows, columns))
    batches = tf_dpsub.data.PoissonBatches(
        x, batch_size=batch_size, read_ahead=read_ahead
    )
    steps = steps or batches.steps_per_epoch
    cached, read = _cached_bytes(), _read_bytes()
    begin, cpu = time.perf_counter(), time.process_time()
    if kind == "draw":
        keys = tf.data.Dataset.from_tensors(np.array([1, 2])).repeat()
        drawn = _count(batches._draws(0, 1, keys), steps, 0)
    elif kind == "read":
        drawn = _count(batches.dataset(), steps, "real")
    elif kind == "map":
        random = np.random.default_rng(0)
        drawn = 0
        for _ in range(steps):
            some = np.unique(random.integers(0, rows, batch_size))
            drawn += len(x[some])
    else:
        y = np.memmap(path, "uint8", "r", shape=(rows,))
        batches = tf_dpsub.data.PoissonBatches(
            x, y, batch_size=batch_size, read_ahead=read_ahead
        )
        model = tf_dpsub.make_private(
            keras.Sequential([keras.Input((columns,)), keras.layers.Dense(2)])
        )
        model.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(0.1),
                noise_multiplier=1.0,
                l2_norm_clip=1.0,
                batch_size=batch_size,
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.fit(batches, steps_per_epoch=steps, verbose=0)
        drawn = steps * batch_size
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "steps": steps,
        "rows": int(drawn),
        "bytes": _read_bytes() - read,
        "cached": max(0, _cached_bytes() - cached),
        "peak_mib": timing.peak_mib(),
    }


def _count(dataset, steps, part):
    """Number of drawn rows of some batches."""
    drawn = 0
    for batch in dataset.take(steps):
        rows = batch[part]
        drawn += int(rows.shape[0] if part == 0 else np.sum(rows))
    return drawn


def _read_bytes():
    """Bytes that this process asked the system to read."""
    lines = pathlib.Path("/proc/self/io").read_text("utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _cached_bytes():
    """Bytes of files that the system keeps in memory."""
    lines = pathlib.Path("/proc/meminfo").read_text("utf-8").splitlines()
    (kilobytes,) = (v for v in lines if v.startswith("Cached:"))
    return int(kilobytes.split()[1]) * 1024


def markdown(results):
    """Table of the measurements."""
    lines = [
        "| work | steps | rows | s | CPU s | CPU ms a step | GB read "
        "| GB of pages | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        cells = [
            name,
            f"{r['steps']:,}",
            f"{r['rows']:,}",
            f"{r['seconds']:.1f}",
            f"{r['cpu_seconds']:.1f}",
            f"{1000 * r['cpu_seconds'] / r['steps']:.1f}",
            f"{r['bytes'] / 1e9:.2f}",
            f"{r['cached'] / 1e9:.1f}",
            f"{r['peak_mib']:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=8192)
    parser.add_argument("--steps", type=int, help="instead of an epoch")
    parser.add_argument("--read_ahead", type=int, default=1)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("out/large_data")
    )
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args()
    files.make_folder(args.out)
    path = args.out / "rows.float32"
    if args.here:
        (kind,) = args.kind
        shape = args.rows, args.columns
        result = point(
            kind, path, *shape, args.batch_size, args.steps, args.read_ahead
        )
        print(json.dumps(result))
        return 0
    names = ("rows", "columns", "batch_size", "steps", "read_ahead", "out")
    settings = [
        f"--{name}={getattr(args, name)}"
        for name in names
        if getattr(args, name) is not None
    ]
    results = {}
    for kind in args.kind or ("draw", "read", "fit"):
        # A new file, of which the system keeps nothing.
        path.unlink(missing_ok=True)
        with open(path, "wb") as file:
            file.truncate(args.rows * args.columns * 4)
        module = [sys.executable, "-m", "benchmarks.large_data", "--here"]
        process = subprocess.run(
            [*module, f"--kind={kind}", *settings],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        results[kind] = json.loads(process.stdout.splitlines()[-1])
        print(kind, results[kind], flush=True)
    path.unlink()
    text = markdown(results)
    files.write_text(args.out / "table.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
