"""Batches by Poisson sampling, once per epoch, and with noise in bands."""

import dataclasses
import itertools

from tf_dpsub.configs import mnist_dpsgd
from tf_dpsub.launchers.papers.engine import plots
from tf_dpsub.launchers.papers.engine.trials import Experiment, Trial

_SEEDS = (0, 1, 2)
_EPSILONS = (1, 2, 4, 8)
_POISSON, _ONCE, _BANDS = "Poisson", "once per epoch", "bands"
# Short names in the names of trials.
_METHODS = {_POISSON: "poisson", _ONCE: "once", _BANDS: "bands"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """How long a run is, and on how much.

    Attributes:
        prefix: string, begins the names of its trials.
        examples, batch_size, epochs: int.
        rates: tuple of floats, learning rates that are tried.
    """

    prefix: str
    examples: int
    batch_size: int
    epochs: int
    rates: tuple

    @property
    def title(self):
        steps = self.epochs * self.examples // self.batch_size
        return f"{self.examples:,} examples, {steps:,} steps"


_RUNS = (
    # Long enough, on few enough examples, for noise to decide.
    _Run(
        prefix="few_",
        examples=10_000,
        batch_size=250,
        epochs=30,
        rates=(0.1, 0.2, 0.5, 1.0, 2.0),
    ),
    _Run(
        prefix="",
        examples=60_000,
        batch_size=600,
        epochs=3,
        rates=(0.5, 1.0),
    ),
)


def mnist(inputs):
    """DP-SGD on MNIST: Poisson, once-per-epoch and banded noise by ε."""
    return Experiment(
        name="mnist_sampling",
        title="DP-SGD on MNIST by sampling and noise",
        trials=tuple(
            Trial(
                name=f"{run.prefix}epsilon{epsilon}_rate{rate:g}"
                f"_{_METHODS[method]}_seed{seed}",
                labels={
                    "data": run.title,
                    "ε": epsilon,
                    "method": method,
                    "learning rate": rate,
                },
                config=_config(run, method, epsilon, rate, seed),
                accountant="pld",
            )
            for seed, run in itertools.product(_SEEDS, _RUNS)
            for epsilon, rate, method in itertools.product(
                _EPSILONS, run.rates, _METHODS
            )
        ),
        figures={"accuracy": _best_accuracies},
        notes=(
            "Batches of 250 of the 10,000 examples, of 600 of the 60,000; the "
            "network of the PDP-SGD paper with tanh units, clip 1. The noise "
            "is found for ε by PLD.",
            "The number of bands is chosen from the numbers of examples and "
            "steps, the batch size, ε and δ.",
            "The figure has the best learning rate of each method and ε, by "
            "test accuracy, which is public here.",
        ),
    )


def _best_accuracies(results):
    return plots.accuracy_against_epsilon(results, best=True, panel="data")


def _config(run, method, epsilon, rate, seed):
    config = mnist_dpsgd.get_config()
    config.private_examples = run.examples
    config.batch_size, config.epochs = run.batch_size, run.epochs
    config.noise_multiplier, config.epsilon = None, float(epsilon)
    config.learning_rate, config.seed = rate, seed
    if method == _ONCE:
        config.sampling = "once_per_epoch"
    if method == _BANDS:
        config.bands = "auto"
    return config
