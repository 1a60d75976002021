"""Time and memory of steps in a subspace: PDP-SGD and GEP.

Five measurements, one a call, in one process each:

- `pdp`: a step of PDP-SGD (k = 50, m = 100, refreshed at every step) against
  one of DP-SGD, on the network of the PDP-SGD paper, batch 250.
- `gep`: the parts of a step of GEP (k = 500, m = 2000, batch 1000) on the
  same network, against the floating-point operations that they need.
- `refresh`: steps of GEP and B-GEP (k = 500, m = 2000, batch 250), of which a
  tenth of a refresh is part, against one of DP-SGD, on the same network and
  MNIST, with refreshes in float32 and in bfloat16; and the energy of the public
  gradients that lies in the basis then.
- `resnet20`: peak memory of steps of GEP (k = 1000, m = 2000, batch 1000) on
  ResNet-20 in five groups.
- `pairs`: steps of PDP-SGD and GEP in a `KroneckerSubspace` against one of
  DP-SGD, on a transformer with all weights trained (`--model`), with a tenth of
  a refresh from 128 public examples (which is timed apart); and, with
  `--memory`, the peaks of processes that make two steps and a refresh.
"""

import functools
import itertools
import json
import multiprocessing
import resource
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_dpsub
from benchmarks import steps as timed
from benchmarks.peers import workloads
from tf_dpsub.subspaces import eigenspaces

_MEASUREMENT = flags.DEFINE_enum(
    "measurement",
    "pdp",
    ["pdp", "gep", "refresh", "resnet20", "pairs"],
    "What to measure.",
)
_MODEL = flags.DEFINE_enum(
    "model", "bert", ["bert", "small_bert", "gpt2"], "Of `pairs`."
)
_MEMORY = flags.DEFINE_bool("memory", False, "Of `pairs`: memory, not time.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Blocks, or calls, of each kind.")

_RESNET_GROUPS = 5
_STEPS_BEFORE = 5


def pdp(blocks):
    """Step times of DP-SGD and PDP-SGD, and their ratio."""
    model, x, y = timed.built("cnn")
    rng = np.random.default_rng(1)
    x_public = rng.normal(size=(100, 28, 28, 1)).astype("float32")
    subspace = tf_dpsub.subspaces.PublicSubspace(
        x_public, rng.integers(0, 10, 100), rank=50, method="gram"
    )
    optimizers = {
        "DP-SGD": tf_dpsub.optimizers.DPSGD,
        "PDP-SGD": functools.partial(
            tf_dpsub.optimizers.ProjectedDPSGD, subspace=subspace
        ),
    }
    steps = {
        name: timed.step(
            tf_dpsub.make_private(keras.models.clone_model(model)),
            x,
            y,
            make(
                keras.optimizers.SGD(0.01),
                l2_norm_clip=1.0,
                noise_multiplier=1.0,
                batch_size=len(y),
            ),
        )
        for name, make in optimizers.items()
    }
    times = timed.measure_steps(steps, blocks)
    ratios = [b / a for a, b in zip(times["DP-SGD"], times["PDP-SGD"])]
    return {
        "ms": {k: 1e3 * statistics.median(t) for k, t in times.items()},
        "ratio": statistics.median(ratios),
    }


