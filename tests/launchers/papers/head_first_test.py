"""Head first, and then all layers, on a few random images."""

import numpy as np
import pytest

from tests.launchers.programs import run_main
from tf_dpsub.data import datasets
from tf_dpsub.launchers import reproduce
from tf_dpsub.launchers.papers import head_first as study


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small images, few of them, and few runs."""
    for name, value in {
        "_EPOCHS": 2,
        "_BATCH_SIZE": 20,
        "_HEAD_EPOCHS": (0, 1),
        "_RATES": (0.5,),
        "_SEEDS": range(1),
        "_data": lambda fraction: _images(),
    }.items():
        monkeypatch.setattr(study, name, value)


def _images():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(80, 14, 14, 1)).astype("float32")
    y = generator.integers(0, 10, 80)
    return datasets.Dataset(
        name="random",
        x_train=x[:60],
        y_train=y[:60],
        x_public=x[:0],
        y_public=y[:0],
        x_test=x[60:],
        y_test=y[60:],
        num_classes=10,
    )


@pytest.mark.slow
def test_both_phases_are_charged_and_all_layers_trained(monkeypatch):
    import tf_dpsub

    models = []
    original = tf_dpsub.make_private

    def make_private(model):
        models.append((model, model.get_weights()))
        return original(model)

    monkeypatch.setattr(tf_dpsub, "make_private", make_private)
    result = study.run_point(_images(), study.Point(1, 0.5, 0))
    # Of as many steps in one run.
    assert result["epsilon"] == pytest.approx(study._EPSILON, rel=1e-2)
    assert 0 <= result["accuracy"] <= 1
    ((model, before),) = models
    assert all(layer.trainable for layer in model.layers)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.abs(old - new).max() > 0


@pytest.mark.slow
def test_the_first_phase_trains_the_head_alone(monkeypatch):
    from tf_dpsub import PrivateModel

    trained, fit = [], PrivateModel.fit

    def counted(model, *args, **kwargs):
        trained.append(len(model.trainable_variables))
        return fit(model, *args, **kwargs)

    monkeypatch.setattr(PrivateModel, "fit", counted)
    study.run_point(_images(), study.Point(1, 0.5, 0))
    assert trained == [2, 8]


@pytest.mark.slow
def test_writes_a_table(tmp_path, capsys):
    out, error, code = run_main(
        reproduce, capsys, experiment="head_first", workdir=str(tmp_path)
    )
    assert code == 0, error
    assert "2 runs, 0 finished, 2 to run" in out
    text = (tmp_path / "head_first" / "table.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row[:4] for row in rows[1:]] == ["| 0 ", "| 1 "]
    assert all(row.endswith("| 1 |") for row in rows[1:])


def test_what_has_not_run_is_not_in_the_table():
    points = study.HeadFirst().points()
    saved = {
        "steps": 6,
        "points": {points[0].name: {"accuracy": 0.5, "epsilon": 0.99}},
    }
    text = study.table("T", points, saved, "c")
    assert "| 0 | 0.99 | 50.0 ± 0.0 | 1 |" in text
    assert "\n| 1 |" not in text
