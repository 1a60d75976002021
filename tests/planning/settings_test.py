import pytest

from tf_dpsub import accounting
from tf_dpsub.planning import PlannedRun, SearchSpace, Simulation

RUN = {"examples": 2000, "delta": 1e-5, "epochs": 2, "epsilon": 1.0}


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (PlannedRun, RUN | {"epochs": 0}, "Expected epochs >= 1"),
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
