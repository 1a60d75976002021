"""The spectrum of gradients, Figure 1 of the PDP-SGD paper.

Reference:
    [Zhou, Wu, Banerjee: Bypassing the Ambient Dimension: Private SGD with
    Gradient Subspace Identification, ICLR 2021](
    https://arxiv.org/abs/2007.03813)
"""

import math

from configs import mnist_dpsgd
from launchers.experiments import plots
from launchers.experiments.trials import Experiment, Trial

_METHODS = {"SGD": 0.0, "DP-SGD, σ = 1": 1.0, "DP-SGD, σ = 2": 2.0}


def spectrum(inputs):
    """Eigenvalues of private gradients on MNIST, with SGD and DP-SGD."""
    trials = []
    for method, sigma in _METHODS.items():
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
