import inspect

import pytest

from tf_dpsub import optimizers
from tf_dpsub.methods import METHODS, PLANNED, method_of


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_optimizers_take_what_methods_need(method):
    known = inspect.signature(getattr(optimizers, method.optimizer)).parameters
    assert known.keys() >= method.kwargs.keys()
    assert ("subspace" in known) == method.needs_subspace
    assert ("carriers" in known) == method.needs_carriers
    if method.follows_public_examples:
        assert "x_public" in known
    if method.has_residual:
        assert "residual_norm_clip" in known


def test_the_planner_compares_some_of_them():
    assert METHODS.keys() > set(PLANNED)


@pytest.mark.parametrize(
    "optimizer, kwargs, name",
    [
        ("GEP", {"residual_norm_clip": 0.2}, "GEP"),
        ("GEP", {"residual": False}, "B-GEP"),
        ("RGP", {"carriers": "history", "warmup_steps": 3}, "RGP"),
        ("RGP", {"carriers": "random"}, "RGP-random"),
        ("RGP", {"carriers": "public", "update_every": 3}, "RGP-public"),
        ("ProjectedDPSGD", {"noise": "ambient"}, "PDP-SGD (ambient)"),
    ],
)
def test_method_of(optimizer, kwargs, name):
    assert method_of(optimizer, kwargs).name == name


def test_method_of_an_unknown_optimizer():
    assert method_of("SGD", {}) is None
