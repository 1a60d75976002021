"""All methods side by side, on a data set that takes a minute."""

import functools
import itertools

from tf_dpsub.configs import digits_dpsgd
from tf_dpsub.launchers.papers.engine import plots
from tf_dpsub.launchers.papers.engine.trials import Experiment, Trial
from tf_dpsub.methods import METHODS

_SEEDS = (0, 1, 2)
_EPSILONS = (0.5, 2, 8)
_RATES = (0.02, 0.1, 0.5)
_PUBLIC = 238
_RANK, _CARRIER_RANK = 50, 8
# Short name in the names of trials, and arguments of the optimizer.
_METHODS = {
    "DP-SGD": ("dp", {}),
    "PDP-SGD": ("pdp", {}),
    "B-GEP": ("bgep", {}),
    "GEP": ("gep", {"residual_norm_clip": 0.2}),
    "RGP": ("rgp", {"warmup_steps": 20}),
}
_POWERSGD = {"DP-PowerSGD": ("power", {"rank": _CARRIER_RANK})}
_PRECISIONS = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
_PRECISION_SEEDS = range(5)


def _config(name, kwargs, epsilon, rate, seed):
    method = METHODS[name]
    config = digits_dpsgd.get_config()
    config.public_examples = _PUBLIC
    config.optimizer = method.optimizer
    config.optimizer_kwargs = method.kwargs | kwargs
    if method.needs_carriers:
        config.reparametrize = {"rank": _CARRIER_RANK}
    if method.needs_subspace:
        config.subspace = "PublicSubspace"
        config.subspace_kwargs = {"rank": _RANK, "method": "gram"}
    config.epsilon = float(epsilon)
    config.learning_rate = rate
    config.seed = seed
    return config


def methods(inputs):
    """All methods on digits at ε = 0.5, 2, 8, each with its best rate."""
    trials = []
    for seed, epsilon, rate, method in itertools.product(
        _SEEDS, _EPSILONS, _RATES, _METHODS
    ):
        short, kwargs = _METHODS[method]
        trials.append(
            Trial(
                name=f"epsilon{epsilon:g}_rate{rate:g}_{short}_seed{seed}",
                labels={
                    "ε": epsilon,
                    "method": method,
                    "learning rate": rate,
                },
                config=_config(method, kwargs, epsilon, rate, seed),
            )
        )
    return Experiment(
        name="digits_methods",
        title="All methods on scikit-learn's digits",
        trials=tuple(trials),
        figures={
            "accuracy": functools.partial(
                plots.accuracy_against_epsilon, best=True
            )
        }
        | {
            f"training_{rate:g}": functools.partial(
                plots.training_curves,
                panel="ε",
                labels={"learning rate": rate},
            )
            for rate in _RATES
        },
        notes=(
            f"{_PUBLIC} of the training examples are public, with their "
            f"labels; the 1,200 others are private. k = {_RANK}, carriers of "
            f"rank {_CARRIER_RANK}, clip 1 (residuals 0.2), 30 epochs.",
            "The figure of accuracies has the best learning rate of each "
            "method and ε, by test accuracy, which is public here.",
        ),
    )


def precision(inputs):
    """Accuracy of all methods in bfloat16 and in float32, digits, ε = 2."""
    trials = []
    for seed, precision, (method, (short, kwargs)) in itertools.product(
        _PRECISION_SEEDS, _PRECISIONS, (_METHODS | _POWERSGD).items()
    ):
        config = _config(method, kwargs, 2, 0.1, seed)
        config.dtype_policy = _PRECISIONS[precision]
        trials.append(
            Trial(
                name=f"{short}_{precision}_seed{seed}",
                labels={"method": method, "precision": precision},
                config=config,
            )
        )
    return Experiment(
        name="digits_precision",
        title="All methods in float32 and in bfloat16, digits, ε = 2",
        trials=tuple(trials),
        figures={
            "accuracy": functools.partial(
                plots.accuracy_against_setting, setting="precision"
            )
        },
        notes=(
            "In bfloat16 the model computes; weights, norms, sums and noise "
            "are float32.",
            "As digits_methods, with the learning rate 0.1; carriers of "
            f"DP-PowerSGD have rank {_CARRIER_RANK}.",
        ),
    )
