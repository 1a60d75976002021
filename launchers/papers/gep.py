"""The experiments of the GEP paper.

Reference:
    [Yu, Zhang, Chen, Liu: Do Not Let Privacy Overbill Utility: Gradient
    Embedding Perturbation for Private Learning, ICLR 2021](
    https://arxiv.org/abs/2102.12677)
"""

import functools
import itertools
import pathlib

from tf_dpsub.configs import gep_cifar10, gep_linear_probe, gep_mnist
from tf_dpsub.configs.best import cifar10 as best_cifar10
from tf_dpsub.launchers.papers.engine import feature_cache, plots
from tf_dpsub.launchers.papers.engine.trials import (
    Experiment,
    Trial,
    change_subspace,
)
from tf_dpsub.launchers.terminal import quiet
from tf_dpsub.methods import METHODS

_SEEDS = (0, 1, 2)
_METHODS = {"GP": "gp", "B-GEP": "bgep", "GEP": "gep"}
_EPOCHS = {2: 50, 5: 100, 8: 200}
# Test accuracy in percent.
_PAPER = {
    "mnist": {
        2: {"GP": 94.7, "B-GEP": 93.1, "GEP": 96.3},
        5: {"GP": 96.8, "B-GEP": 94.5, "GEP": 97.9},
        8: {"GP": 97.2, "B-GEP": 95.9, "GEP": 98.4},
    },
    "cifar10": {
        2: {"GP": 43.6, "B-GEP": 50.3, "GEP": 59.7},
        5: {"GP": 52.2, "B-GEP": 59.5, "GEP": 70.1},
        8: {"GP": 56.4, "B-GEP": 63.0, "GEP": 74.9},
    },
    "linear_probe": {
        0.1: {"GP": 88.2, "B-GEP": 91.0, "GEP": 90.9},
        0.5: {"GP": 91.1, "B-GEP": 92.9, "GEP": 93.5},
        1: {"GP": 93.2, "B-GEP": 93.1, "GEP": 94.3},
        2: {"GP": 93.4, "B-GEP": 93.2, "GEP": 94.8},
    },
}
# Steps between refreshes where a refresh at every step would take too long.
_SPARSE = 10
_TUNED_EPOCHS = 10
# Of the small network on CIFAR-10; the best pairs of clip and rate by ε.
_SMALL_EPOCHS = 10
_SMALL_TUNED_EPOCHS = 2
_SMALL_BEST = {
    8: {"GP": (5.0, 0.2), "B-GEP": (5.0, 0.2), "GEP": (1.0, 1.0)},
    2: {"GP": (1.0, 1.0), "B-GEP": (5.0, 0.2), "GEP": (1.0, 1.0)},
}
# By the ending of a name, the share of that rate.
_SMALL_SHARES = {"": 1.0, "_slow": 0.3}
# Of a head on features of CIFAR-10, likewise.
_FEATURES_EPOCHS = 20
_FEATURES_TUNED_EPOCHS = 5
_FEATURES_BEST = {
    8: {"GP": (0.2, 0.1), "B-GEP": (0.2, 0.03), "GEP": (1.0, 0.1)},
    2: {"GP": (0.2, 0.1), "B-GEP": (0.2, 0.03), "GEP": (0.2, 0.1)},
}

_NETWORK_NOTE = (
    "The paper gives no sizes of its MNIST network: ours has two convolutions "
    "of 16 and 32 filters and 20,490 parameters."
)
_IMAGES_NOTE = (
    "Public images: those of the file given, made to fit the model's input, "
    "with random labels. The paper takes 2,000."
)
_SIGMA_NOTE = (
    "σ is calibrated to ε with both releases of a step as one Gaussian, by "
    "RDP; the paper's authors accounted for two."
)
_SPARSE_NOTE = (
    f"A sparser refresh: the basis is renewed every {_SPARSE} steps, where the "
    "paper renews it at every step"
)
_CHOICE_NOTE = (
    "The best is chosen by test accuracy, which is public here; no ε covers a "
    "choice made on private data."
)
_ERROR_NOTE = (
    "Projection error: the share of the energy of gradients of 1,000 test "
    "examples outside of the subspace, after the last epoch."
)


