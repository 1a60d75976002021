"""Other steps of a private head: what a public subspace leaves to be gained.

A head on frozen features is trained by full-batch DP-SGD in a public
subspace, as in `accuracy_by_epsilon`. Here its steps are replaced by others
that promise a gain, and all are tuned alike. They are simulated.
"""

import dataclasses
import itertools
import statistics

import numpy as np

from tf_dpsub import files
from tf_dpsub.launchers.papers import accuracy_by_epsilon
from tf_dpsub.launchers.papers.engine import (
    feature_cache,
    linear_heads,
    neighbour_search,
    saved_points,
)
from tf_dpsub.launchers.reports import folder_page
from tf_dpsub.launchers.terminal import quiet

_DELTA = 1e-5
_TUNING_SEED, _SEEDS = 0, (1, 2, 3, 4, 5)
_HELD_OUT = 10_000
_EPSILONS = (0.5, 1.0)
# What `accuracy_by_epsilon` chose for CIFAR-10 at these ε.
_RANK, _WHITEN, _STEPS = 1000, 0.75, 100
_RATES = tuple(2.0**k for k in range(-5, 6))
_CLIPS = tuple(0.1 * 2.0**k for k in range(-4, 5))
_START = {"rate": 1.0, "clip": 0.05}
_LEAST_GAIN = 1e-3
# Of the mean of squared gradients, from step to step.
_MEMORY = 0.9
# Of the largest curvature, added to all.
_FLOOR = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step.

    Attributes:
        name: string.
        step: function of a `_Run`, of the errors of its logits `[examples,
            classes]`, of the kernel and of a value, which returns the noisy
            mean gradient `[features, classes]`.
        values: tuple of its values that are tried; `(None,)` for none.
        start: the value that is tried first.
        is_whole: bool, whether it takes all public directions, not the first.
    """

    name: str
    step: object
    values: tuple = (None,)
    start: object = None
    is_whole: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a head.

    Attributes:
        rate: float, a multiple of the rate of `heads.FullBatch`.
        clip: float.
        value: of the kind of step.
    """

    rate: float
    clip: float
    value: object


@dataclasses.dataclass(frozen=True)
class Point:
    """A kind of step at one epsilon: a row of the table.

    Attributes:
        kind: `Kind`.
        epsilon: float.
    """

    kind: Kind
    epsilon: float

    @property
    def name(self):
        return f"epsilon{self.epsilon:g}_{self.kind.name.replace(' ', '_')}"


class _Run:
    """A training run: its data, its noise, and what its steps remember.

    Args:
        split: `feature_cache.Split`.
        public: array `[examples, features]`, of public examples.
        deviation: float, the standard deviation of noise in the mean gradient,
            as a multiple of the clip.
        clip: float.
        generator: `numpy.random.Generator`.
    """

    def __init__(self, split, public, deviation, clip, generator):
        self.x, self.public, self.clip = split.x_train, public, clip
        self._deviation, self._generator = deviation, generator
        self._parts = {}
        self.memory, self.steps = 0.0, 0

    def variance(self, clip):
        """That of the noise in each number of a mean gradient."""
        return (self._deviation * clip) ** 2

    def normal(self, *shape):
        return self._generator.standard_normal(shape, np.float32)

    def noisy_mean(self, errors, clip, part=(None, None), releases=1):
        """The mean of clipped gradients of the kernel, with noise.

        Args:
            errors: array `[examples, classes]`; a gradient is the outer product
                of them and of the features of an example.
            clip: float.
            part: pair of ints, the features from and up to which the kernel is
                meant. Defaults to all.
            releases: int, of how many such means a step has: each has a share
                of the budget. Defaults to 1.
        """
        if part not in self._parts:
            x = np.ascontiguousarray(self.x[:, slice(*part)])
            self._parts[part] = x, np.linalg.norm(x, axis=1)
        x, lengths = self._parts[part]
        norms = lengths * np.linalg.norm(errors, axis=1)
        clipped = errors * (clip / np.maximum(norms, clip))[:, None]
        mean = x.T @ clipped / len(x)
        deviation = np.sqrt(releases * self.variance(clip))
        return mean + deviation * self.normal(*mean.shape)


def _one_gaussian(run, errors, kernel, value):
    """The step of `ProjectedDPSGD` in a whitened public subspace."""
    del kernel, value
    return run.noisy_mean(errors, run.clip)


