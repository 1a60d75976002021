import types

import pytest

from tf_dpsub import accounting
from tf_dpsub.accounting import banded_factorization
from tf_dpsub.planning import PlannedRun, SearchSpace, Simulation, planner

RUN = {"examples": 2000, "delta": 1e-5, "epochs": 2, "epsilon": 1.0}


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (PlannedRun, RUN | {"epochs": 0}, "Expected epochs >= 1"),
        (PlannedRun, RUN | {"sampling": "no"}, "Expected sampling to be one"),
        (PlannedRun, RUN | {"examples": 1.5}, "Expected examples >= 1"),
        (PlannedRun, RUN | {"noise_multiplier": 1.0}, "one of them None"),
        (PlannedRun, RUN | {"epsilon": None}, "one of them None"),
        (
            PlannedRun,
            RUN | {"epsilon": None, "noise_multiplier": 1.0},
            "Expected batch_size with noise_multiplier, got None",
        ),
        (
            SearchSpace,
            {"methods": ("SGD",)},
            "Expected methods among DP-SGD.* got SGD",
        ),
        (SearchSpace, {"methods": ()}, "got none"),
        (Simulation, {"held_out": 1.0}, "Expected 0 < held_out < 1, got 1.0"),
        (Simulation, {"points": 0}, "Expected points >= 1"),
        (Simulation, {"simulated_steps": 0}, "Expected simulated_steps >= 1"),
        (Simulation, {"splits": 0}, "Expected splits >= 1"),
    ],
)
def test_wrong_arguments(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_batch_sizes(monkeypatch):
    # The sizes do not depend on it.
    monkeypatch.setattr(accounting, "noise_multiplier", lambda **kwargs: 1.0)
    assert list(PlannedRun(**RUN).batch_noise()) == [32, 64, 128, 256]
    # Too few examples for any of them: all at once.
    assert list(PlannedRun(**RUN | {"examples": 100}).batch_noise()) == [100]
    assert list(PlannedRun(**RUN, batch_size=7).batch_noise()) == [7]


class TestBandNoise:
    def test_is_that_of_the_run(self, monkeypatch):
        asked = []
        monkeypatch.setattr(
            banded_factorization,
            "noise_of_bands",
            lambda *run: asked.append(run) or {1: 2.0, 2: 1.0},
        )
        assert PlannedRun(**RUN).band_noise(300) == {1: 2.0, 2: 1.0}
        assert asked == [(2000, 300, 14, 1.0, 1e-5)]

    def test_needs_a_budget(self):
        changes = {"epsilon": None, "noise_multiplier": 1.0, "batch_size": 9}
        assert PlannedRun(**RUN | changes).band_noise(9) == {}

    @pytest.mark.parametrize(
        "method, noise, is_named",
        [
            ("DP-SGD", {1: 2.0, 4: 1.5}, True),
            ("DP-SGD", {1: 2.0, 4: 2.5}, False),
            ("DP-SGD", {}, False),
            ("GEP", {1: 2.0, 4: 1.5}, False),
        ],
    )
    def test_a_plan_names_the_best(self, method, noise, is_named):
        plan = planner.Plan(
            candidates=[],
            batch_size=9,
            steps=1,
            noise_multiplier=1.0,
            batch_noise={},
            median_norm=1.0,
            recommended=types.SimpleNamespace(method=method),
        )
        run = types.SimpleNamespace(band_noise=lambda batch_size: noise)
        reasons = planner._with_bands(plan, run).reasons
        assert len(reasons) == is_named
        assert all(
            "bands=4 of DPSGD" in r and "25 % less" in r for r in reasons
        )


def test_each_example_once_in_an_epoch_needs_less_noise():
    poisson, once = (
        PlannedRun(
            **RUN, sampling=sampling, accountant="rdp"
        ).effective_noise_multiplier(500)
        for sampling in ("poisson", "once_per_epoch")
    )
    assert once < poisson
