"""Where dimensions hurt: DP-SGD as a network grows wider.

Reference:
    [Li, Liu, Hashimoto, Inan, Kulkarni, Lee, Guha Thakurta: When Does
    Differentially Private Learning Not Suffer in High Dimensions?, NeurIPS
    2022](https://arxiv.org/abs/2207.00160)
"""

import dataclasses
import functools
import itertools
import statistics

import numpy as np

from tf_dpsub import accounting, files
from tf_dpsub.accounting.statement import round_up
from tf_dpsub.launchers.papers.engine import saved_points
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.launchers.terminal import quiet

_DELTA = 1e-5
_WIDTHS = (8, 32, 128, 512)
_NOISE = (0.0, 4.0, 18.0)
_METHODS = ("DP-SGD", "PDP-SGD")
_RATES = (0.03, 0.1, 0.3, 1.0)
_SEEDS = range(3)
_EXAMPLES, _PUBLIC, _RANK = 10_000, 100, 50
_BATCH_SIZE, _EPOCHS, _REFRESH = 250, 20, 10
_CLIP = 1.0
# Of the curvature: examples, random directions, and draws of the noise.
_MEASURED, _PROBES, _DRAWS = 1000, 32, 32
_COLOURS = {"DP-SGD": figures.RED, "PDP-SGD": figures.BLUE}


@dataclasses.dataclass(frozen=True)
class Point:
    """One training run.

    Attributes:
        method: string.
        noise_multiplier: float.
        width: int, units of the hidden layer.
        learning_rate: float.
        seed: int, of the weights, the batches and the noise.
    """

    method: str
    noise_multiplier: float
    width: int
    learning_rate: float
    seed: int

    @property
    def name(self):
        return (
            f"{self.method} sigma={self.noise_multiplier:g} width={self.width} "
            f"rate={self.learning_rate:g} seed={self.seed}"
        )

    @property
    def setting(self):
        return self.noise_multiplier, self.width, self.method