def _wiener(run, errors, kernel, value):
    """That step, each direction weighted by its share of signal.

    The weight of a direction is S / (S + N), N the variance of its noise and
    S + N the mean of its squared noisy gradients so far: of what was released.
    """
    gradient = _one_gaussian(run, errors, kernel, value)
    run.steps += 1
    squares = np.mean(gradient**2, axis=1)
    run.memory = _MEMORY * run.memory + (1 - _MEMORY) * squares
    mean = run.memory / (1 - _MEMORY**run.steps)
    weights = np.maximum(mean - run.variance(run.clip), 0.0) / mean
    return gradient * weights[:, None]


def _residual(run, errors, kernel, value):
    """GEP in whitened coordinates: the first ones, and the rest, apart.

    Each part is clipped in proportion to its length in public examples.
    """
    del kernel
    whole = np.median(np.linalg.norm(run.public, axis=1))
    parts = []
    for part in ((None, value), (value, None)):
        lengths = np.linalg.norm(run.public[:, slice(*part)], axis=1)
        clip = run.clip * np.median(lengths) / whole
        parts.append(run.noisy_mean(errors, clip, part, releases=2))
    return np.concatenate(parts)


def _two_sided(run, errors, kernel, value):
    """Whitened on the side of outputs, too, as K-FAC does.

    By a power of the curvature of the loss at the logits of public examples, of
    the head that was released last.
    """
    from tf_dpsub.planning import simulated_heads

    predictions = simulated_heads.softmax(run.public @ kernel)
    curvature = np.diag(predictions.mean(0))
    curvature -= predictions.T @ predictions / len(predictions)
    values, vectors = np.linalg.eigh(curvature)
    # The loss is the same if all logits grow alike: not a direction.
    values, vectors = values[1:], vectors[:, 1:]
    scales = (values + _FLOOR * values[-1]) ** (-value / 2)
    scales /= scales[-1]
    basis = (vectors * scales).astype(np.float32)
    return run.noisy_mean(errors @ basis, run.clip) @ basis.T


def _zeroth_order(run, errors, kernel, value):
    """Noisy slopes along few random directions, drawn anew in each step.

    They are the exact derivatives to which differences of losses tend.
    """
    size = kernel.size
    features, classes = kernel.shape
    directions = run.normal(features, value, classes) / np.sqrt(size)
    logits = run.x @ directions.reshape(features, -1)
    slopes = np.einsum("ijk,ik->ij", logits.reshape(-1, value, classes), errors)
    clip = run.clip * np.sqrt(value / size)
    lengths = np.linalg.norm(slopes, axis=1)
    slopes *= (clip / np.maximum(lengths, clip))[:, None]
    noise = np.sqrt(run.variance(clip)) * run.normal(value)
    # The gradient is so much longer than its part along the directions.
    return np.einsum("j,fjk->fk", slopes.mean(0) + noise, directions) * (
        size / value
    )


KINDS = (
    Kind(name="public subspace", step=_one_gaussian),
    Kind(name="Wiener weights", step=_wiener),
    Kind(
        name="GEP",
        step=_residual,
        values=(125, 250, 500, 1000, 1500),
        start=500,
        is_whole=True,
    ),
    Kind(
        name="two-sided",
        step=_two_sided,
        values=(0.25, 0.5, 1.0),
        start=0.5,
    ),
    Kind(name="zeroth order", step=_zeroth_order, values=(3, 10, 30), start=10),
)


class HeadSteps:
    """Other steps of a private head, beside those in a public subspace.

    On CIFAR-10 with the features of `accuracy_by_epsilon`, from whose folder in
    the same workdir they are taken if they are there.
    """

    name = "head_steps"
    title = "Steps of a private head"

    def points(self):
        """All rows, a list of `Point`."""
        return list(
            itertools.starmap(Point, itertools.product(KINDS, _EPSILONS))
        )

    def run(self, folder, points, *, fraction, jobs, command, inputs):
        """Runs the unfinished points, one after another, and writes a table.

        Args:
            folder: `pathlib.Path`.
            points: list of `Point`, those to run.
            fraction: float, the share of the steps to make.
            jobs: int, not used.
            command: string, for the table.
            inputs: `papers.Inputs`, with public images.

        Returns:
            int, the exit code.

        Raises:
            ValueError: if there are no public images, or the folder holds other
                features or runs of another length.
        """
        task = next(t for t in accuracy_by_epsilon.TASKS if t.name == "cifar10")
        config = accuracy_by_epsilon.feature_config(task, inputs)
        quiet.load_tensorflow()
        features = folder.parent / "accuracy_by_epsilon" / "features"
        cache = feature_cache.FeatureCache(features / task.name, config)
        cache.prepare()
        steps = max(1, round(fraction * _STEPS))

        return saved_points.run_each(
            self.title,
            folder,
            points,
            steps,
            result_of=lambda point: run_point(cache, point, steps),
            summary_of=lambda result: f"{_accuracy(result)} %",
            write_results=lambda saved: self._write_results(
                folder, saved, command
            ),
        )

    def _write_results(self, folder, saved, command):
        text = table(self.title, self.points(), saved["points"], command)
        files.write_text(folder / "table.md", text)
        folder_page.write(folder)


