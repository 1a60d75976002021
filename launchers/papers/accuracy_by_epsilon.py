"""Accuracy of private heads on frozen features, by epsilon.

Features are those of `configs/best`. A head is trained by full-batch DP-SGD on
all of them, or on their main public directions, whitened: a public subspace.
The former, which is there to be compared with, is simulated.
"""

import dataclasses
import itertools
import math
import statistics

from tf_dpsub import files
from tf_dpsub.accounting.statement import round_up
from tf_dpsub.configs.best import cifar10, fashion_mnist, mnist, sst2
from tf_dpsub.launchers.papers import published
from tf_dpsub.launchers.papers.engine import (
    feature_cache,
    linear_heads,
    neighbour_search,
)
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.launchers.terminal import durations, program, quiet

_DELTA = 1e-5
_TUNING_SEED, _SEEDS = 0, (1, 2, 3, 4, 5)
_SUBSPACE, _ALL_FEATURES = "public subspace", "DP-SGD"
_METHODS = (_SUBSPACE, _ALL_FEATURES)
# The grid, the same for both methods: rates are multiples of the rate of
# `heads.FullBatch`.
_RATES = tuple(2.0**k for k in range(-4, 5))
_CLIPS = tuple(0.1 * 2.0**k for k in range(-3, 4))
_STEPS = (8, 15, 30, 60, 100, 150, 250, 400)
# Trying some of these at once takes hardly longer than one.
_TOGETHER = ("rate", "clip", "steps")
# Of the subspace alone. The largest rank is that of the public features.
_RANKS = (60, 125, 250, 500, 1000)
_WHITEN = (0.0, 0.25, 0.5, 0.75, 1.0)
_START_CLIP, _START_RANK, _START_WHITEN = 0.025, 1000, 0.75
# About the standard error of an accuracy on 10,000 examples.
_LEAST_GAIN = 1e-3
# Ends beyond which there is nothing else: below the smallest clip all gradients
# are clipped, and the rate is in units of the clip.
_NATURAL_ENDS = {
    "clip": lambda clip: clip == _CLIPS[0],
    "whiten": lambda whiten: True,
    "rank": lambda rank: rank not in _RANKS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A data set with the features that `configs/best` has for it.

    Attributes:
        name: string.
        title: string.
        config: function without arguments that returns the config.
        held_out: int, training examples that settings are chosen on.
        published: tuple of `published.Published`.
    """

    name: str
    title: str
    config: object
    held_out: int
    published: tuple = ()


TASKS = tuple(
    Task(
        name=name,
        title=title,
        config=module.get_config,
        held_out=held_out,
        published=published.ACCURACIES[name],
    )
    for name, title, module, held_out in (
        ("mnist", "MNIST", mnist, 10_000),
        ("fashion_mnist", "Fashion-MNIST", fashion_mnist, 10_000),
        ("sst2", "SST-2", sst2, 5000),
        ("cifar10", "CIFAR-10", cifar10, 10_000),
    )
)
# In the order in which they run.
_EPSILONS = ((1.0, 0.2), (3.0,), (0.5, 2.0, 8.0))


@dataclasses.dataclass(frozen=True)
class Point:
    """A data set at one epsilon: a row of the table.

    Attributes:
        task: `Task`.
        epsilon: float.
    """

    task: Task
    epsilon: float

    @property
    def name(self):
        return f"{self.task.name}_epsilon{self.epsilon:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a method at a point.

    Attributes:
        point: `Point`.
        method: string.
        setting: `linear_heads.Setting`, the chosen one.
        ends: list of the fields of it that are at an end of their grid.
        tried: int, number of settings.
        results: list of dicts, one for each finished seed.
    """

    point: Point
    method: str
    setting: linear_heads.Setting
    ends: list
    tried: int
    results: list

    @property
    def mean(self):
        return statistics.fmean(r["accuracy"] for r in self.results)

    @property
    def deviation(self):
        values = [r["accuracy"] for r in self.results]
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def seconds(self):
        return statistics.fmean(r["seconds"] for r in self.results)


class AccuracyByEpsilon:
    """Accuracy by epsilon of heads on features, tuned, beside published ones.

    Settings are chosen on a part that is held out of training, by a simulation
    of the mechanism with one seed, which takes a fraction of the time; new
    seeds report on the test split: private runs in a public subspace, and
    simulations of DP-SGD on all features.
    """

    name = "accuracy_by_epsilon"
    title = "Accuracy by epsilon"

    def points(self):
        """All rows, in the order in which they run."""
        return [
            Point(task, epsilon)
            for epsilons in _EPSILONS
            for task, epsilon in itertools.product(TASKS, epsilons)
        ]

    def run(self, folder, points, *, fraction, jobs, command, inputs):
        """Runs the unfinished trials of some points, one after another.

        Args:
            folder: `pathlib.Path`.
            points: list of `Point`.
            fraction: float, the share of the steps to make.
            jobs: int, not used.
            command: string, for the table.
            inputs: `papers.Inputs`.

        Returns:
            int, the exit code.

        Raises:
            ValueError: if a file with public data is needed and not given, or
                the folder holds other features.
        """
        configs = {p.task: feature_config(p.task, inputs) for p in points}
        quiet.load_tensorflow()
        files.make_folder(folder / "trials")
        try:
            for method, point in itertools.product(_METHODS, points):
                cache = feature_cache.FeatureCache(
                    folder / "features" / point.task.name, configs[point.task]
                )
                cache.prepare()
                _Trials(point, folder, fraction, cache).row(method)
                self._write_results(folder, fraction, command)
        except KeyboardInterrupt:
            print("\nInterrupted; the same command goes on from here.")
            return program.INTERRUPTED
        finally:
            self._write_results(folder, fraction, command)
        print(f"{folder}/table.md")
        return 0

    def _write_results(self, folder, fraction, command):
        rows = finished_rows(self.points(), folder, fraction)
        if not rows:
            return
        files.write_text(
            folder / "table.md", table(self.title, rows, fraction, command)
        )
        with figures.style():
            canvas = _figure(self.title, rows)
            figures.write(canvas, folder / "accuracy.png")
        folder_page.write(folder)


def feature_config(task, inputs):
    """The config of a task's features, with none of them left out."""
    config = task.config()
    config.public_data = (
        inputs.public_texts if task.name == "sst2" else inputs.public_images
    )
    if config.public_data is None:
        flag, kind = (
            ("public_texts", "a public text in each line")
            if task.name == "sst2"
            else ("public_images", "public images")
        )
        raise ValueError(
            f"Expected --{flag}=FILE with {kind}, for {task.title}, got none. "
            "Give one, or choose other rows with --only."
        )
    if task.name == "sst2":
        config.model_kwargs.rank = None
        if inputs.language_model is not None:
            config.model_kwargs.folder = inputs.language_model
    else:
        config.features = {
            name: value
            for name, value in config.features.items()
            if name not in ("rank", "whiten")
        }
    return config


class _Trials:
    """The trials of one point, each of which is a file.

    Args:
        point: `Point`.
        folder: `pathlib.Path`.
        fraction: float, the share of the steps to make.
        cache: `feature_cache.FeatureCache`. Defaults to `None`: no trial is
            run, and `neighbour_search.Unknown` raised for one that is missing.
    """

    def __init__(self, point, folder, fraction, cache=None):
        self._point, self._folder = point, folder
        self._fraction, self._cache = fraction, cache
        self._tried = 0

    def row(self, method):
        """Chooses a setting and reports it: a `Row`."""
        self._tried = 0
        grid = self._grid(method)
        start = self._start(method, grid)
        setting, ends = neighbour_search.best_of(
            start, grid, self._scores, _TOGETHER, _LEAST_GAIN
        )
        part, run = (
            ("simulated_test", self._simulate)
            if method == _ALL_FEATURES
            else ("test", self._train)
        )
        trials = [(setting, seed) for seed in _SEEDS]
        missing = self._missing(part, trials)
        if missing and self._cache is not None:
            run(part, missing)
        return Row(
            point=self._point,
            method=method,
            setting=setting,
            ends=[field for field in ends if not _is_natural(setting, field)],
            tried=self._tried,
            results=self._finished(part, trials),
        )

    def _grid(self, method):
        grid = {"rate": _RATES, "steps": _STEPS, "clip": _CLIPS}
        if method == _ALL_FEATURES:
            return grid
        ranks = self._facts(method)["largest_rank"]
        return grid | {
            "whiten": _WHITEN,
            "rank": (*(r for r in _RANKS if r < ranks), ranks),
        }

    def _start(self, method, grid):
        facts = self._facts(method)
        if facts["start"] is not None:
            return linear_heads.Setting(**facts["start"])
        start = linear_heads.Setting(
            rate=1.0, clip=_START_CLIP, steps=facts["steps"]
        )
        if "rank" not in grid:
            return start
        rank = max(
            r for r in grid["rank"] if r <= max(_START_RANK, grid["rank"][0])
        )
        return dataclasses.replace(start, rank=rank, whiten=_START_WHITEN)

    def _facts(self, method):
        """What the search starts from, in a file."""
        kind = method.lower().replace(" ", "_")
        file = self._folder / "trials" / f"{self._point.name}_{kind}.json"
        if file.exists():
            return files.read_json(file)
        if self._cache is None:
            raise neighbour_search.Unknown(self._point.name)
        from tf_dpsub import heads

        head = heads.FullBatch(
            self._cache.examples, self._point.epsilon, _DELTA
        )
        facts = {
            "largest_rank": self._cache.largest_rank,
            "steps": head.steps,
            "start": self._starts().get(method),
        }
        files.write_json(file, facts)
        return facts

    def _starts(self):
        """Dict from methods to their settings at the nearest finished ε."""
        task, epsilon = self._point.task, self._point.epsilon
        points = [Point(task, e) for e in itertools.chain(*_EPSILONS)]
        rows = finished_rows(points, self._folder, self._fraction)
        rows.sort(key=lambda r: -abs(math.log(r.point.epsilon / epsilon)))
        return {row.method: dataclasses.asdict(row.setting) for row in rows}

    def _scores(self, settings):
        """Held-out accuracies of settings, of which missing ones are tried."""
        self._tried += len(settings)
        trials = [(setting, _TUNING_SEED) for setting in settings]
        missing = self._missing("simulated", trials)
        missing.sort(key=lambda trial: _features(trial[0]))
        for _, group in itertools.groupby(
            missing, lambda trial: _features(trial[0])
        ):
            self._simulate("simulated", list(group))
        return [r["accuracy"] for r in self._finished("simulated", trials)]

    def _train(self, part, trials):
        """Makes the private run of each of some trials.

        Args:
            part, trials: as `_simulate`.
        """
        for setting, seed in trials:
            result = linear_heads.train(
                self._split(setting),
                self._shortened(setting),
                self._point.epsilon,
                _DELTA,
                seed,
            )
            self._write(part, (setting, seed), result)

    def _missing(self, part, trials):
        return [t for t in trials if not self._file(part, *t).exists()]

    def _finished(self, part, trials):
        """The results of the finished ones of some trials, as dicts."""
        there = [self._file(part, *trial) for trial in trials]
        return [files.read_json(file) for file in there if file.exists()]

    def _simulate(self, part, trials):
        """Simulates trials that have the same features, at once.

        Args:
            part: string, `"simulated"` on the part that is held out of
                training, or `"simulated_test"` on the test split.
            trials: list of pairs of a setting and a seed.
        """
        split = self._split(trials[0][0])
        if part == "simulated":
            split = split.held_out(self._point.task.held_out)
        settings, seeds = zip(*trials)
        results = linear_heads.simulate(
            split,
            [self._shortened(setting) for setting in settings],
            self._point.epsilon,
            _DELTA,
            seeds,
        )
        for trial, result in zip(trials, results):
            self._write(part, trial, result)

    def _split(self, setting):
        if self._cache is None:
            raise neighbour_search.Unknown(self._point.name)
        return self._cache.split(setting.rank, setting.whiten)

    def _shortened(self, setting):
        steps = max(1, round(self._fraction * setting.steps))
        return dataclasses.replace(setting, steps=steps)

    def _file(self, part, setting, seed):
        name = self._shortened(setting).name
        return (
            self._folder
            / "trials"
            / f"{self._point.name}_{part}_{name}_seed{seed}.json"
        )

    def _write(self, part, trial, result):
        setting, seed = trial
        file = self._file(part, setting, seed)
        setting = dataclasses.asdict(self._shortened(setting))
        files.write_json(file, result | {"setting": setting, "seed": seed})
        print(
            f"{file.stem}: {100 * result['accuracy']:.2f} % in "
            f"{durations.text(result['seconds'])}",
            flush=True,
        )


def _features(setting):
    """What a setting's features depend on, to be sorted and grouped by."""
    return (setting.rank or 0, setting.whiten or 0.0)


def _is_natural(setting, field):
    """Whether there is nothing beyond the end at which a setting is."""
    holds = _NATURAL_ENDS.get(field)
    return holds is not None and holds(getattr(setting, field))


def finished_rows(points, folder, fraction):
    """Rows with at least one seed on the test split.

    Args:
        points: list of `Point`.
        folder: `pathlib.Path`.
        fraction: float, the share of the steps that trials made.

    Returns:
        List of `Row`, sorted by data set and epsilon.
    """
    rows = []
    order = [task.name for task in TASKS]
    for point in sorted(
        points, key=lambda p: (order.index(p.task.name), p.epsilon)
    ):
        for method in _METHODS:
            try:
                row = _Trials(point, folder, fraction).row(method)
            except neighbour_search.Unknown:
                continue
            if row.results:
                rows.append(row)
    return rows


def table(title, rows, fraction, command):
    """The results in Markdown.

    Args:
        title: string.
        rows: list of `Row`.
        fraction: float, the share of the steps that trials made.
        command: string, the command line that made them.

    Returns:
        A string of several lines.
    """
    lines = [f"# {title}", "", "```sh", command, "```", ""]
    lines += [
        "Test accuracy in percent, mean ± standard deviation over seeds, δ = "
        f"{_DELTA:g}, ε by PLD. A seed draws the noise alone. Settings were "
        "chosen for each row on training examples held out, by simulations "
        "with another seed, in a search that ends where no neighbour in the "
        f"grid is better by more than {100 * _LEAST_GAIN:g} points. **No ε "
        f"covers this choice.** {_ALL_FEATURES} on all features is simulated "
        "on the test split, too."
    ]
    if fraction != 1:
        lines += ["", f"Shortened: {fraction:g} of the steps."]
    for task in TASKS:
        task_rows = [r for r in rows if r.point.task == task]
        if task_rows:
            lines += ["", f"## {task.title}", "", *_accuracies(task, task_rows)]
    lines += ["", "## Settings", "", *_settings(rows)]
    return "\n".join(lines) + "\n"


def _accuracies(task, rows):
    lines = [
        f"| ε | {_SUBSPACE} | {_ALL_FEATURES}, same features | published |",
        "|---|---|---|---|",
    ]
    for epsilon, rows_of_epsilon in itertools.groupby(
        rows, lambda r: r.point.epsilon
    ):
        by_method = {row.method: row for row in rows_of_epsilon}
        cells = [
            _accuracy(by_method[m]) if m in by_method else "" for m in _METHODS
        ]
        cells.append(
            "; ".join(
                f"{p.accuracy:g} ([{p.what}]({p.source}))"
                for p in task.published
                if p.epsilon == epsilon
            )
        )
        lines.append(f"| {epsilon:g} | {' | '.join(cells)} |")
    return lines


def _accuracy(row):
    text = f"{100 * row.mean:.2f}"
    if row.deviation is not None:
        text += f" ± {100 * row.deviation:.2f}"
    if len(row.results) < len(_SEEDS):
        text += f" ({len(row.results)} of {len(_SEEDS)} seeds)"
    return text


def _settings(rows):
    lines = [
        "| data | ε | method | features | rate | clip | steps | whitened | σ | "
        "spent ε | seconds a run | settings tried |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first, setting = row.results[0], row.setting
        marks = {
            field: " (end of the grid)" if field in row.ends else ""
            for field in ("rate", "clip", "steps", "rank")
        }
        spent = [r["epsilon"] for r in row.results if "epsilon" in r]
        cells = [
            row.point.task.title,
            f"{row.point.epsilon:g}",
            row.method,
            f"{first['features']:,}{marks['rank']}",
            f"{setting.rate:g}{marks['rate']}",
            f"{setting.clip:g}{marks['clip']}",
            f"{setting.steps}{marks['steps']}",
            "" if setting.whiten is None else f"{setting.whiten:g}",
            f"{first['noise_multiplier']:.3g}",
            round_up(max(spent), digits=3) if spent else "simulated",
            f"{row.seconds:.0f}",
            str(row.tried),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figure(title, rows):
    tasks = [t for t in TASKS if any(r.point.task == t for r in rows)]
    canvas = figures.new(1.5 + 3.2 * len(tasks), 3.8, title)
    grid = canvas.subplots(1, len(tasks), squeeze=False)[0]
    looks = {_SUBSPACE: (figures.BLUE, "o"), _ALL_FEATURES: (figures.RED, "s")}
    for axes, task in zip(grid, tasks):
        figures.tidy(axes)
        figures.subtitle(axes, task.title)
        for method, (colour, marker) in looks.items():
            drawn = [
                r for r in rows if r.point.task == task and r.method == method
            ]
            if not drawn:
                continue
            axes.errorbar(
                [r.point.epsilon for r in drawn],
                [100 * r.mean for r in drawn],
                yerr=[100 * (r.deviation or 0) for r in drawn],
                label=method,
                color=colour,
                marker=marker,
                capsize=3,
            )
        ticks = sorted({r.point.epsilon for r in rows if r.point.task == task})
        published = [p for p in task.published if p.epsilon in ticks]
        if published:
            axes.plot(
                [p.epsilon for p in published],
                [p.accuracy for p in published],
                label="published",
                color=figures.GREY,
                marker="*",
                markersize=10,
                linestyle="",
            )
        figures.log_ticks(axes, {e: f"{e:g}" for e in ticks})
        axes.set_xlabel("ε")
    grid[0].set_ylabel("test accuracy, %")
    figures.shared_legend(canvas, grid)
    return canvas