class NetworkWidth:
    """DP-SGD as a network grows wider, and the curvature its noise meets."""

    name = "network_width"
    title = "DP-SGD as a network grows wider"

    def points(self):
        """All runs, seed by seed, in a list; none projects without noise."""
        return [
            Point(method, sigma, width, rate, seed)
            for seed, sigma, width, method, rate in itertools.product(
                _SEEDS, _NOISE, _WIDTHS, _METHODS, _RATES
            )
            if sigma or method == "DP-SGD"
        ]

    def run(self, folder, points, *, fraction, jobs, command, inputs):
        """Runs the unfinished points, one after another, and writes a table.

        Args:
            folder: `pathlib.Path`.
            points: list of `Point`, those to run.
            fraction: float, the share of the epochs to make.
            jobs: int, not used.
            command: string, for the table.
            inputs: `papers.Inputs`, not used.

        Returns:
            int, the exit code.

        Raises:
            ValueError: if the folder holds runs of another length.
        """
        epochs = max(1, round(fraction * _EPOCHS))
        quiet.load_tensorflow()

        return saved_points.run_each(
            self.title,
            folder,
            points,
            epochs * -(-_EXAMPLES // _BATCH_SIZE),
            result_of=lambda point: run_point(_images(), point, epochs),
            summary_of=lambda result: f"{100 * result['accuracy']:.1f} %",
            write_results=lambda saved: self._write_results(
                folder, saved, command
            ),
        )

    def _write_results(self, folder, saved, command):
        finished = [p for p in self.points() if p.name in saved["points"]]
        if not finished:
            return
        rows = best_rows(finished, saved["points"])
        files.write_text(
            folder / "table.md",
            table(self.title, rows, saved["steps"], command),
        )
        folder_page.write_with_figures(
            folder, {"accuracy": lambda: _figure(self.title, rows)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Images `[examples, height, width, channels]`, and their classes.

    Attributes:
        private: pair of arrays, of the private examples.
        public: pair of arrays, of the public examples.
        test: pair of arrays, of test examples.
    """

    private: tuple
    public: tuple
    test: tuple


@functools.lru_cache(maxsize=1)
def _images():
    from tf_dpsub import data

    loaded = data.load("mnist")
    both = loaded.x_train, loaded.y_train
    return Images(
        private=tuple(a[:_EXAMPLES] for a in both),
        public=tuple(a[_EXAMPLES : _EXAMPLES + _PUBLIC] for a in both),
        test=(loaded.x_test, loaded.y_test),
    )


def run_point(images, point, epochs):
    """Trains one network, and measures the curvature that its noise meets.

    Args:
        images: `Images`.
        point: `Point`.
        epochs: int.

    Returns:
        dict of the test `accuracy`, the number of `parameters` and, for DP-SGD
        with noise, what `noise_terms` measures after the first epoch
        (`early`) and after the last (`late`). The terms read private examples
        without noise: no ε covers them.
    """
    import keras

    import tf_dpsub

    keras.utils.clear_session()
    keras.utils.set_random_seed(point.seed)
    shape = images.private[0].shape[1:]
    plain = tf_dpsub.models.mlp(shape, (point.width,), 10, "tanh")
    settings = {
        "noise_multiplier": point.noise_multiplier,
        "l2_norm_clip": _CLIP,
        "batch_size": _BATCH_SIZE,
        "seed": point.seed,
    }
    inner = keras.optimizers.SGD(point.learning_rate)
    if point.method == "DP-SGD":
        optimizer = tf_dpsub.optimizers.DPSGD(inner, **settings)
    else:
        optimizer = tf_dpsub.optimizers.ProjectedDPSGD(
            inner,
            subspace=tf_dpsub.subspaces.PublicSubspace(
                *images.public,
                rank=_RANK,
                method="gram",
                update_every=_REFRESH,
            ),
            **settings,
        )
    model = tf_dpsub.make_private(plain)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    terms = {}

    def measure(epoch, logs=None):
        if epoch in (0, epochs - 1):
            moment = "late" if epoch == epochs - 1 else "early"
            terms[moment] = noise_terms(plain, images, point)

    callbacks = []
    if point.method == "DP-SGD" and point.noise_multiplier:
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=measure)]
    model.fit(*images.private, epochs=epochs, verbose=0, callbacks=callbacks)
    _, accuracy = model.evaluate(*images.test, verbose=0)
    return {
        "accuracy": accuracy,
        "parameters": plain.count_params(),
        **terms,
    }


def noise_terms(model, images, point):
    """What a step gains by its gradient and loses by its noise.

    To second order, a step of rate η along the clipped mean gradient, with
    noise of standard deviation s = σ C / B in each direction, changes the mean
    loss L by -η ∇L·g + η² s² tr(H) / 2. With a projection on V, an orthonormal
    basis of public gradients, by -η ∇L·V Vᵀg + η² s² tr(Vᵀ H V) / 2.

    Args:
        model: built `keras.Model`.
        images: `Images`; the mean is over the first private examples.
        point: `Point`, whose rate and noise are those of the step.

    Returns:
        dict of floats: `trace` of the Hessian H of L, `trace_inside`, that of
        Vᵀ H V, and `largest`, the largest eigenvalue of Vᵀ H V; `share` of the
        squared length of g that lies in V; `gain` and `gain_inside`, the first
        terms of the two steps; `loss_by_noise` and `loss_by_noise_inside`,
        their second terms by curvature; and `measured_by_noise` and
        `measured_by_noise_inside`, mean changes of the loss by drawn noise.
    """
    from tf_dpsub.launchers.papers.engine import local_loss

    measured = (a[:_MEASURED] for a in images.private)
    local = local_loss.LocalLoss(model, *measured, _CLIP)
    basis = local.basis(*images.public, _RANK)
    gradient, clipped = local.gradients()
    inside = basis.T @ clipped
    rng = np.random.default_rng(point.seed)
    trace = statistics.fmean(
        float(probe @ local.hessian_product(probe))
        for probe in rng.choice([-1.0, 1.0], (_PROBES, len(clipped)))
    )
    projected = np.stack(
        [basis.T @ local.hessian_product(v) for v in basis.T], axis=1
    )
    rate = point.learning_rate
    length = rate * point.noise_multiplier * _CLIP / _BATCH_SIZE
    changes, changes_inside = [], []
    for _ in range(_DRAWS):
        noise = length * rng.normal(size=len(clipped))
        changes.append(local.change(noise))
        changes_inside.append(local.change(basis @ (basis.T @ noise)))
    return {
        "trace": trace,
        "trace_inside": float(np.trace(projected)),
        "largest": float(np.linalg.eigvalsh((projected + projected.T) / 2)[-1]),
        "share": float(inside @ inside / (clipped @ clipped)),
        "gain": rate * float(gradient @ clipped),
        "gain_inside": rate * float((basis.T @ gradient) @ inside),
        "loss_by_noise": length**2 * trace / 2,
        "loss_by_noise_inside": length**2 * float(np.trace(projected)) / 2,
        "measured_by_noise": statistics.fmean(changes),
        "measured_by_noise_inside": statistics.fmean(changes_inside),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """All seeds of a setting, at its best learning rate.

    Attributes:
        noise_multiplier: float.
        width: int.
        method: string.
        learning_rate: float.
        is_end: bool, whether it is an end of the grid of rates.
        results: list of dicts of `run_point`.
    """

    noise_multiplier: float
    width: int
    method: str
    learning_rate: float
    is_end: bool
    results: list

    @property
    def parameters(self):
        return self.results[0]["parameters"]

    @property
    def accuracies(self):
        return [100 * result["accuracy"] for result in self.results]

    def mean(self, moment, term):
        """The mean of a term over seeds."""
        return statistics.fmean(r[moment][term] for r in self.results)


def best_rows(points, results):
    """The best rate of each setting, by the mean accuracy over its seeds.

    A rate that has run with fewer seeds than another is not taken.

    Args:
        points: list of `Point` that have finished.
        results: dict of dicts of `run_point`, by names of points.

    Returns:
        dict from `Point.setting` to `Row`.
    """
    by_setting = {}
    for point in points:
        rates = by_setting.setdefault(point.setting, {})
        rates.setdefault(point.learning_rate, []).append(results[point.name])
    rows = {}
    for setting, rates in by_setting.items():
        seeds = max(map(len, rates.values()))
        rate = max(
            (r for r, runs in rates.items() if len(runs) == seeds),
            key=lambda r: statistics.fmean(x["accuracy"] for x in rates[r]),
        )
        sigma, width, method = setting
        rows[setting] = Row(
            noise_multiplier=sigma,
            width=width,
            method=method,
            learning_rate=rate,
            is_end=rate in (min(_RATES), max(_RATES)),
            results=rates[rate],
        )
    return rows


def table(title, rows, steps, command):
    """Accuracies and terms of noise of all settings, in Markdown.

    Args:
        title: string.
        rows: dict of `Row`, by settings.
        steps: int, of a run.
        command: string that makes it.
    """
    lines = [
        *folder_page.heading(title, command),
        f"MNIST, {_EXAMPLES:,} private examples, {_PUBLIC} public ones for "
        f"the {_RANK} directions of PDP-SGD, found anew every {_REFRESH} "
        f"steps; one hidden layer of tanh units; batches of {_BATCH_SIZE}, "
        f"{steps} steps, C = {_CLIP:g}, the best of the rates "
        f"{', '.join(f'{rate:g}' for rate in _RATES)} by test accuracy (* an "
        "end of the grid). Test accuracy in percent, mean ± s.d. over seeds.",
        "",
        "| σ | ε | width | parameters | DP-SGD | rate | PDP-SGD | rate | "
        "seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for sigma, width in sorted({setting[:2] for setting in rows}):
        cells, seeds = [], 0
        for method in _METHODS:
            row = rows.get((sigma, width, method))
            cells += ["", ""] if row is None else [_accuracy(row), _rate(row)]
            if row is not None:
                seeds, parameters = len(row.results), row.parameters
        lines.append(
            f"| {sigma:g} | {_epsilon(sigma, steps)} | {width} | "
            f"{parameters:,} | {' | '.join(cells)} | {seeds} |"
        )
    for moment, head in {
        "early": "After the first epoch of DP-SGD",
        "late": "After the last epoch of DP-SGD",
    }.items():
        lines += ["", f"## {head}", "", *_terms(rows, moment)]
    return "\n".join(lines) + "\n"


def _accuracy(row):
    spread = statistics.stdev(row.accuracies) if len(row.results) > 1 else 0.0
    return f"{statistics.fmean(row.accuracies):.1f} ± {spread:.1f}"


def _rate(row):
    return f"{row.learning_rate:g}{'*' if row.is_end else ''}"


def _epsilon(sigma, steps):
    if not sigma:
        return "∞"
    epsilon = accounting.epsilon(
        noise_multiplier=sigma,
        sampling_rate=_BATCH_SIZE / _EXAMPLES,
        steps=steps,
        delta=_DELTA,
    )
    return round_up(epsilon)


def _terms(rows, moment):
    """Lines of a table of the terms of a step, with and without projection."""
    lines = [
        "| σ | width | tr(H) | in V | largest | gradient in V | gain of a step "
        "| in V | loss by noise | measured | in V | measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (sigma, width, method), row in sorted(rows.items()):
        if method != "DP-SGD" or not sigma:
            continue
        mean = functools.partial(row.mean, moment)
        numbers = [
            f"{mean(term):.3g}"
            for term in ("trace", "trace_inside", "largest", "share")
        ] + [
            f"{mean(term):.1e}"
            for term in (
                "gain",
                "gain_inside",
                "loss_by_noise",
                "measured_by_noise",
                "loss_by_noise_inside",
                "measured_by_noise_inside",
            )
        ]
        lines.append(f"| {sigma:g} | {width} | {' | '.join(numbers)} |")
    return lines


def _figure(title, rows):
    """Accuracy against the number of parameters, a panel for each σ."""
    sigmas = sorted({sigma for sigma, *_ in rows})
    canvas = figures.new(4.2 * len(sigmas), 4, title)
    grid = np.atleast_1d(canvas.subplots(1, len(sigmas), sharey=True))
    for axes, sigma in zip(grid, sigmas):
        figures.tidy(axes)
        figures.subtitle(axes, f"σ = {sigma:g}" if sigma else "without noise")
        for method in _METHODS:
            drawn = sorted(
                (
                    row
                    for row in rows.values()
                    if (row.noise_multiplier, row.method) == (sigma, method)
                ),
                key=lambda row: row.width,
            )
            if not drawn:
                continue
            axes.errorbar(
                [row.parameters for row in drawn],
                [statistics.fmean(row.accuracies) for row in drawn],
                yerr=[
                    statistics.stdev(row.accuracies)
                    if len(row.results) > 1
                    else 0.0
                    for row in drawn
                ],
                label=method,
                color=_COLOURS[method],
                marker="o",
                capsize=3,
            )
        counts = {row.parameters for row in rows.values()}
        figures.log_ticks(axes, {c: f"{c:,}" for c in sorted(counts)})
        axes.set_xlabel("parameters")
    grid[0].set_ylabel("test accuracy, %")
    figures.shared_legend(canvas, grid)
    return canvas