def mnist(inputs):
    """GP, B-GEP and GEP on MNIST at ε = 2, 5, 8 with the paper's settings."""
    _require_images(inputs)
    trials = []
    for seed, epsilon, method in itertools.product(_SEEDS, _EPOCHS, _METHODS):
        config = _with_images(gep_mnist.get_config(), inputs)
        config.epochs = _EPOCHS[epsilon]
        if epsilon > 2:
            change_subspace(config, update_every=_SPARSE)
        trials.append(_against_epsilon("mnist", config, epsilon, method, seed))
    return Experiment(
        name="gep_mnist",
        title="GEP on MNIST",
        trials=tuple(trials),
        figures=_epsilon_figures(),
        notes=(
            _NETWORK_NOTE,
            _IMAGES_NOTE,
            _SIGMA_NOTE,
            _SPARSE_NOTE + ", at ε = 5 and 8.",
        ),
    )


def cifar10(inputs):
    """GP, B-GEP and GEP on CIFAR-10 with ResNet-20, k = 1000."""
    _require_images(inputs)
    trials = []
    for seed, epsilon, method in itertools.product(
        _SEEDS, reversed(_EPOCHS), _METHODS
    ):
        config = _with_images(gep_cifar10.get_config(), inputs)
        config.private_examples = 10_000
        config.epochs = _EPOCHS[epsilon]
        change_subspace(config, update_every=_SPARSE)
        trials.append(
            _against_epsilon("cifar10", config, epsilon, method, seed)
        )
    return Experiment(
        name="gep_cifar10",
        title="GEP on CIFAR-10, 10,000 private examples",
        trials=tuple(trials),
        figures=_epsilon_figures(),
        notes=(
            "10,000 private examples, where the paper has 50,000: a fifth of "
            "the steps in as many epochs, and five times the sampling rate.",
            _IMAGES_NOTE,
            _SIGMA_NOTE,
            _SPARSE_NOTE + ".",
        ),
    )


def cifar10_small(inputs):
    """GP, B-GEP and GEP on all of CIFAR-10 with a small network, to the end."""
    _require_images(inputs)
    trials = []
    for seed, (ending, share), epsilon, method in itertools.product(
        _SEEDS[:2], _SMALL_SHARES.items(), _SMALL_BEST, _METHODS
    ):
        clip, rate = _SMALL_BEST[epsilon][method]
        rate *= share
        config = _small_cifar10(inputs, method, epsilon, clip, rate)
        config.epochs = _SMALL_EPOCHS
        config.recorders = ("test_projection_error",) if method != "GP" else ()
        short = f"{_METHODS[method]}{ending}"
        trials.append(
            Trial(
                name=f"epsilon{epsilon:g}_{short}_seed{seed}",
                labels={
                    "ε": epsilon,
                    "method": method,
                    "clip": clip,
                    "learning rate": rate,
                },
                config=_seeded(config, seed),
            )
        )
    return Experiment(
        name="gep_cifar10_small",
        title=f"GEP on CIFAR-10, a small network, {_SMALL_EPOCHS} epochs",
        trials=tuple(trials),
        figures={
            "accuracy": functools.partial(
                plots.accuracy_against_epsilon, best=True
            ),
            "training": functools.partial(plots.training_curves, panel="ε"),
        },
        notes=(
            *_small_notes(),
            "Clips and rates are the best of gep_cifar10_small_tuned, and, as "
            "longer runs may want smaller steps, three tenths of these rates.",
            _ERROR_NOTE,
        ),
        best_of=("ε", "method"),
    )


def cifar10_small_tuned(inputs):
    """GP, B-GEP and GEP on CIFAR-10, a small network, each tuned alike."""
    _require_images(inputs)
    trials = []
    for epsilon, clip, rate, method in itertools.product(
        (8, 2), (1.0, 5.0), (1.0, 3.0, 0.3, 0.1), _METHODS
    ):
        config = _small_cifar10(inputs, method, epsilon, clip, rate / clip)
        config.epochs = _SMALL_TUNED_EPOCHS
        trials.append(
            Trial(
                name=f"epsilon{epsilon:g}_clip{clip:g}_move{rate:g}_"
                + _METHODS[method],
                labels={
                    "ε": epsilon,
                    "method": method,
                    "clip": clip,
                    "rate × clip": rate,
                },
                config=config,
            )
        )
    return Experiment(
        name="gep_cifar10_small_tuned",
        title="GEP on CIFAR-10, a small network, tuned",
        trials=tuple(trials),
        figures={
            "grid": functools.partial(
                plots.grid_of_settings,
                panel="ε",
                setting="rate × clip",
                line="clip",
            )
        },
        notes=(
            *_small_notes(),
            f"{_SMALL_TUNED_EPOCHS} epochs, one seed. Clips and products of "
            "clip and rate are the same for all methods; the residual's clip "
            "is a fifth of the other.",
            _CHOICE_NOTE,
        ),
        best_of=("ε", "method"),
    )


