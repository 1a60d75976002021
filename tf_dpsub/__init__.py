"""Differentially private training of Keras models in low dimensions.

Modules are loaded when they are first used: accounting needs no TensorFlow.
Where Keras is loaded already, so is what saved models need.
"""

import importlib
import sys

__version__ = "0.1.0"

_MODULES = (
    "accounting",
    "analysis",
    "auditing",
    "callbacks",
    "data",
    "gradients",
    "heads",
    "layers",
    "models",
    "optimizers",
    "pate",
    "planning",
    "subspaces",
    "tuning",
)
_NAMES = {
    "PrivateModel": "training.private_model",
    "fit_public": "training.public_training",
    "make_private": "training.private_model",
}

__all__ = [*_MODULES, *_NAMES]


def __getattr__(name):
    if name in _MODULES:
        return importlib.import_module(f"tf_dpsub.{name}")
    if name in _NAMES:
        module = importlib.import_module(f"tf_dpsub.{_NAMES[name]}")
        return getattr(module, name)
    raise AttributeError(
        f"module 'tf_dpsub' has no attribute {name!r}",
        name=name,
        obj=sys.modules[__name__],
    )


def __dir__():
    return sorted([*globals(), *__all__])


_keras = sys.modules.get("keras")
if _keras is not None and _keras.config.backend() == "tensorflow":
    # It finds what a saved model is made of by the names that these register.
    for _name in ("layers", "optimizers", "training.private_model"):
        importlib.import_module(f"tf_dpsub.{_name}")