def run_point(cache, point, steps):
    """Tunes a kind of step, and measures it with new seeds.

    Args:
        cache: `feature_cache.FeatureCache`.
        point: `Point`.
        steps: int.

    Returns:
        dict of the `setting`, of its fields that are at an `ends` of the grid,
        of how many were `tried`, and of the test `accuracies`.
    """
    kind = point.kind
    rank = cache.largest_rank if kind.is_whole else _RANK
    rank = min(rank, cache.largest_rank)
    public = cache.public(rank, _WHITEN)
    test = cache.split(rank, _WHITEN)
    held_out = test.held_out(min(_HELD_OUT, len(test.x_train) // 5))
    tried = []

    def scores(settings):
        tried.extend(settings)
        return [
            simulate(held_out, public, point, s, steps, _TUNING_SEED)
            for s in settings
        ]

    setting, ends = neighbour_search.best_of(
        Setting(**_START, value=kind.start),
        {"rate": _RATES, "clip": _CLIPS, "value": kind.values},
        scores,
        least_gain=_LEAST_GAIN,
    )
    return {
        "setting": dataclasses.asdict(setting),
        "ends": [e for e in ends if e != "value" or len(kind.values) > 1],
        "tried": len(tried),
        "accuracies": [
            simulate(test, public, point, setting, steps, seed)
            for seed in _SEEDS
        ],
    }


def simulate(split, public, point, setting, steps, seed):
    """Trains a head, with noise that is neither secure nor exact.

    Args:
        split: `feature_cache.Split`.
        public: array `[examples, features]`, of public examples.
        point: `Point`.
        setting: `Setting`.
        steps: int.
        seed: int, of the noise.

    Returns:
        float, the accuracy on the test part of the split.
    """
    from tf_dpsub.planning import simulated_heads

    examples, size = split.x_train.shape
    head = linear_heads.full_batch(
        examples,
        linear_heads.Setting(rate=setting.rate, clip=setting.clip, steps=steps),
        point.epsilon,
        _DELTA,
    )
    run = _Run(
        split,
        public,
        np.float32(head.noise_multiplier / examples),
        np.float32(setting.clip),
        np.random.default_rng(seed),
    )
    classes = int(split.y_train.max()) + 1
    targets = np.eye(classes, dtype=np.float32)[split.y_train]
    kernel = np.zeros((size, classes), np.float32)
    velocity = np.zeros_like(kernel)
    rate = np.float32(head.learning_rate / setting.clip)
    for _ in range(steps):
        errors = simulated_heads.softmax(run.x @ kernel) - targets
        gradient = point.kind.step(run, errors, kernel, setting.value)
        velocity = np.float32(head.momentum) * velocity - rate * gradient
        kernel += velocity
    right = simulated_heads.is_right(kernel, split.x_test, split.y_test)
    return float(right.mean())


def table(title, points, results, command):
    """A Markdown page with the accuracies and the settings of points."""
    lines = [
        f"# {title}",
        "",
        f"```sh\n{command}\n```",
        "",
        "CIFAR-10; test accuracy in percent, mean ± standard deviation over "
        f"seeds of the noise, simulated, δ = {_DELTA:g}. Settings were chosen "
        "on training examples held out. **No ε covers this choice.**",
        "",
        "| ε | step | accuracy | rate | clip | value | at an end | tried |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        result = results.get(point.name)
        if result is None:
            continue
        setting = result["setting"]
        value = "" if setting["value"] is None else f"{setting['value']:g}"
        cells = (
            f"{point.epsilon:g}",
            point.kind.name,
            _accuracy(result),
            f"{setting['rate']:g}",
            f"{setting['clip']:g}",
            value,
            ", ".join(result["ends"]),
            str(result["tried"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _accuracy(result):
    accuracies = [100 * a for a in result["accuracies"]]
    return (
        f"{statistics.fmean(accuracies):.2f} ± "
        f"{statistics.stdev(accuracies):.2f}"
    )
