"""Geometric medians by noisy gradients, in few and in many dimensions.

Reference:
    [Li, Liu, Hashimoto, Inan, Kulkarni, Lee, Guha Thakurta: When Does
    Differentially Private Learning Not Suffer in High Dimensions?, NeurIPS
    2022](https://arxiv.org/abs/2207.00160), section 3.3
"""

import concurrent.futures
import dataclasses
import itertools
import math
import multiprocessing
import statistics
import time

import numpy as np

from tf_dpsub import accounting, analysis, files
from tf_dpsub.launchers.papers.engine import saved_points
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.launchers.terminal import durations

_EPSILON, _DELTA = 2.0, 1e-6
_EXAMPLES, _INFORMATIVE = 10_000, 10
_STEPS = 100_000
_SEEDS = range(5)
# Names of the matrix A = diag(j^-c), with the exponent c.
_MATRICES = {"I": 0.0, "diag(1/√j)": 0.5, "diag(1/j)": 1.0}
_DIMENSIONS = (20, 100, 500, 2000, 10_000)
_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
_REGULARIZATIONS = (0.0, 0.01)
_COLOURS = dict(
    zip(_MATRICES, (figures.RED, figures.ORANGE, figures.BLUE), strict=True)
)
_MARKERS = dict(zip(_MATRICES, "s^o", strict=True))


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of the algorithm.

    Attributes:
        matrix: string, the name of A.
        dimensions: int.
        learning_rate: float.
        regularization: float.
        seed: int, of the data, the sampled examples and the noise.
    """

    matrix: str
    dimensions: int
    learning_rate: float
    regularization: float
    seed: int

    @property
    def name(self):
        return (
            f"{self.matrix} d={self.dimensions} rate={self.learning_rate:g} "
            f"alpha={self.regularization:g} seed={self.seed}"
        )

    @property
    def setting(self):
        return self.matrix, self.dimensions, self.tuned

    @property
    def tuned(self):
        return self.learning_rate, self.regularization


class GeometricMedian:
    """Loss of private geometric medians as dimensions grow."""

    name = "geometric_median"
    title = "Private geometric medians as dimensions grow"

    def points(self):
        """All runs, seed by seed, in a list."""
        return [
            Point(matrix, dimensions, rate, alpha, seed)
            for seed, matrix, dimensions, rate, alpha in itertools.product(
                _SEEDS, _MATRICES, _DIMENSIONS, _RATES, _REGULARIZATIONS
            )
        ]

    def run(self, folder, points, *, fraction, jobs, command, inputs):
        """Runs the unfinished points, and writes a table and a figure.

        Args:
            folder: `pathlib.Path`.
            points: list of `Point`, those to run.
            fraction: float, the share of the steps to make.
            jobs: int, how many run at a time.
            command: string, for the table.
            inputs: `papers.Inputs`, not used.

        Returns:
            int, the exit code.

        Raises:
            ValueError: if the folder holds runs of another length.
        """
        steps = max(1, round(fraction * _STEPS))
        sigma = accounting.uniform_noise_multiplier(
            epsilon=_EPSILON, delta=_DELTA, examples=_EXAMPLES, steps=steps
        )
        return saved_points.run(
            self.title,
            folder,
            points,
            steps,
            results_of=lambda unfinished: _solve_all(
                unfinished, sigma, steps, jobs
            ),
            write_results=lambda saved: self._write_results(
                folder, saved, sigma, command
            ),
        )

    def _write_results(self, folder, saved, sigma, command):
        finished = [p for p in self.points() if p.name in saved["points"]]
        if not finished:
            return
        rows = _rows(finished, saved["points"])
        text = _table(self.title, rows, saved["steps"], sigma, command)
        files.write_text(folder / "table.md", text)
        folder_page.write_with_figures(
            folder, {"loss": lambda: _figure(self.title, rows, saved["steps"])}
        )


def solve(point, noise_multiplier, steps):
    """Runs the algorithm on synthetic data.

    The first ten coordinates of an example are normal with mean 1 and variance
    1, the others are 0. The loss of example i is `||x - x_i||_A`, with
    `||v||_A^2 = v^T A v`. Its gradients have norm 1 at most, since A's
    eigenvalues are 1 at most.

    Args:
        point: `Point`.
        noise_multiplier: float.
        steps: int.

    Returns:
        dict of two mean losses: `empirical`, on the examples, and
        `population`, on as many new ones.
    """
    weights = np.arange(1, point.dimensions + 1) ** -_MATRICES[point.matrix]
    generator = np.random.default_rng([point.seed, 1])
    examples, others = generator.normal(1, 1, (2, _EXAMPLES, _INFORMATIVE))

    def gradient(x, i):
        difference = x.copy()
        difference[:_INFORMATIVE] -= examples[i]
        weighted = weights * difference
        size = math.sqrt(weighted @ difference)
        return weighted / size if size else weighted

    solution = analysis.averaged_sgd(
        gradient,
        _EXAMPLES,
        np.zeros(point.dimensions),
        steps=steps,
        learning_rate=point.learning_rate,
        noise_multiplier=noise_multiplier,
        lipschitz=1.0,
        regularization=point.regularization,
        seed=point.seed,
    )
    outside = np.sum(weights[_INFORMATIVE:] * solution[_INFORMATIVE:] ** 2)

    def loss(centers):
        differences = solution[:_INFORMATIVE] - centers
        inside = np.sum(weights[:_INFORMATIVE] * differences**2, axis=1)
        return float(np.mean(np.sqrt(inside + outside)))

    return {"empirical": loss(examples), "population": loss(others)}


def _solve_all(points, sigma, steps, jobs):
    """Yields pairs of a point and its losses, as they finish."""
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(jobs, max(len(points), 1)), mp_context=context
    ) as pool:
        waiting = {pool.submit(solve, p, sigma, steps): p for p in points}
        # Estimate: the time of a run grows with its dimensions.
        total_work = sum(p.dimensions + 1000 for p in points)
        work_done = 0
        try:
            for future in concurrent.futures.as_completed(waiting):
                point, losses = waiting[future], future.result()
                work_done += point.dimensions + 1000
                seconds = (time.monotonic() - start) * (
                    total_work / work_done - 1
                )
                print(
                    f"{point.name}: {losses['empirical']:.4f}; "
                    f"{durations.text(seconds)} left",
                    flush=True,
                )
                yield point, losses
        finally:
            pool.shutdown(cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class _Row:
    """All seeds of one matrix, number of dimensions and learning rate."""

    matrix: str
    dimensions: int
    tuned: tuple
    losses: dict

    def mean(self, kind="empirical"):
        return statistics.fmean(self.losses[kind])

    def deviation(self, kind="empirical"):
        values = self.losses[kind]
        return statistics.stdev(values) if len(values) > 1 else 0.0


def _rows(points, losses):
    """Rows for three ways to choose the learning rate.

    All rows share the rate, all dimensions of a matrix share it, or each row
    has its own. The lowest empirical loss decides: for a shared rate the loss
    in the most dimensions, summed over the matrices that share it.

    Returns:
        dict from `"all"`, `"matrix"` and `"each"` to lists of `_Row`.
    """
    seeds = {}
    for point in points:
        seeds.setdefault(point.setting, []).append(losses[point.name])
    rows = [
        _Row(*setting, {kind: [v[kind] for v in values] for kind in values[0]})
        for setting, values in seeds.items()
    ]
    best = {}
    for row in rows:
        key = row.matrix, row.dimensions
        if key not in best or row.mean() < best[key].mean():
            best[key] = row
    most_dimensions = {m: max(d for n, d in best if n == m) for m, _ in best}
    totals = {}
    for row in rows:
        if row.dimensions == most_dimensions[row.matrix]:
            totals.setdefault(row.tuned, []).append(row.mean())
    # Rates that have not run for all matrices yet are left out.
    whole = {
        t: sum(v) for t, v in totals.items() if len(v) == len(most_dimensions)
    }
    return {
        "all": [
            r for r in rows if whole and r.tuned == min(whole, key=whole.get)
        ],
        "matrix": [
            r
            for r in rows
            if r.tuned == best[r.matrix, most_dimensions[r.matrix]].tuned
        ],
        "each": list(best.values()),
    }


def _table(title, rows, steps, sigma, command):
    lines = folder_page.heading(title, command)
    lines += [_sentence(rows["all"] or rows["matrix"]), ""]
    lines += [
        f"Mean of ||x - x_i||_A over {_EXAMPLES:,} examples, of which the "
        f"first {_INFORMATIVE} coordinates are normal with mean 1 and variance "
        f"1, the others 0; mean ± standard deviation over seeds. ε = "
        f"{_EPSILON:g} at δ = {_DELTA:g}, one uniformly drawn example a step, "
        f"{steps:,} steps, σ = {sigma:.4g}.",
    ]
    if steps != _STEPS:
        lines += ["", f"Shortened: {steps / _STEPS:g} of the steps."]
    heads = {
        "all": "One learning rate and α for all A, the best in sum in the most "
        "dimensions",
        "matrix": "One learning rate and α for each A, the best in the most "
        "dimensions",
        "each": "The best learning rate and α for each A and d",
    }
    for kind, head in heads.items():
        lines += ["", f"## {head}", ""]
        lines += [
            "| A | d | learning rate | α | loss | on new examples | seeds |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows[kind]:
            rate, alpha = row.tuned
            cells = [
                row.matrix,
                f"{row.dimensions:,}",
                f"{rate:g}",
                f"{alpha:g}",
                *(
                    f"{row.mean(k):.4f} ± {row.deviation(k):.4f}"
                    for k in ("empirical", "population")
                ),
                str(len(row.losses["empirical"])),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sentence(rows):
    """Sentence on how each matrix's loss changes with the dimensions."""
    rows_of = {}
    for row in rows:
        rows_of.setdefault(row.matrix, []).append(row)
    changes = []
    for matrix, matrix_rows in rows_of.items():
        matrix_rows.sort(key=lambda row: row.dimensions)
        fewest, most = matrix_rows[0], matrix_rows[-1]
        changes.append(
            f"from {fewest.mean('empirical'):.3f} to "
            f"{most.mean('empirical'):.3f} with A = {matrix} (d = "
            f"{fewest.dimensions:,} to {most.dimensions:,})"
        )
    return f"The loss goes {', '.join(changes)}."


