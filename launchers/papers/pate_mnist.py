"""PATE on MNIST: teachers vote on public images, from which a student learns.

Reference:
    [Papernot, Song, Mironov, Raghunathan, Talwar, Erlingsson: Scalable Private
    Learning with PATE, ICLR 2018](https://arxiv.org/abs/1802.08908)
"""

import dataclasses
import functools
import statistics
import time

import numpy as np

from tf_dpsub import files
from tf_dpsub.accounting.statement import round_up
from tf_dpsub.launchers.papers import published
from tf_dpsub.launchers.papers.engine import saved_points
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.launchers.terminal import durations, quiet

_DELTA = 1e-5
_SEEDS = range(5)
# The paper's teachers, threshold, noise and queries. The answers are bounded,
# so that ε is known beforehand.
_TEACHERS, _THRESHOLD, _THRESHOLD_NOISE, _NOISE = 250, 200, 150, 40
_QUERIES, _ANSWERS = 640, 286
# The first images of the test split are public, the others test the student.
_PUBLIC = 9000
_STUDENT_STEPS = 1200
_REGULARIZATION = 0.01
_CHUNK = 500


@dataclasses.dataclass(frozen=True)
class Point:
    """One run: teachers, their answers, and a student.

    Attributes:
        seed: int, of the parts of teachers, the noise and the student.
    """

    seed: int

    @property
    def name(self):
        return f"seed{self.seed}"


