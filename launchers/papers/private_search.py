"""What a private search of hyper-parameters publishes, on digits.

Reference:
    [Papernot, Steinke: Hyperparameter Tuning with Renyi Differential Privacy,
    ICLR 2022](https://arxiv.org/abs/2110.03620)
"""

import dataclasses
import functools
import time

import numpy as np

from tf_dpsub import files
from tf_dpsub.accounting import selection
from tf_dpsub.accounting.statement import round_up
from tf_dpsub.launchers.papers.engine import saved_points
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.launchers.terminal import quiet

_DELTA = 1e-5
# Trials as those of the tutorial on private search.
_TRIALS = 100
_BATCH_SIZE, _EPOCHS = 256, 20
_NOISE_MULTIPLIER, _SCORE_NOISE = 6.0, 25.0
_MEAN_TRIALS = 30
_LEVELS = (0.05, 0.25, 0.5, 0.75)


@dataclasses.dataclass(frozen=True)
class Point:
    """One trial: hyper-parameters, a private model, and its score.

    Attributes:
        seed: int, of the hyper-parameters, the noise and the batches.
    """

    seed: int

    @property
    def name(self):
        return f"trial{self.seed}"


class PrivateSearch:
    """Accuracy of what a private search publishes, beside a single trial."""

    name = "private_search"
    title = "A private search on digits"

    def points(self):
        """All trials, in a list."""
        return [Point(seed) for seed in range(_TRIALS)]

    def run(self, folder, points, *, fraction, jobs, command, inputs):
        """Runs the unfinished trials, one after another, and writes a table.

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
            epochs * -(-len(_digits().x_train) // _BATCH_SIZE),
            result_of=lambda point: run_point(_digits(), point, epochs),
            summary_of=lambda result: f"{100 * result['accuracy']:.1f} %",
            write_results=lambda saved: self._write_results(
                folder, saved, command
            ),
        )

    def _write_results(self, folder, saved, command):
        if not saved["points"]:
            return
        files.write_text(folder / "table.md", table(self.title, saved, command))
        folder_page.write_with_figures(
            folder, {"accuracy": lambda: _figure(self.title, saved)}
        )


@functools.lru_cache(maxsize=1)
def _digits():
    from tf_dpsub import data

    return data.load("digits")


def run_point(digits, point, epochs):
    """Trains a model with hyper-parameters drawn at random, and scores it.

    Args:
        digits: `data.Dataset`.
        point: `Point`.
        epochs: int.

    Returns:
        dict of the score, which has noise, the test accuracy, the
        hyper-parameters and how long it took. They are private, as all trials
        of a search are: the digits are public.
    """
    import keras

    import tf_dpsub

    start = time.monotonic()
    keras.utils.clear_session()
    keras.utils.set_random_seed(point.seed)
    rng = np.random.default_rng(point.seed)
    chosen = {
        "hidden": int(rng.choice([0, 64, 256])),
        "learning_rate": float(np.exp(rng.uniform(*np.log([0.01, 10.0])))),
        "momentum": float(rng.choice([0.0, 0.9])),
        "clip": float(np.exp(rng.uniform(*np.log([0.1, 3.0])))),
    }
    hidden = (chosen["hidden"],) if chosen["hidden"] else ()
    model = tf_dpsub.make_private(
        tf_dpsub.models.mlp(digits.input_shape, hidden, digits.num_classes)
    )
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(
                chosen["learning_rate"], momentum=chosen["momentum"]
            ),
            noise_multiplier=_NOISE_MULTIPLIER,
            l2_norm_clip=chosen["clip"],
            batch_size=_BATCH_SIZE,
            seed=point.seed,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(digits.x_train, digits.y_train, epochs=epochs, verbose=0)
    score = model.evaluate_privately(
        digits.x_train, digits.y_train, noise_multiplier=_SCORE_NOISE
    )["accuracy"].value
    _, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    return {
        "score": score,
        "accuracy": accuracy,
        **chosen,
        "seconds": time.monotonic() - start,
    }


def published_accuracies(results, distribution):
    """Accuracies that a search publishes, at `_LEVELS` of all searches.

    A search draws its trials from the finished ones, and publishes the one with
    the best score. How often that is each of them follows from the distribution
    of the number of trials, without simulation.

    Args:
        results: list of dicts of `run_point`.
        distribution: string, of the number of trials; None for one trial.

    Returns:
        Array of floats.
    """
    by_score = sorted(results, key=lambda r: r["score"])
    levels = np.arange(len(by_score) + 1) / len(by_score)
    if distribution is not None:
        shape = selection.shape_of(distribution)
        levels = [
            selection.probability_of_none_above(q, _MEAN_TRIALS, shape)
            for q in levels
        ]
    shares = np.diff(levels)
    accuracies = np.array([r["accuracy"] for r in by_score])
    order = np.argsort(accuracies)
    reached = np.cumsum(shares[order]) + 1e-9
    places = np.searchsorted(reached, _LEVELS)
    return accuracies[order][np.minimum(places, len(order) - 1)]


def epsilons(steps):
    """ε by what is published, at δ = 1e-5.

    Args:
        steps: int, of a trial.

    Returns:
        dict of floats: of one trial (None), of a search by its distribution,
        and of as many trials as a search expects, all counted ("all").
    """
    import dp_accounting

    from tf_dpsub.accounting import accountants

    rate = _BATCH_SIZE / len(_digits().x_train)
    step = accountants.sampled_gaussian(_NOISE_MULTIPLIER, rate)
    trial = [
        dp_accounting.SelfComposedDpEvent(step, steps),
        accountants.sampled_gaussian(_SCORE_NOISE, 1),
    ]
    of = functools.partial(accountants.composed_epsilon, delta=_DELTA)
    searches = {
        name: of(
            [selection.selection_event(trial, _MEAN_TRIALS, shape)],
            accountant="rdp",
        )
        for name, shape in selection.DISTRIBUTIONS.items()
    }
    return {None: of(trial), **searches, "all": of(trial * _MEAN_TRIALS)}


def table(title, saved, command):
    """The table of all finished trials, in Markdown.

    Args:
        title: string.
        saved: dict of `saved_points.run`.
        command: string that makes it.
    """
    results = list(saved["points"].values())
    accuracies = [r["accuracy"] for r in results]
    spent = epsilons(saved["steps"])
    names = {
        None: "one trial at random",
        "logarithmic": f"{_MEAN_TRIALS} expected trials, logarithmic",
        "geometric": f"{_MEAN_TRIALS} expected trials, geometric",
    }
    lines = [
        *folder_page.heading(title, command),
        f"{len(results)} trials with hyper-parameters at random, of "
        f"{saved['steps']} steps with σ = {_NOISE_MULTIPLIER:g} and batches of "
        f"{_BATCH_SIZE}, and a private score with noise {_SCORE_NOISE:g}. The "
        f"best test accuracy among them is {100 * max(accuracies):.0f} %. "
        "Quantiles of the test accuracy that a search publishes, over all "
        "searches that draw their trials from these.",
        "",
        "| published | ε | lowest 5 % | lower quartile | median | upper "
        "quartile |",
        "|---|---|---|---|---|---|",
    ]
    for distribution, name in names.items():
        published = published_accuracies(results, distribution)
        lines.append(
            f"| {name} | {round_up(spent[distribution])} | "
            + " | ".join(f"{100 * accuracy:.0f} %" for accuracy in published)
            + " |"
        )
    lines.append(
        f"| {_MEAN_TRIALS} trials, all of them counted | "
        f"{round_up(spent['all'])} |  |  |  |  |"
    )
    return "\n".join(lines) + "\n"


def _figure(title, saved):
    """Test accuracies by private scores, of all trials."""
    results = saved["points"].values()
    canvas = figures.new(5, 4, title)
    axes = canvas.subplots()
    figures.tidy(axes)
    axes.plot(
        [100 * r["score"] for r in results],
        [100 * r["accuracy"] for r in results],
        marker="o",
        linestyle="",
        color=figures.BLUE,
    )
    axes.set_xlabel("private score, %")
    axes.set_ylabel("test accuracy, %")
    return canvas