def _figure(title, rows, steps):
    if steps != _STEPS:
        title += f"\nshortened: {steps / _STEPS:g} of the steps"
    canvas = figures.new(13, 4.4, title)
    grid = canvas.subplots(1, 3, sharey=True)
    heads = {
        "all": "one learning rate for all",
        "matrix": "one for each A",
        "each": "one for each A and d",
    }
    for axes, (kind, head) in zip(grid, heads.items()):
        figures.tidy(axes)
        figures.subtitle(axes, head)
        for matrix in _MATRICES:
            matrix_rows = [r for r in rows[kind] if r.matrix == matrix]
            matrix_rows.sort(key=lambda row: row.dimensions)
            for losses, style in (("empirical", "-"), ("population", ":")):
                axes.errorbar(
                    [r.dimensions for r in matrix_rows],
                    [r.mean(losses) for r in matrix_rows],
                    yerr=[r.deviation(losses) for r in matrix_rows],
                    label=f"A = {matrix}"
                    + (", new examples" if losses == "population" else ""),
                    color=_COLOURS[matrix],
                    marker=_MARKERS[matrix],
                    linestyle=style,
                    linewidth=1.6,
                    markersize=5,
                    capsize=3,
                )
        figures.log_ticks(axes, {d: f"{d:,}" for d in _DIMENSIONS})
        axes.set_xlabel("dimensions")
    grid[0].set_ylabel("mean loss")
    figures.shared_legend(canvas, grid)
    return canvas