def _small_cifar10(inputs, method, epsilon, clip, rate):
    """The config of a method on CIFAR-10 with a small network of tanh."""
    config = _with_images(gep_cifar10.get_config(), inputs)
    config.model = "gep_mnist_cnn"
    config.model_kwargs = {"activation": "tanh"}
    config.subspace_kwargs = {
        "rank": 500,
        "groups": "layers",
        "update_every": _SPARSE,
    }
    config.optimizer_kwargs.residual_norm_clip = clip / 5
    config.l2_norm_clip = clip
    config.learning_rate = rate
    config.epsilon = float(epsilon)
    config.batch_size = 500
    _set_method(config, method)
    return config


def _small_notes():
    return (
        "All 50,000 private examples. The network of gep_mnist, with tanh as "
        "in Papernot et al. (2021), who show that it suits clipping: 25,578 "
        "parameters, where ResNet-20 has 270,000. Batches of 500, half of the "
        "paper's, and k = 500.",
        _IMAGES_NOTE,
        _SIGMA_NOTE,
        _SPARSE_NOTE + ".",
    )


def linear_probe(inputs):
    """GP, B-GEP and GEP on features of a pretrained model, --features=FILE."""
    _require_file(
        "features", "with x_train, y_train, x_test and y_test", inputs.features
    )
    trials = []
    for seed, epsilon, method in itertools.product(
        _SEEDS, _PAPER["linear_probe"], _METHODS
    ):
        config = gep_linear_probe.get_config()
        config.dataset = inputs.features
        trials.append(
            _against_epsilon("linear_probe", config, epsilon, method, seed)
        )
    return Experiment(
        name="gep_linear_probe",
        title="GEP on features",
        trials=tuple(trials),
        figures=_epsilon_figures(),
        notes=(
            "The paper's figures are for 4096 features of SimCLR; ours for the "
            "features given.",
            "Batch 1000, 20 epochs, Adam's rate 0.01 and clip 1 are ours.",
            "Public examples: 2,000 of the training examples, which are not "
            "private then, with random labels.",
            _SIGMA_NOTE,
        ),
    )


def cifar10_features(inputs):
    """GP, B-GEP and GEP on a head of frozen features of CIFAR-10."""
    trials = []
    for seed, epsilon, method in itertools.product(
        _SEEDS[:2], _FEATURES_BEST, _METHODS
    ):
        clip, rate = _FEATURES_BEST[epsilon][method]
        config = _on_features(inputs, method, epsilon, clip, rate)
        config.epochs = _FEATURES_EPOCHS
        trials.append(
            Trial(
                name=f"epsilon{epsilon:g}_{_METHODS[method]}_seed{seed}",
                labels={
                    "ε": epsilon,
                    "method": method,
                    "clip": clip,
                    "learning rate": rate,
                },
                config=_seeded(config, seed),
            )
        )
    return Experiment(
        name="gep_cifar10_features",
        title=f"GEP on features of CIFAR-10, {_FEATURES_EPOCHS} epochs",
        trials=tuple(trials),
        figures=_epsilon_figures(),
        notes=(
            *_features_notes(),
            "Clips and rates are the best of gep_cifar10_features_tuned.",
        ),
        prepare=functools.partial(_write_features, inputs),
    )


def cifar10_features_tuned(inputs):
    """GP, B-GEP and GEP on features of CIFAR-10, each tuned alike."""
    trials = []
    for epsilon, clip, rate, method in itertools.product(
        (8, 2), (1.0, 0.2), (0.03, 0.1, 0.3, 0.01), _METHODS
    ):
        config = _on_features(inputs, method, epsilon, clip, rate)
        config.epochs = _FEATURES_TUNED_EPOCHS
        trials.append(
            Trial(
                name=f"epsilon{epsilon:g}_clip{clip:g}_rate{rate:g}_"
                + _METHODS[method],
                labels={
                    "ε": epsilon,
                    "method": method,
                    "clip": clip,
                    "learning rate": rate,
                },
                config=config,
            )
        )
    return Experiment(
        name="gep_cifar10_features_tuned",
        title="GEP on features of CIFAR-10, tuned",
        trials=tuple(trials),
        figures={
            "grid": functools.partial(
                plots.grid_of_settings,
                panel="ε",
                setting="learning rate",
                line="clip",
            )
        },
        notes=(
            *_features_notes(),
            f"{_FEATURES_TUNED_EPOCHS} epochs, one seed. Clips and rates are "
            "the same for all methods.",
            _CHOICE_NOTE,
        ),
        best_of=("ε", "method"),
        prepare=functools.partial(_write_features, inputs),
    )


