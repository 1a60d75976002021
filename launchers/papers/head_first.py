"""Head first, and then all layers, by DP-SGD on MNIST.

A head on frozen layers has fewer weights, and so less noise, than the whole
network. A share of the epochs trains it alone, and the others train all.

Reference:
    [Ke et al.: On the Convergence of Differentially-Private Fine-tuning: To
    Linearly Probe or to Fully Fine-tune?, 2024](
    https://arxiv.org/abs/2402.18905)
"""

import dataclasses
import functools
import itertools
import statistics

from tf_dpsub import accounting, files
from tf_dpsub.launchers.papers.engine import saved_points
from tf_dpsub.launchers.reports import folder_page
from tf_dpsub.launchers.terminal import quiet

_DELTA, _EPSILON, _CLIP = 1e-5, 1.0, 1.0
_EPOCHS, _BATCH_SIZE = 4, 600
_HEAD_EPOCHS = (0, 1, 2)
_RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_SEEDS = range(3)


@dataclasses.dataclass(frozen=True)
class Point:
    """One training run.

    Attributes:
        head_epochs: int, epochs that train the head alone.
        learning_rate: float, in all epochs.
        seed: int, of the weights, the batches and the noise.
    """

    head_epochs: int
    learning_rate: float
    seed: int

    @property
    def name(self):
        return (
            f"head_epochs={self.head_epochs} rate={self.learning_rate:g} "
            f"seed={self.seed}"
        )


class HeadFirst:
    """Head first, and then all layers: DP-SGD on MNIST at ε = 1."""

    name = "head_first"
    title = "Head first, and then all layers"

    def points(self):
        """All runs, seed by seed, in a list of `Point`."""
        return [
            Point(head_epochs, rate, seed)
            for seed, head_epochs, rate in itertools.product(
                _SEEDS, _HEAD_EPOCHS, _RATES
            )
        ]

    def run(self, folder, points, *, fraction, jobs, command, inputs):
        """Runs the unfinished points, one after another, and writes a table.

        Args:
            folder: `pathlib.Path`.
            points: list of `Point`, those to run.
            fraction: float, the share of the examples to train on.
            jobs: int, not used.
            command: string, for the table.
            inputs: `papers.Inputs`, not used.

        Returns:
            int, the exit code.

        Raises:
            ValueError: if the folder holds runs of another length.
        """
        quiet.load_tensorflow()
        data = _data(fraction)
        return saved_points.run_each(
            self.title,
            folder,
            points,
            _steps(data),
            result_of=lambda point: run_point(data, point),
            summary_of=lambda result: f"{100 * result['accuracy']:.1f} %",
            write_results=lambda saved: self._write_results(
                folder, saved, command
            ),
        )

    def _write_results(self, folder, saved, command):
        text = table(self.title, self.points(), saved, command)
        files.write_text(folder / "table.md", text)
        folder_page.write(folder)


@functools.lru_cache(maxsize=1)
def _data(fraction):
    from tf_dpsub import data

    loaded = data.load("mnist")
    count = max(1, round(fraction * len(loaded.x_train)))
    return dataclasses.replace(
        loaded, x_train=loaded.x_train[:count], y_train=loaded.y_train[:count]
    )


def run_point(data, point):
    """Trains one network.

    Formal guarantees: both phases are DP-SGD on the same examples with the same
    noise multiplier, and one ledger has the steps of both: ε is that of as many
    steps of one run.

    Args:
        data: with `x_train`, `y_train`, `x_test` and `y_test`.
        point: `Point`.

    Returns:
        dict of the test `accuracy` and of the `epsilon` that was spent.
    """
    import keras

    import tf_dpsub

    keras.utils.clear_session()
    keras.utils.set_random_seed(point.seed)
    plain = tf_dpsub.models.mnist_cnn(data.x_train.shape[1:], 10, "tanh")
    model = tf_dpsub.make_private(plain)
    batch_size = min(_BATCH_SIZE, len(data.x_train))
    noise_multiplier = accounting.noise_multiplier(
        epsilon=_EPSILON,
        delta=_DELTA,
        sampling_rate=batch_size / len(data.x_train),
        steps=_steps(data),
    )

    def fit(phase, epochs):
        model.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(point.learning_rate),
                l2_norm_clip=_CLIP,
                noise_multiplier=noise_multiplier,
                batch_size=batch_size,
                # No phase draws the numbers of another one.
                seed=2 * point.seed + phase,
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(data.x_train, data.y_train, epochs=epochs, verbose=0)

    if point.head_epochs:
        for layer in plain.layers[:-1]:
            layer.trainable = False
        fit(0, point.head_epochs)
        for layer in plain.layers:
            layer.trainable = True
    fit(1, _EPOCHS - point.head_epochs)
    _, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    return {"accuracy": accuracy, "epsilon": model.epsilon(_DELTA, "pld")}


def _steps(data):
    return _EPOCHS * -(-len(data.x_train) // _BATCH_SIZE)


def table(title, points, saved, command):
    """Test accuracies by the epochs of the head alone, and by rate.

    Args:
        title: string.
        points: list of `Point`.
        saved: dict with the results, as `saved_points` has it.
        command: string that makes it.

    Returns:
        string, in Markdown.
    """
    lines = [
        *folder_page.heading(title, command),
        f"MNIST; the network of the PDP-SGD paper with tanh units, batches of "
        f"{_BATCH_SIZE}, {saved['steps']} steps in {_EPOCHS} epochs, C = "
        f"{_CLIP:g}, δ = {_DELTA:g} by PLD. Test accuracy in percent, mean ± "
        "s.d. over seeds; the rate is the same in all epochs.",
        "",
        "| epochs of the head alone | ε | "
        + " | ".join(f"rate {rate:g}" for rate in _RATES)
        + " | seeds |",
        "|---|---|" + "---|" * (len(_RATES) + 1),
    ]
    for head_epochs in _HEAD_EPOCHS:
        cells, epsilons, counts = [], [], []
        for rate in _RATES:
            results = [
                saved["points"][p.name]
                for p in points
                if (p.head_epochs, p.learning_rate) == (head_epochs, rate)
                and p.name in saved["points"]
            ]
            epsilons += [r["epsilon"] for r in results]
            counts.append(len(results))
            cells.append(_accuracy([100 * r["accuracy"] for r in results]))
        if not epsilons:
            continue
        lines.append(
            f"| {head_epochs} | {max(epsilons):.2f} | {' | '.join(cells)} | "
            f"{min(counts)} |"
        )
    return "\n".join(lines) + "\n"


def _accuracy(accuracies):
    if not accuracies:
        return ""
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    return f"{statistics.fmean(accuracies):.1f} ± {spread:.1f}"