class PateMnist:
    """PATE with Confident-GNMax on MNIST, beside the published accuracy."""

    name = "pate_mnist"
    title = "PATE on MNIST"

    def points(self):
        """All runs, in a list."""
        return [Point(seed) for seed in _SEEDS]

    def run(self, folder, points, *, fraction, jobs, command, inputs):
        """Runs the unfinished points, one after another, and writes a table.

        Args:
            folder: `pathlib.Path`.
            points: list of `Point`, those to run.
            fraction: float, the share of the student's steps to make.
            jobs: int, not used.
            command: string, for the table.
            inputs: `papers.Inputs`, not used.

        Returns:
            int, the exit code.

        Raises:
            ValueError: if the folder holds runs of another length.
        """
        steps = max(1, round(fraction * _STUDENT_STEPS))
        quiet.load_tensorflow()

        return saved_points.run_each(
            self.title,
            folder,
            points,
            steps,
            result_of=lambda point: run_point(_images(), point, folder, steps),
            summary_of=lambda result: f"{100 * result['student']:.2f} %",
            write_results=lambda saved: self._write_results(
                folder, saved, command
            ),
        )

    def _write_results(self, folder, saved, command):
        if not saved["points"]:
            return
        files.write_text(
            folder / "table.md", _table(self.title, saved, command)
        )
        folder_page.write_with_figures(
            folder, {"accuracy": lambda: _figure(self.title, saved)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Private and public images, with features of fixed wavelets.

    Attributes:
        private: float16 array `[examples, features]`, private.
        private_labels: int array `[examples]`, private.
        public: float32 array `[images, height, width, channels]`.
        public_features: float32 array `[images, features]`.
        public_labels: int array `[images]`, to measure accuracy alone.
        split: int, number of images that the student learns from; the others
            test it.
    """

    private: np.ndarray
    private_labels: np.ndarray
    public: np.ndarray
    public_features: np.ndarray
    public_labels: np.ndarray
    split: int


@functools.lru_cache(maxsize=1)
def _images():
    """The images of MNIST: `Images`."""
    from tf_dpsub import data

    loaded = data.load("mnist")
    print("Computing features of all images.", flush=True)
    of = _features()
    return Images(
        private=of(loaded.x_train),
        private_labels=loaded.y_train,
        public=loaded.x_test,
        public_features=of(loaded.x_test).astype(np.float32),
        public_labels=loaded.y_test,
        split=_PUBLIC,
    )


def _features():
    """A function of images that returns float16 `[images, features]`."""
    import tensorflow as tf

    from tf_dpsub import layers

    scattering = layers.Scattering2D()

    @tf.function(reduce_retracing=True)
    def of(images):
        return tf.reshape(scattering(images), [len(images), -1])

    return lambda images: np.concatenate(
        [
            of(tf.constant(images[k : k + _CHUNK])).numpy().astype(np.float16)
            for k in range(0, len(images), _CHUNK)
        ]
    )


def run_point(images, point, folder, steps):
    """Asks teachers, once for all, and trains a student on their answers.

    Args:
        images: `Images`.
        point: `Point`.
        folder: `pathlib.Path`, which keeps the ledger and the answers. The
            votes are kept nowhere.
        steps: int, of the student.

    Returns:
        dict that JSON can hold.
    """
    from tf_dpsub.launchers.papers.engine import consistency_student

    start = time.monotonic()
    asked = _answers(images, point, folder)
    labels = np.array(asked["labels"])
    answered = np.flatnonzero(labels >= 0)
    public, test = slice(None, images.split), slice(images.split, None)
    student = consistency_student.train(
        images.public[answered],
        labels[answered],
        images.public[public],
        _classes(images),
        steps=steps,
        seed=point.seed,
    )
    outputs = student.predict(images.public[test], verbose=0)
    scaled = _scaling(images)
    linear = _ridge(
        scaled(images.public_features[answered]),
        labels[answered],
        _classes(images),
    )

    def accuracy(guesses, of):
        return float(np.mean(guesses == images.public_labels[of]))

    return {
        "answered": len(answered),
        "right": accuracy(labels[answered], answered),
        "student": accuracy(outputs.argmax(1), test),
        "linear": accuracy(
            linear(scaled(images.public_features[test])).argmax(1), test
        ),
        "teacher": asked["teacher"],
        "epsilon": asked["epsilon"],
        "data_dependent_epsilon": asked["data_dependent_epsilon"],
        "seconds": time.monotonic() - start,
    }


def _answers(images, point, folder):
    """The answers of teachers, from a file where they were given before.

    A run that was stopped after its ledger was charged, and before its answers
    were written, has no budget left: its folder has to be removed.
    """
    from tf_dpsub import accounting, pate

    file = folder / f"answers_{point.name}.json"
    if file.exists():
        return files.read_json(file)
    ledger = accounting.PrivacyLedger(folder / f"ledger_{point.name}.json")
    aggregator = pate.ConfidentGNMax(
        teachers=_TEACHERS,
        classes=_classes(images),
        examples=len(images.private),
        threshold=_THRESHOLD,
        threshold_noise=_THRESHOLD_NOISE,
        noise=_NOISE,
        epsilon=_planned_epsilon(),
        delta=_DELTA,
        ledger=ledger,
        seed=point.seed,
    )
    votes = teachers_votes(images, point.seed)
    labels = aggregator.aggregate(votes, answers=_ANSWERS)
    truth = images.public_labels[: len(votes), None]
    secret = aggregator.data_dependent_epsilon(_DELTA)
    asked = {
        "labels": labels.tolist(),
        # Of private votes, as the data-dependent ε: MNIST is public.
        "teacher": float(np.mean(votes == truth)),
        "epsilon": ledger.epsilon(_DELTA),
        "data_dependent_epsilon": secret.epsilon,
    }
    files.write_json(file, asked)
    files.write_text(
        folder / f"privacy_{point.name}.txt",
        accounting.statement(ledger, delta=_DELTA, model_name="student"),
    )
    print(f"{point.name}: answers; on these votes alone {secret}", flush=True)
    return asked


def _planned_epsilon():
    """The budget: that of all queries and of as many answers as may be."""
    import dp_accounting

    from tf_dpsub.accounting import accountants

    gaussian = accountants.sampled_gaussian
    spent = accountants.composed_epsilon(
        [
            dp_accounting.SelfComposedDpEvent(event, count)
            for event, count in (
                (gaussian(_THRESHOLD_NOISE, 1), _QUERIES),
                (gaussian(_NOISE / 2**0.5, 1), _ANSWERS),
            )
        ],
        delta=_DELTA,
    )
    return spent * (1 + 1e-9)


def teachers_votes(images, seed):
    """Votes of all teachers on the queries, the first public images.

    Each teacher is a ridge regression on its own examples. Features are scaled
    by public images.

    Args:
        images: `Images`.
        seed: int, of the parts.

    Returns:
        Int array `[queries, teachers]`, private.
    """
    from tf_dpsub import pate

    scaled = _scaling(images)
    queries = scaled(images.public_features[:_QUERIES])
    parts = pate.disjoint_parts(len(images.private), _TEACHERS, seed)
    return np.stack(
        [
            _ridge(
                scaled(images.private[part]),
                images.private_labels[part],
                _classes(images),
            )(queries).argmax(1)
            for part in parts
        ],
        axis=1,
    )


def _classes(images):
    """Number of classes, of the public images: it is public."""
    return int(images.public_labels.max()) + 1


def _scaling(images):
    """A function that centres and scales features by public images."""
    public = images.public_features[: images.split]
    mean, deviation = public.mean(0), public.std(0)
    # Halfway between equal deviations and those that features have.
    scale = np.sqrt(np.maximum(deviation, 1e-6) * deviation.mean())
    scale *= np.sqrt(public.shape[1])
    return lambda features: (features - mean) / scale


def _ridge(features, labels, classes):
    """Ridge regression on one-hot labels: a function of features."""
    gram = features @ features.T + 1
    penalty = _REGULARIZATION * np.trace(gram) / len(gram)
    solution = np.linalg.solve(
        gram + penalty * np.eye(len(gram)),
        np.eye(classes)[labels] - 1 / classes,
    )
    return lambda others: (others @ features.T + 1) @ solution


def _table(title, saved, command):
    results = saved["points"]
    (paper,) = published.PATE
    students = [r["student"] for r in results.values()]
    lines = folder_page.heading(title, command)
    lines += [
        f"The student names {_mean(students)} % of {10_000 - _PUBLIC:,} test "
        f"images, with ε = {_largest(results, 'epsilon')} at δ = {_DELTA:g} "
        f"whatever the votes are. Published: {paper.accuracy:g} % with a "
        f"data-dependent ε of {paper.epsilon:g} ([{paper.what}]"
        f"({paper.source})).",
        "",
        f"{_TEACHERS} teachers, each a ridge regression on the scattering "
        f"coefficients of its own examples; {_QUERIES} queries, of which at "
        f"most {_ANSWERS} are answered; T = {_THRESHOLD}, σ₁ = "
        f"{_THRESHOLD_NOISE}, σ₂ = {_NOISE}. The first {_PUBLIC:,} test images "
        "are public, without labels. The student is a convolutional network "
        "by FixMatch on them and the answers (the paper's: a GAN); the linear "
        "student is a ridge regression on the answers alone. Regularisation "
        "and scaling of teachers, and the student, were chosen by looking at "
        "labels of public and test images: no ε covers this choice. The "
        "data-dependent ε is computed from private votes, **not to be "
        "published** but for data that are public, as these are.",
    ]
    if saved["steps"] != _STUDENT_STEPS:
        share = saved["steps"] / _STUDENT_STEPS
        lines += ["", f"Shortened: {share:g} of the student's steps."]
    lines += [
        "",
        "| run | a teacher | answered | of these right | student | linear "
        "student | ε | data-dependent ε, not to be published | time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in sorted(results.items()):
        cells = [
            name,
            f"{100 * result['teacher']:.1f}",
            str(result["answered"]),
            f"{100 * result['right']:.1f}",
            f"{100 * result['student']:.1f}",
            f"{100 * result['linear']:.1f}",
            round_up(result["epsilon"]),
            round_up(result["data_dependent_epsilon"]),
            durations.text(result["seconds"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(shares):
    text = f"{100 * statistics.fmean(shares):.2f}"
    if len(shares) > 1:
        text += f" ± {100 * statistics.stdev(shares):.2f}"
    return text


def _largest(results, field):
    return round_up(max(r[field] for r in results.values()))


def _figure(title, saved):
    """Accuracies of all runs, beside the published one."""
    results = saved["points"]
    canvas = figures.new(6, 3.6, title)
    axes = canvas.subplots()
    figures.tidy(axes)
    kinds = {
        "teacher": "a teacher",
        "linear": "linear student",
        "right": "answers",
        "student": "student",
    }
    for place, kind in enumerate(kinds):
        values = [100 * r[kind] for r in results.values()]
        axes.plot(
            [place] * len(values),
            values,
            marker="o",
            linestyle="",
            color=figures.BLUE,
        )
    (paper,) = published.PATE
    axes.axhline(
        paper.accuracy,
        color=figures.RED,
        linestyle="--",
        label="published student",
    )
    axes.set_xticks(range(len(kinds)), kinds.values())
    axes.set_ylabel("accuracy, %")
    canvas.legend(loc="outside right upper", frameon=False)
    return canvas