def _gep_model(plain, x, y, x_public, rank, groups):
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.GEP(
            keras.optimizers.SGD(0.01, momentum=0.9),
            subspace=tf_dpsub.subspaces.PublicSubspace(
                x_public, rank=rank, groups=groups
            ),
            l2_norm_clip=10.0,
            residual_norm_clip=2.0,
            noise_multiplier=1.0,
            batch_size=len(y),
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def gep(repeats):
    """Milliseconds and GFLOP of the parts of a GEP step."""
    rng = np.random.default_rng(0)
    m, batch = 2000, 1000
    x = rng.normal(size=(batch, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, batch)
    x_public = rng.normal(size=(m, 28, 28, 1)).astype("float32")
    model = _gep_model(
        tf_dpsub.models.mnist_cnn(), x, y, x_public, 500, "layers"
    )
    # From then on, the basis starts close to its result.
    for _ in range(_STEPS_BEFORE):
        model.train_on_batch(x, y)
    subspace, step = model.optimizer.subspace, model.training_step
    public = subspace._gradients
    key = tf.constant([0, 0], tf.int64)
    bases = [[tf.identity(b) for b in blocks] for blocks in subspace._blocks]
    size = model.microbatch_size
    parts = [
        {"x": tf.constant(x[i : i + size]), "y": tf.constant(y[i : i + size])}
        | {"real": tf.ones([len(y[i : i + size])])}
        for i in range(0, batch, size)
    ]

    def anchors():
        return public.fold(
            public.draw(key),
            lambda i, rows, total: (
                total + tf.add_n([tf.reduce_sum(r) for r in rows._blocks])
            ),
            0.0,
        )

    def moments():
        return eigenspaces.SecondMoments(
            public, public.draw(key), subspace.groups
        )

    def products():
        return [tf.reduce_sum(b[0]) for b in moments().times(bases)]

    def power():
        return eigenspaces.power(moments(), bases, 1)[1]

    def private(function):
        return lambda: [
            function(step.per_example_gradients(part)[0]) for part in parts
        ]

    def norms(gradients):
        return gradients.sq_norms()

    def embedding(gradients):
        return [gradients.sq_norms(), subspace.project(gradients)]

    def sums(gradients):
        ones = tf.ones([gradients.batch_size])
        return model.optimizer.clipped_sums(gradients, ones)

    def released():
        shapes = model.optimizer.sum_shapes()
        zeros = [tf.zeros(s, tf.float64) for s in shapes]
        return model.optimizer.released_sums(zeros)

    ms = {
        function.__name__: _milliseconds(function, repeats)
        for function in (anchors, products, power, released)
    }
    for function in (norms, embedding, sums):
        ms[function.__name__] = _milliseconds(private(function), repeats)
    cells = sum(g.size * k for g, k in zip(subspace.groups, subspace.ranks))
    squares = sum(
        g.size * k * k for g, k in zip(subspace.groups, subspace.ranks)
    )
    weights = model.count_params()
    table = {
        "anchor gradients": (ms["anchors"], None),
        "power iteration: G^T (G V)": (
            ms["products"] - ms["anchors"],
            4 * m * cells,
        ),
        "power iteration: orthonormal": (ms["power"] - ms["products"], None),
        "private gradients": (ms["norms"], None),
        "embedding": (ms["embedding"] - ms["norms"], 2 * batch * cells),
        "residual": (
            ms["sums"] - ms["embedding"] + ms["released"],
            2 * batch * weights + 2 * cells,
        ),
    }
    return {
        name: {"ms": t, "GFLOP": None if f is None else f / 1e9}
        for name, (t, f) in table.items()
    } | {"GFLOP of one pass of Cholesky QR": 4 * squares / 1e9}


def refresh(blocks):
    """Ratios of steps to DP-SGD's, by the type of a refresh."""
    data = tf_dpsub.data.load("mnist", private=250, seed=0)
    public = tf_dpsub.data.load("mnist", private=2000, seed=1)
    models, steps = {}, {}
    for name, dtype in [
        ("DP-SGD", None),
        *itertools.product(("GEP", "B-GEP"), ("float32", "bfloat16")),
    ]:
        residual = name == "GEP"
        settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0}
        make = tf_dpsub.optimizers.DPSGD
        if dtype is not None:
            make = tf_dpsub.optimizers.GEP
            settings |= {"residual": residual}
            settings |= {"residual_norm_clip": 0.2} if residual else {}
            settings["subspace"] = tf_dpsub.subspaces.PublicSubspace(
                public.x_train,
                public.y_train,
                rank=500,
                groups="layers",
                update_every=_UPDATE_EVERY,
                refresh_dtype=dtype,
                # Rows may be drawn for both.
                allow_private=True,
            )
        key = name if dtype is None else f"{name}, {dtype}"
        models[key] = tf_dpsub.make_private(tf_dpsub.models.mnist_cnn())
        steps[key] = timed.step(
            models[key],
            data.x_train,
            data.y_train,
            make(keras.optimizers.SGD(0.01), batch_size=250, **settings),
            metrics=(),
        )
    times = {key: [] for key in steps}
    for block in range(blocks + 2):
        for key, step in steps.items():
            start = time.perf_counter()
            for _ in range(_UPDATE_EVERY):
                logs = step()
            float(logs["loss"])
            if block > 1:  # the first ones trace, and allocate
                times[key].append(time.perf_counter() - start)
    base = np.array(times["DP-SGD"])
    return {
        key: {
            "ratio": statistics.median(np.array(seconds) / base),
            "energy": _share_of_energy(models[key]),
        }
        for key, seconds in times.items()
        if key != "DP-SGD"
    }


def _share_of_energy(model):
    """The share of the energy of public gradients that a basis holds."""
    subspace = model.optimizer.subspace
    gradients = subspace._gradients
    batch = gradients.draw(tf.constant([0, 0], tf.int64))
    moments = eigenspaces.SecondMoments(gradients, batch, subspace.groups)
    bases = [[tf.identity(b) for b in blocks] for blocks in subspace._blocks]

    @tf.function(autograph=False)
    def energies():
        total = gradients.fold_gradients(
            batch,
            lambda _, g, total: total + tf.reduce_sum(g.sq_norms()),
            0.0,
        )
        held = tf.add_n([tf.reduce_sum(e) for e in moments.energies(bases)])
        return held / total

    return float(energies())


def _milliseconds(function, repeats):
    compiled = tf.function(function, autograph=False)
    compiled()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        tf.nest.map_structure(lambda t: t.numpy(), compiled())
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def resnet20(steps):
    """Peak memory of a few steps, in GiB, and their time."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 32, 32, 3)).astype("float32")
    y = rng.integers(0, 10, 1000)
    x_public = rng.normal(size=(2000, 32, 32, 3)).astype("float32")
    model = _gep_model(
        tf_dpsub.models.resnet20_gn(), x, y, x_public, 1000, _RESNET_GROUPS
    )
    model.train_on_batch(x, y)
    start = time.perf_counter()
    for _ in range(steps):
        model.train_on_batch(x, y)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "peak GiB": peak,
        "seconds a step": (time.perf_counter() - start) / steps,
    }


# Coordinates, rows of a batch, and public examples, by model.
_PAIRS = {
    "small_bert": (200, 32, 32),
    "bert": (2000, 256, 128),
    "gpt2": (10_000, 16, 128),
}
_UPDATE_EVERY = 10
_METHODS = {
    "DP-SGD": (tf_dpsub.optimizers.DPSGD, {}),
    "PDP-SGD": (tf_dpsub.optimizers.ProjectedDPSGD, {}),
    "GEP": (tf_dpsub.optimizers.GEP, {"residual_norm_clip": 0.2}),
}


def _transformer(name):
    """A model, and a function that gives so many examples of a seed."""
    if name == "gpt2":
        model, _, _ = timed.built("gpt2")

        def examples(count, seed):
            tokens, labels = workloads.data("gpt2", count, seed)
            mask = np.ones_like(tokens)
            return {"token_ids": tokens, "padding_mask": mask}, labels

        return model, examples
    layers, width = (6, 384) if name == "bert" else (2, 64)
    model = timed.bert(layers, width, frozen=False)
    return model, functools.partial(timed.bert_data, length=64)


def _pairs_step(name, method):
    """A step of a method, and the function that refreshes its subspace."""
    rank, batch, public = _PAIRS[name]
    model, examples = _transformer(name)
    make, settings = _METHODS[method]
    settings = dict(settings)
    if method != "DP-SGD":
        settings["subspace"] = tf_dpsub.subspaces.KroneckerSubspace(
            *examples(public, seed=1), rank=rank, update_every=10**9
        )
    model = tf_dpsub.make_private(model)
    step = timed.step(
        model,
        *examples(batch, seed=0),
        make(
            keras.optimizers.SGD(0.01),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=batch,
            **settings,
        ),
        metrics=(),
    )
    if method == "DP-SGD":
        return step, None
    compute = settings["subspace"]._compute
    return step, lambda: compute(tf.constant(1, tf.int64))


def pairs(blocks):
    """Step times, of which a tenth of a refresh is part, and their ratios."""
    name = _MODEL.value
    made = {method: _pairs_step(name, method) for method in _METHODS}
    times = {key: [] for key in (*_METHODS, "refresh")}
    _, refresh = made["PDP-SGD"]
    for block in range(blocks + 1):
        for key in times:
            run = refresh if key == "refresh" else made[key][0]
            start = time.perf_counter()
            tf.nest.map_structure(lambda t: np.asarray(t), run())
            if block > 0:  # the first call traces
                times[key].append(time.perf_counter() - start)
    refreshes = np.array(times["refresh"]) / _UPDATE_EVERY
    base = np.array(times["DP-SGD"])
    rank, batch, public = _PAIRS[name]
    return {
        "model": name,
        "rank": rank,
        "batch": batch,
        "public examples": public,
        "seconds": {k: statistics.median(t) for k, t in times.items()},
        "ratio": {
            method: statistics.median(
                (np.array(times[method]) + refreshes) / base
            )
            for method in _METHODS
            if method != "DP-SGD"
        },
    }


def _peak_of_pairs(name, method):
    """MiB at the peak of this process."""
    step, refresh = _pairs_step(name, method)
    for _ in range(2):
        step()
    if refresh is not None:
        refresh()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def memory_of_pairs(_):
    """Peaks of each method, and their ratio to DP-SGD's."""
    fresh = multiprocessing.get_context("spawn")
    peaks = {}
    for method in _METHODS:
        with fresh.Pool(1) as pool:
            peaks[method] = pool.apply(_peak_of_pairs, (_MODEL.value, method))
    return {
        "MiB": peaks,
        "ratio": {k: peak / peaks["DP-SGD"] for k, peak in peaks.items()},
    }


def main(_):
    measure = {
        "pdp": pdp,
        "gep": gep,
        "refresh": refresh,
        "resnet20": resnet20,
        "pairs": memory_of_pairs if _MEMORY.value else pairs,
    }
    result = measure[_MEASUREMENT.value](_REPEATS.value)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    app.run(main)