def _on_features(inputs, method, epsilon, clip, rate):
    """The config of a method on a head of the features in the file given."""
    if inputs.features is None:
        raise ValueError(
            "Expected --features=FILE, an .npz file, where the features are or "
            "will be written, got none."
        )
    config = gep_linear_probe.get_config()
    config.dataset = inputs.features
    config.subspace_kwargs = {"rank": 500, "update_every": _SPARSE}
    config.optimizer_kwargs.residual_norm_clip = clip / 5
    config.l2_norm_clip = clip
    config.learning_rate = rate
    config.epsilon = float(epsilon)
    _set_method(config, method)
    return config


def _write_features(inputs):
    """Writes the features of CIFAR-10, if they are not there."""
    if pathlib.Path(inputs.features).exists():
        return
    _require_images(inputs)
    config = best_cifar10.get_config()
    config.public_data = inputs.public_images
    quiet.load_tensorflow()
    feature_cache.write_npz(inputs.features, config)


def _features_notes():
    return (
        "A linear layer of 10,010 parameters on the features of "
        "configs/best/cifar10.py: scattering and patches, on 1,000 directions "
        "of public images and whitened by them. Adam, batches of 1,000, k = "
        "500.",
        "Public examples: 2,000 of the training examples, which are not "
        "private then, with random labels.",
        _SIGMA_NOTE,
        _SPARSE_NOTE + ".",
    )


def _epsilon_figures():
    return {
        "accuracy": plots.accuracy_against_epsilon,
        "training": functools.partial(plots.training_curves, panel="ε"),
    }


def tuned(inputs):
    """GP, B-GEP and GEP on MNIST at ε = 2, each tuned over the same grid."""
    _require_images(inputs)
    trials = []
    for clip, rate, rank, method in itertools.product(
        (5.0, 10.0, 1.0), (0.1, 0.5, 0.05), (250, 50), _METHODS
    ):
        if method == "GP" and rank == 50:
            # GP has no rank k: one run is enough.
            continue
        config = _with_images(gep_mnist.get_config(), inputs)
        config.epochs = _TUNED_EPOCHS
        config.l2_norm_clip = clip
        config.optimizer_kwargs.residual_norm_clip = clip / 5
        config.learning_rate = rate
        change_subspace(config, rank=rank, update_every=_SPARSE)
        config.recorders = ("test_projection_error",)
        _set_method(config, method)
        k = "" if method == "GP" else rank
        trials.append(
            Trial(
                name=f"clip{clip:g}_rate{rate:g}_"
                + (f"k{k}_" if k else "")
                + _METHODS[method],
                labels={
                    "method": method,
                    "clip": clip,
                    "learning rate": rate,
                    "k": k,
                },
                config=config,
            )
        )
    return Experiment(
        name="gep_mnist_tuned",
        title=f"GP, B-GEP and GEP on MNIST at ε = 2, {_TUNED_EPOCHS} epochs, "
        "tuned",
        trials=tuple(trials),
        figures={"grid": plots.grid_of_settings},
        notes=(
            "The same clips and learning rates for all methods; the residual's "
            "clip is a fifth of the other. GP has no k, and half as many "
            "settings.",
            _CHOICE_NOTE,
            _NETWORK_NOTE,
            _IMAGES_NOTE,
            _SIGMA_NOTE,
            _SPARSE_NOTE + ".",
            _ERROR_NOTE,
        ),
        best_of=("method",),
    )


def rank(inputs):
    """B-GEP and GEP on MNIST at ε = 2 by the rank k, beside GP."""
    return _by_setting(
        inputs,
        "gep_k",
        "GEP on MNIST at ε = 2 by the rank k",
        "k",
        {k: {"rank": k} for k in (50, 250, 500, 1000)},
    )


