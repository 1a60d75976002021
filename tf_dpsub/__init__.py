"""Differentially private training of Keras models in low dimensions.

Modules are loaded when they are first used: accounting needs no TensorFlow.
"""

import importlib

__version__ = "0.1.0"

_MODULES = (
    "accounting",
    "analysis",
    "auditing",
    "callbacks",
    "data",
    "gradients",
    "layers",
    "models",
    "optimizers",
    "subspaces",
)
_NAMES = ("PrivateModel", "make_private")

__all__ = [*_MODULES, *_NAMES]


def __getattr__(name):
    if name in _MODULES:
        return importlib.import_module(f"tf_dpsub.{name}")
    if name in _NAMES:
        module = importlib.import_module("tf_dpsub.private_model")
        return getattr(module, name)
    raise AttributeError(f"module 'tf_dpsub' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
