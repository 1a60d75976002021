"""Shows in how many dimensions the gradients of a private run lie.

    tf-dpsub spectrum --config=configs/digits_dpsgd.py \\
        --workdir=out/spectrum --k=20 --ranks=5,20

It trains as the config says and keeps the mean clipped gradients of steps. It
computes their largest singular values and how fast these decay. Then it trains
again, from the same start, with gradients projected on the first directions.
`report.html`, `table.md` and figures are written to the workdir. The same
command goes on where it was interrupted. `--gradients=FOLDER` takes gradients
of an earlier run; `--dry_run` says what would be done, and what the first run
will cost.

The analysis follows Li et al. 2022. Gradients and directions come from private
data without noise: no epsilon covers them, and nothing in the workdir may be
released.
"""

import copy
import dataclasses
import math
import pathlib
import statistics

import numpy as np
from absl import flags
from matplotlib import colormaps, ticker

from tf_dpsub import analysis, files
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.launchers.terminal import program
from tf_dpsub.launchers.terminal.program import DRY_RUN, WORKDIR
from tf_dpsub.launchers.training import config_flag, run_directory

_GRADIENTS = flags.DEFINE_string(
    "gradients", None, "A folder with gradients of a run of this config."
)
_EVERY = flags.DEFINE_integer(
    "every", 1, "Keep the gradient of one in so many steps."
)
_MAX_GIGABYTES = flags.DEFINE_float(
    "max_gigabytes", 20.0, "Most space that the gradients may take on disk."
)
_K = flags.DEFINE_integer("k", 100, "Number of singular values.")
_ITERATIONS = flags.DEFINE_integer(
    "iterations", 10, "Number of orthogonal iterations."
)
_RANKS = flags.DEFINE_list(
    "ranks", ["10", "20", "100"], "Numbers of directions to train again in."
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 1, "Number of runs with each, with fresh noise."
)
# Parts of the run whose spectra are compared.
_WINDOWS = 3
_ITERATIONS_SHOWN = (1, 2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A study of the spectrum of one run's gradients.

    Attributes:
        config: `ml_collections.ConfigDict` of a run of DP-SGD.
        folder: `pathlib.Path`, for all files.
        gradients: string, a folder with gradients; None to record them.
        every: int, keeps the gradient of one in so many steps.
        max_bytes: int, the most that gradients may take on disk.
        k: int, number of singular values.
        iterations: int, number of orthogonal iterations.
        ranks: tuple of int, numbers of directions to train again in.
        repeats: int, number of runs for each rank, from the same start, with
            fresh batches and noise.
    """

    config: object
    folder: pathlib.Path
    gradients: str | None = None
    every: int = 1
    max_bytes: int = 20 * 10**9
    k: int = 100
    iterations: int = 10
    ranks: tuple = (10, 20, 100)
    repeats: int = 1

    def __post_init__(self):
        for name in ("every", "k", "iterations", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Expected --{name} >= 1, got {getattr(self, name)}."
                )
        if self.config.optimizer != "DPSGD":
            raise ValueError(
                "Expected a config of DPSGD, whose gradients are analysed, "
                f"got {self.config.optimizer}."
            )
        out_of_range = [k for k in self.ranks if not 1 <= k <= self.k]
        if out_of_range:
            raise ValueError(
                f"Expected ranks from 1 to k = {self.k}, got {self.ranks}."
            )
        if self.gradients is not None:
            # Raises before anything is trained.
            analysis.GradientStore(self.gradients)

    @property
    def _iterations_shown(self):
        return [
            *(n for n in _ITERATIONS_SHOWN if n < self.iterations),
            self.iterations,
        ]

    def run(self, command):
        """Runs the unfinished parts, and writes table and figures."""
        base_result = self._record()
        store = analysis.GradientStore(
            self.gradients or self.folder / "record" / "gradients"
        )
        spectrum = self._decompose(store)
        outcomes = self._train_again(base_result)
        self._write(spectrum, store, base_result, outcomes, command)

    def check(self):
        """Checks settings that would otherwise fail after the first run.

        Raises:
            ValueError: if that run has fewer gradients than `k`.
        """
        from tf_dpsub.launchers.training import objects

        if self.gradients is None:
            examples = len(objects.dataset(self.config).y_train)
            steps = math.ceil(examples / self.config.batch_size)
            count = -(-self.config.epochs * steps // self.every)
        else:
            count = analysis.GradientStore(self.gradients).shape[0]
        if self.k > count:
            raise ValueError(
                f"Expected --k <= {count}, the number of gradients that are "
                f"kept, got {self.k}. Give --k={count} or less."
            )

    def announce(self):
        """Prints what `run` would do, and measures a step; trains nothing."""
        from tf_dpsub.launchers.training import training_run

        training_run.announce(
            self._recording(), self.folder / "record", resume=True
        )
        source = self.gradients or (
            f"one in {self.every} steps is kept, in "
            f"{self.max_bytes / 1e9:g} GB at most"
        )
        print(f"{'gradients':<10} {source}; k = {self.k}")
        ranks = ", ".join(map(str, self.ranks))
        print(
            f"{'again':<10} {(len(self.ranks) + 1) * self.repeats} more runs "
            f"of this kind: in {ranks} and in all directions, {self.repeats} "
            "each"
        )

    def _record(self):
        """Trains as the config says; records gradients if none are given."""
        return _train(self._recording(), self.folder / "record")

    def _recording(self):
        config = copy.deepcopy(self.config)
        if self.gradients is None:
            config.recorders = (*config.recorders, "private_gradients")
            config.private_gradients_kwargs = {
                "every": self.every,
                "dtype": "float16",
                "max_bytes": self.max_bytes,
            }
        return config

    def _decompose(self, store):
        """Computes singular values and directions; writes `spectrum.npz`."""
        file = self.folder / "spectrum.npz"
        rows, columns = store.shape
        made_of = f"{rows} gradients in {store.folder.resolve()}, "
        made_of += f"k = {self.k}, {self.iterations} iterations"
        if file.exists():
            with np.load(file) as arrays:
                if str(arrays["made_of"]) == made_of:
                    return {k: arrays[k] for k in arrays if k != "directions"}
                # Runs in this folder use its directions.
                raise ValueError(
                    f"Expected a new workdir, got {self.folder}, which holds "
                    f"the spectrum of {arrays['made_of']}, not of {made_of}."
                )
        print(f"decomposing {rows:,} gradients of {columns:,} numbers")
        decomposition = analysis.top_singular_values(
            store, self.k, iterations=self.iterations, directions=True
        )
        stack = (
            store
            if decomposition.gram is None
            else _with_gram(decomposition.gram)
        )
        spectrum = {
            "made_of": made_of,
            "values": decomposition.singular_values,
            "energy": decomposition.energy,
            "windows": self._of_windows(stack),
            "by_iterations": [
                analysis.top_singular_values(
                    stack, self.k, iterations=n
                ).singular_values
                for n in self._iterations_shown
            ],
        }
        files.replace(
            file,
            lambda path: np.savez(
                path, directions=decomposition.directions, **spectrum
            ),
        )
        return spectrum

    def _of_windows(self, stack):
        """Singular values of the first, the middle and the last gradients."""
        edges = np.linspace(0, stack.shape[0], _WINDOWS + 1).astype(int)
        count = min(self.k, int(np.diff(edges).min()))
        return [
            analysis.top_singular_values(
                stack,
                count,
                iterations=self.iterations,
                rows=slice(int(start), int(stop)),
            ).singular_values
            for start, stop in zip(edges, edges[1:])
        ]

    def _train_again(self, base_result):
        """Trains again in the first directions, for each number of them.

        Returns:
            dict from k, or `None` for all dimensions, to the accuracies of the
            repeats.
        """
        outcomes = {}
        for k in (*self.ranks, None):
            for repeat in range(self.repeats):
                config = copy.deepcopy(self.config)
                # The same noise. The directions are private, so these runs
                # are not private, and no budget applies.
                config.epsilon = None
                config.noise_multiplier = base_result["noise_multiplier"]
                name = f"all_{repeat}"
                if k is not None:
                    config.optimizer = "ProjectedDPSGD"
                    config.optimizer_kwargs = {"noise": "ambient"}
                    config.subspace = "FixedSubspace"
                    config.subspace_kwargs = {
                        "basis": str(self.folder / "spectrum.npz"),
                        "rank": k,
                    }
                    name = f"k{k}_{repeat}"
                result = _train(config, self.folder / "again" / name)
                outcomes.setdefault(k, []).append(result["test_accuracy"])
        return outcomes

    def _write(self, spectrum, store, base_result, outcomes, command):
        fit = analysis.decay_exponent(spectrum["values"])
        text = _table(
            self, spectrum, fit, store, base_result, outcomes, command
        )
        files.write_text(self.folder / "table.md", text)
        folder_page.write_with_figures(
            self.folder,
            {
                "spectrum": lambda: _spectrum_figure(spectrum, fit),
                "spectra": lambda: _spectra_figure(
                    spectrum, self._iterations_shown
                ),
                "accuracy": lambda: _accuracy_figure(outcomes),
            },
        )
        print(text)


def _with_gram(gram):
    """A small matrix with the same inner products of rows."""
    squares, vectors = np.linalg.eigh(gram)
    return vectors * np.sqrt(np.maximum(squares, 0.0))


def _train(config, folder):
    import keras

    from tf_dpsub.launchers.training import training_run

    # Frees earlier models: a study trains many, with large bases.
    keras.utils.clear_session()
    return training_run.train(config, folder, resume=True, results_only=True)


def _table(study, spectrum, fit, store, base_result, outcomes, command):
    rows, columns = store.shape
    share = np.sum(spectrum["values"] ** 2) / spectrum["energy"]
    count = len(spectrum["values"])
    low, high = fit.interval
    lines = [
        *folder_page.heading(
            f"Spectrum of gradients: {study.config.dataset}, "
            f"{study.config.model}",
            command,
        ),
        f"Singular values decay as rank^-{fit.exponent:.3f} (95 % interval of "
        f"the fit: {low:.3f} to {high:.3f}; ranks 1 to {count}). The first "
        f"{count} directions hold {100 * share:.1f} % of the energy.",
        "",
        "An analysis of private data: no ε covers what is here.",
        "",
        f"{rows:,} mean clipped gradients of {columns:,} weights, along "
        f"{base_result['steps']:,} steps of DP-SGD with σ = "
        f"{base_result['noise_multiplier']:.4g}, whose test accuracy is "
        f"{100 * base_result['test_accuracy']:.1f} %.",
        "",
        "Trained again from the same start, with the gradient projected on "
        "the first directions after clipping, and as much noise in all "
        "dimensions:",
        "",
        "| directions | test accuracy | mean |",
        "|---|---|---|",
    ]
    for k, accuracies in outcomes.items():
        each = ", ".join(f"{100 * a:.1f}" for a in accuracies)
        mean = 100 * statistics.fmean(accuracies)
        lines.append(f"| {k or 'all'} | {each} | {mean:.1f} |")
    return "\n".join(lines) + "\n"


def _spectrum_figure(spectrum, fit):
    """Figure of singular values with the fit, their density and energy."""
    canvas = figures.new(12, 4, "Singular values of mean clipped gradients")
    grid = canvas.subplots(1, 3)
    values = spectrum["values"]
    ranks = np.arange(1, len(values) + 1)
    low, high = fit.interval
    grid[0].loglog(ranks, values, color=figures.BLUE, linewidth=2)
    grid[0].loglog(
        ranks,
        fit(ranks),
        color=figures.ORANGE,
        linestyle="--",
        label=f"rank^-{fit.exponent:.2f} ({low:.2f} to {high:.2f})",
    )
    grid[0].legend(frameon=False)
    grid[0].set_xlabel("rank")
    grid[0].set_ylabel("singular value")
    figures.subtitle(grid[0], "by rank")
    positive = values[values > 0]
    bins = np.geomspace(positive[-1], positive[0], 21)
    grid[1].hist(positive, bins, density=True, color=figures.BLUE)
    grid[1].set_xscale("log")
    grid[1].set_yscale("log")
    grid[1].set_xlabel("singular value")
    grid[1].set_ylabel("density")
    figures.subtitle(grid[1], f"density of the first {len(values)}")
    share = np.cumsum(values**2) / spectrum["energy"]
    grid[2].plot(ranks, share, color=figures.BLUE, linewidth=2)
    grid[2].set_ylim(0, 1)
    grid[2].yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    grid[2].set_xlabel("directions")
    figures.subtitle(grid[2], "share of the energy")
    for axes in grid:
        _tidy(axes)
    return canvas


def _tidy(axes):
    """Labels only powers of ten on logarithmic axes."""
    figures.tidy(axes)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_minor_formatter(ticker.NullFormatter())


def _spectra_figure(spectrum, iterations):
    """Figure of spectra by part of the run and by number of iterations."""
    canvas = figures.new(9, 4, "Singular values of mean clipped gradients")
    grid = canvas.subplots(1, 2, sharey=True)
    parts = ["first", *["middle"] * (_WINDOWS - 2), "last"]
    for axes, name, spectra, labels in (
        (grid[0], "by part of the run", spectrum["windows"], parts),
        (
            grid[1],
            "by number of iterations",
            spectrum["by_iterations"],
            iterations,
        ),
    ):
        shades = colormaps["viridis"](np.linspace(0.85, 0.1, len(spectra)))
        for values, label, colour in zip(spectra, labels, shades):
            axes.loglog(
                range(1, len(values) + 1), values, color=colour, label=label
            )
        figures.subtitle(axes, name)
        _tidy(axes)
        axes.set_xlabel("rank")
        axes.legend(frameon=False)
    grid[0].set_ylabel("singular value")
    return canvas


def _accuracy_figure(outcomes):
    """Figure of accuracy by number of directions, with all repeats."""
    canvas = figures.new(6, 4, "Trained again in the first directions")
    axes = canvas.subplots()
    figures.tidy(axes)
    names = [str(k or "all") for k in outcomes]
    for place, accuracies in enumerate(outcomes.values()):
        axes.plot(
            [place] * len(accuracies),
            accuracies,
            color=figures.BLUE,
            marker="o",
            linestyle="none",
            alpha=0.7,
        )
    means = [statistics.fmean(a) for a in outcomes.values()]
    axes.plot(range(len(names)), means, color=figures.BLUE, linewidth=1)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("directions")
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    return canvas


def _parse_rank(text):
    if not text.strip().isdecimal():
        raise ValueError(
            f"Expected --ranks of whole numbers, such as 10,20, got {text!r}."
        )
    return int(text)


def main():
    """Runs the study that the flags describe."""
    config = config_flag.begin()
    if not 0 < _MAX_GIGABYTES.value < math.inf:
        raise ValueError(
            "Expected --max_gigabytes > 0, a number, got "
            f"{_MAX_GIGABYTES.value}."
        )
    study = Study(
        config=config,
        folder=pathlib.Path(WORKDIR.value),
        gradients=_GRADIENTS.value,
        every=_EVERY.value,
        max_bytes=int(1e9 * _MAX_GIGABYTES.value),
        k=_K.value,
        iterations=_ITERATIONS.value,
        ranks=tuple(map(_parse_rank, _RANKS.value)),
        repeats=_REPEATS.value,
    )
    run_directory.require_own(study.folder, "record")
    study.check()
    if DRY_RUN.value:
        return study.announce()
    try:
        study.run(program.command("spectrum"))
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.")
        raise


def run():
    """Runs `tf-dpsub spectrum`."""
    config_flag.run(main)


if __name__ == "__main__":
    run()
