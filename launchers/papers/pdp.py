"""The experiments of the PDP-SGD paper.

Reference:
    [Zhou, Wu, Banerjee: Bypassing the Ambient Dimension: Private SGD with
    Gradient Subspace Identification, ICLR 2021](
    https://arxiv.org/abs/2007.03813)
"""

import dataclasses
import functools
import itertools
import math

from tf_dpsub.configs import mnist_dpsgd, pdp_fashion_mnist, pdp_mnist
from tf_dpsub.launchers.papers.engine import plots
from tf_dpsub.launchers.papers.engine.trials import (
    Experiment,
    Trial,
    change_subspace,
)
from tf_dpsub.methods import METHODS

_SEEDS = (0, 1, 2)
_UNITS = ("tanh", "ReLU")
_METHODS = {"DP-SGD": "dp", "PDP-SGD": "pdp", "RPDP-SGD": "rpdp"}
_RANDOM_RANK = 800
# Noise multipliers whose spectra Figure 1 shows.
_SPECTRUM_METHODS = {"SGD": 0.0, "DP-SGD, σ = 1": 1.0, "DP-SGD, σ = 2": 2.0}
_PAPER_EPSILON = {
    18: 0.23, 14: 0.30, 10: 0.42, 8: 0.53, 6: 0.72, 4: 1.09, 2: 2.41
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Learning rates and start epoch in the paper's tables for one σ."""

    dp: float
    pdp: float
    start_epoch: int


_MNIST = {
    18: _Rates(0.05, 0.1, 1),
    14: _Rates(0.05, 0.2, 1),
    10: _Rates(0.05, 0.2, 1),
    8: _Rates(0.05, 0.1, 15),
    6: _Rates(0.1, 0.1, 15),
    4: _Rates(0.1, 0.2, 15),
}
_FASHION_MNIST = {
    18: _Rates(0.01, 0.01, 15),
    14: _Rates(0.01, 0.01, 15),
    10: _Rates(0.01, 0.02, 15),
    6: _Rates(0.02, 0.02, 15),
    4: _Rates(0.02, 0.02, 15),
    2: _Rates(0.05, 0.05, 15),
}

# Of both methods alike, at each σ. PDP-SGD projects from the start, or from the
# paper's epoch on: methods and first epochs, by their short names.
_TUNED_RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_TUNED = {"dp": ("DP-SGD", 1), "pdp1": ("PDP-SGD", 1), "pdp15": ("PDP-SGD", 15)}
_TUNED_REFRESH = 10

_UNITS_NOTE = (
    "The paper does not name the units of the network: both tanh and ReLU "
    "units are run."
)
_EPSILON_NOTE = (
    "The paper's ε is that of its own accounting, which takes fixed batches "
    "for Poisson-sampled ones. Ours is of the Poisson sampling that ran."
)
_RANDOM_NOTE = (
    "The paper does not give the learning rate and the first projected epoch "
    "of RPDP-SGD: PDP-SGD's are taken."
)


def mnist(inputs):
    """Accuracy against ε on MNIST: DP-SGD, PDP-SGD and RPDP-SGD."""
    return _against_epsilon(
        "pdp_mnist", "PDP-SGD on MNIST", pdp_mnist.get_config, _MNIST
    )


def fashion_mnist(inputs):
    """Accuracy against ε on Fashion-MNIST: DP-SGD, PDP-SGD and RPDP-SGD."""
    return _against_epsilon(
        "pdp_fashion_mnist",
        "PDP-SGD on Fashion-MNIST",
        pdp_fashion_mnist.get_config,
        _FASHION_MNIST,
    )


def fashion_mnist_tuned(inputs):
    """DP-SGD and PDP-SGD on Fashion-MNIST, tuned over the same rates."""
    trials = []
    for seed, sigma, rate, (short, (method, start)) in itertools.product(
        _SEEDS, _FASHION_MNIST, _TUNED_RATES, _TUNED.items()
    ):
        config = pdp_fashion_mnist.get_config()
        change_subspace(config, update_every=_TUNED_REFRESH)
        rates = _Rates(rate, rate, start)
        trial = _trial(config, "tanh", sigma, method, rates, seed)
        name = f"sigma{sigma}_rate{rate:g}_{short}_seed{seed}"
        trials.append(dataclasses.replace(trial, name=name))
    return Experiment(
        name="pdp_fashion_mnist_tuned",
        title="PDP-SGD on Fashion-MNIST, tuned",
        trials=tuple(trials),
        figures={
            "accuracy": functools.partial(
                plots.accuracy_against_epsilon, best=True
            )
        },
        notes=(
            "Tanh units; the basis is recomputed at every tenth step.",
            "The best is chosen by test accuracy, which is public here; no ε "
            "covers a choice made on private data.",
            _EPSILON_NOTE,
        ),
    )


def _against_epsilon(name, title, base, rates):
    return Experiment(
        name=name,
        title=title,
        trials=tuple(
            _trial(base(), units, sigma, method, rates[sigma], seed)
            for seed, units, sigma, method in itertools.product(
                _SEEDS, _UNITS, rates, _METHODS
            )
        ),
        figures={
            "accuracy": plots.accuracy_against_epsilon,
            **{
                f"training_{units.lower()}": functools.partial(
                    plots.training_curves,
                    panel="σ",
                    labels={"units": units},
                )
                for units in _UNITS
            },
        },
        notes=(_UNITS_NOTE, _EPSILON_NOTE, _RANDOM_NOTE),
    )


def rank(inputs):
    """Accuracy against the rank k on MNIST at σ = 18, k = auto included."""
    ranks = (10, 20, 30, 50, 80, "auto")

    def change(config, k):
        change_subspace(
            config, rank=k, **({"max_rank": 80} if k == "auto" else {})
        )

    return _against_setting(
        "pdp_k", "PDP-SGD on MNIST by the rank k, σ = 18", "k", ranks, change
    )


def public_examples(inputs):
    """Accuracy against the number m of public examples on MNIST at σ = 18."""

    def change(config, m):
        config.public_examples = m

    return _against_setting(
        "pdp_m",
        "PDP-SGD on MNIST by the number m of public examples, σ = 18",
        "m",
        (50, 100, 150),
        change,
    )


def refresh(inputs):
    """Accuracy on MNIST at σ = 18 with a basis renewed every s steps."""

    def change(config, steps):
        change_subspace(config, update_every=steps)

    return _against_setting(
        "pdp_refresh",
        "PDP-SGD on MNIST by the steps s between refreshes, σ = 18",
        "s",
        (1, 10, 20),
        change,
    )


def spectrum(inputs):
    """Eigenvalues of private gradients on MNIST, with SGD and DP-SGD."""
    trials = []
    for method, sigma in _SPECTRUM_METHODS.items():
        config = mnist_dpsgd.get_config()
        config.model = "mlp"
        config.model_kwargs = {"hidden": (128, 128), "activation": "relu"}
        config.noise_multiplier = sigma
        config.learning_rate = 0.1
        if not sigma:
            config.l2_norm_clip = math.inf
        config.recorders = ("private_spectrum",)
        trials.append(
            Trial(
                name=f"sgd_sigma{sigma:g}",
                labels={"method": method, "σ": sigma},
                config=config,
            )
        )
    return Experiment(
        name="pdp_spectrum",
        title="Spectrum of gradients on MNIST",
        trials=tuple(trials),
        figures={"spectrum": plots.spectra},
        notes=(
            "An analysis of private data: the eigenvalues are computed without "
            "noise, and no ε covers them. It shows what the method rests on.",
            "Second moment of the gradients of 1,000 training examples in the "
            "first, the middle and the last epoch; 10,000 private examples, "
            "batch 250, 30 epochs, learning rate 0.1, clip 1 where there is "
            "noise.",
        ),
    )


def _against_setting(name, title, label, values, change):
    """Experiment: PDP-SGD with one setting varied, beside DP-SGD."""
    sigma = 18
    trials = []
    for seed, units in itertools.product(_SEEDS, _UNITS):
        plain = _trial(
            pdp_mnist.get_config(), units, sigma, "DP-SGD", _MNIST[sigma], seed
        )
        trials.append(
            _relabelled(plain, label, "", f"{units.lower()}_dp_seed{seed}")
        )
        for value in values:
            config = pdp_mnist.get_config()
            change(config, value)
            trial = _trial(config, units, sigma, "PDP-SGD", _MNIST[sigma], seed)
            trial_name = f"{units.lower()}_{label}{value}_seed{seed}"
            trials.append(_relabelled(trial, label, value, trial_name))
    return Experiment(
        name=name,
        title=title,
        trials=tuple(trials),
        figures=plots.by_setting(label, panel="units"),
        notes=(_UNITS_NOTE, _EPSILON_NOTE),
    )


def _relabelled(trial, label, value, name):
    labels = {"units": trial.labels["units"], "method": trial.method}
    return dataclasses.replace(trial, name=name, labels=labels | {label: value})


def _trial(config, units, sigma, method, rates, seed):
    """A trial of a method, in a config made for PDP-SGD."""
    config.seed = seed
    config.model_kwargs.activation = units.lower()
    config.noise_multiplier = float(sigma)
    config.learning_rate = rates.pdp
    config.start_epoch = rates.start_epoch
    k = config.subspace_kwargs.rank
    if method == "DP-SGD":
        config.optimizer = METHODS["DP-SGD"].optimizer
        config.learning_rate = rates.dp
        config.start_epoch = 1
        config.subspace = None
        config.subspace_kwargs = {}
        k = ""
    elif method == "RPDP-SGD":
        config.subspace = "RandomSubspace"
        config.subspace_kwargs = {"rank": _RANDOM_RANK}
        k = _RANDOM_RANK
    return Trial(
        name=f"{units.lower()}_sigma{sigma}_{_METHODS[method]}_seed{seed}",
        labels={
            "units": units,
            "σ": sigma,
            "method": method,
            "k": k,
            "learning rate": config.learning_rate,
            "from epoch": "" if method == "DP-SGD" else config.start_epoch,
        },
        config=config,
        paper_epsilon=_PAPER_EPSILON[sigma],
    )
