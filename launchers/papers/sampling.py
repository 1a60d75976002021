"""Batches by Poisson sampling, once per epoch, and with noise in bands."""

import itertools

from tf_dpsub.configs import mnist_dpsgd
from tf_dpsub.launchers.papers.engine import plots
from tf_dpsub.launchers.papers.engine.trials import Experiment, Trial

_SEEDS = (0, 1, 2)
_EPSILONS = (1, 2, 4, 8)
_RATES = (0.5, 1.0)
_EXAMPLES, _BATCH_SIZE, _EPOCHS = 60_000, 600, 3
_POISSON, _ONCE, _BANDS = "Poisson", "once per epoch", "bands"
# Short names in the names of trials.
_METHODS = {_POISSON: "poisson", _ONCE: "once", _BANDS: "bands"}


def mnist(inputs):
    """DP-SGD on MNIST: Poisson, once-per-epoch and banded noise by ε."""
    return Experiment(
        name="mnist_sampling",
        title="DP-SGD on MNIST by sampling and noise",
        trials=tuple(
            Trial(
                name=f"epsilon{epsilon}_rate{rate:g}_{_METHODS[method]}"
                f"_seed{seed}",
                labels={
                    "ε": epsilon,
                    "method": method,
                    "learning rate": rate,
                },
                config=_config(method, epsilon, rate, seed),
                accountant="pld",
            )
            for seed, epsilon, rate, method in itertools.product(
                _SEEDS, _EPSILONS, _RATES, _METHODS
            )
        ),
        figures={"accuracy": _best_accuracies},
        notes=(
            f"All {_EXAMPLES:,} examples, batches of {_BATCH_SIZE}, {_EPOCHS} "
            "epochs; the network of the PDP-SGD paper with tanh units, clip 1. "
            "The noise is found for ε by PLD.",
            "The number of bands is chosen from the numbers of examples and "
            "steps, the batch size, ε and δ.",
            "The figure has the better learning rate of each method and ε, by "
            "test accuracy, which is public here.",
        ),
    )


def _best_accuracies(results):
    return plots.accuracy_against_epsilon(results, best=True)


def _config(method, epsilon, rate, seed):
    config = mnist_dpsgd.get_config()
    config.private_examples = _EXAMPLES
    config.batch_size, config.epochs = _BATCH_SIZE, _EPOCHS
    config.noise_multiplier, config.epsilon = None, float(epsilon)
    config.learning_rate, config.seed = rate, seed
    if method == _ONCE:
        config.sampling = "once_per_epoch"
    if method == _BANDS:
        config.bands = "auto"
    return config