def public_examples(inputs):
    """B-GEP and GEP on MNIST at ε = 2 by the number m of public images."""
    return _by_setting(
        inputs,
        "gep_m",
        "GEP on MNIST at ε = 2 by the number m of public images",
        "m",
        dict.fromkeys((500, 1000, 2000), {}),
    )


def random_basis(inputs):
    """GEP on MNIST at ε = 2 with a random basis, beside a public one."""
    _require_images(inputs)
    trials = []
    for seed, method in itertools.product(
        _SEEDS, ("GEP", "GEP, random basis", "GP")
    ):
        config = _with_images(gep_mnist.get_config(), inputs)
        change_subspace(config, update_every=_SPARSE)
        config.recorders = ("test_projection_error",)
        _set_method(config, method)
        prefix = {"GP": "gp", "GEP": "public"}.get(method, "random")
        trials.append(
            Trial(
                name=f"{prefix}_seed{seed}",
                labels={"method": method},
                config=_seeded(config, seed),
            )
        )
    return Experiment(
        name="gep_random_basis",
        title="GEP on MNIST at ε = 2, with a random and with a public basis",
        trials=tuple(trials),
        figures={
            "training": functools.partial(plots.training_curves, panel=None),
            "projection_error": plots.projection_errors,
        },
        notes=(
            "The paper finds more than 95 % projection error with random "
            "bases.",
            _NETWORK_NOTE,
            _IMAGES_NOTE,
            _SIGMA_NOTE,
            _SPARSE_NOTE + ".",
            _ERROR_NOTE,
        ),
    )


def _by_setting(inputs, name, title, label, values):
    """Experiment: B-GEP and GEP with one setting varied, beside GP."""
    _require_images(inputs)
    trials = []
    for seed in _SEEDS:
        settings = [("GP", "")]
        settings += itertools.product(("GEP", "B-GEP"), values)
        for method, value in settings:
            config = _with_images(gep_mnist.get_config(), inputs)
            change_subspace(
                config, update_every=_SPARSE, **values.get(value, {})
            )
            if label == "m" and value:
                config.public_examples = value
            _set_method(config, method)
            prefix = f"{label}{value}_" if value else ""
            trials.append(
                Trial(
                    name=f"{prefix}{_METHODS[method]}_seed{seed}",
                    labels={"method": method, label: value},
                    config=_seeded(config, seed),
                )
            )
    return Experiment(
        name=name,
        title=title,
        trials=tuple(trials),
        figures=plots.by_setting(label, panel="method"),
        notes=(_NETWORK_NOTE, _IMAGES_NOTE, _SIGMA_NOTE, _SPARSE_NOTE + "."),
    )


def _against_epsilon(task, config, epsilon, method, seed):
    """A trial of a method at some ε, in a config made for GEP."""
    config.epsilon = float(epsilon)
    k = config.subspace_kwargs.rank
    every = config.subspace_kwargs.get("update_every", 1)
    _set_method(config, method)
    return Trial(
        name=f"epsilon{epsilon:g}_{_METHODS[method]}_seed{seed}",
        labels={
            "ε": epsilon,
            "method": method,
            "k": "" if method == "GP" else k,
            "refreshed every": "" if method == "GP" else every,
        },
        config=_seeded(config, seed),
        paper=_PAPER[task][epsilon][method] / 100,
        paper_epsilon=float(epsilon),
    )


def _set_method(config, method):
    """Turns the config of GEP into that of another method."""
    if method == "GP":
        config.optimizer = METHODS["DP-SGD"].optimizer
        config.optimizer_kwargs = {}
        config.subspace = None
        config.subspace_kwargs = {}
        config.recorders = ()
    elif method == "B-GEP":
        config.optimizer_kwargs = METHODS["B-GEP"].kwargs
    elif method == "GEP, random basis":
        public = config.subspace_kwargs
        config.subspace = "RandomSubspace"
        config.subspace_kwargs = {
            "rank": public.rank,
            "groups": public.groups,
            "update_every": public.update_every,
        }


def _seeded(config, seed):
    config.seed = seed
    return config


def _with_images(config, inputs):
    config.public_data = inputs.public_images
    return config


def _require_images(inputs):
    _require_file("public_images", "with images", inputs.public_images)


def _require_file(flag, content, path):
    if path is None or not pathlib.Path(path).is_file():
        problem = "none" if path is None else f"{path!r}, which is no file"
        raise ValueError(
            f"Expected --{flag}=FILE, an .npz file {content}, got {problem}."
        )
