"""The study of network width, on a few of scikit-learn's digits."""

import json
import re

import numpy as np
import pytest

from tests.launchers.programs import run_main
from tf_dpsub import data, models
from tf_dpsub.launchers import reproduce
from tf_dpsub.launchers.papers import network_width as study
from tf_dpsub.launchers.papers.engine import local_loss


@pytest.fixture(name="images", scope="module")
def _images():
    loaded = data.load("digits")
    both = loaded.x_train, loaded.y_train
    return study.Images(
        private=tuple(a[:300] for a in both),
        public=tuple(a[300:330] for a in both),
        test=(loaded.x_test, loaded.y_test),
    )


@pytest.fixture
def small(monkeypatch, images):
    """A narrow network, few rates, short runs."""
    for name, value in {
        "_WIDTHS": (2, 4),
        "_NOISE": (0.0, 2.0),
        "_RATES": (0.1, 1.0),
        "_SEEDS": range(1),
        "_EXAMPLES": 300,
        "_RANK": 5,
        "_EPOCHS": 2,
        "_BATCH_SIZE": 50,
        "_MEASURED": 100,
        "_PROBES": 4,
        "_DRAWS": 4,
    }.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "_images", lambda: images)


def test_terms_of_a_step(images, small):
    shape = images.private[0].shape[1:]
    model = models.mlp(shape, (), 10)
    point = study.Point("DP-SGD", 2.0, 0, 0.5, 0)
    local = local_loss.LocalLoss(model, *(a[:100] for a in images.private), 1.0)
    terms = study.noise_terms(model, images, point)
    basis = local.basis(*images.public, 5)
    columns = [local.hessian_product(v) for v in basis.T]
    inside = basis.T @ np.stack(columns, axis=1)
    assert terms["trace_inside"] == pytest.approx(np.trace(inside))
    assert terms["largest"] == pytest.approx(
        np.linalg.eigvalsh(inside).max(), rel=1e-4
    )
    # One step of noise: the rate times σ C / B.
    length = 0.5 * 2 / 50
    assert terms["loss_by_noise"] == pytest.approx(
        length**2 * terms["trace"] / 2
    )
    gradient, clipped = local.gradients()
    assert terms["gain"] == pytest.approx(0.5 * gradient @ clipped)
    share = np.sum((basis.T @ clipped) ** 2) / np.sum(clipped**2)
    assert terms["share"] == pytest.approx(share)
    assert 0 < share < 1


def run(tmp_path, capsys, **values):
    values = {"experiment": "network_width", "workdir": str(tmp_path)} | values
    return run_main(reproduce, capsys, **values)


@pytest.mark.slow
def test_writes_a_table_and_a_figure(small, tmp_path, capsys):
    out, error, code = run(tmp_path, capsys)
    assert code == 0, error
    # Two widths and two rates: two methods with noise, one without.
    assert "12 runs, 0 finished, 12 to run" in out
    folder = tmp_path / "network_width"
    saved = json.loads((folder / "points.json").read_text("utf-8"))["points"]
    for name, result in saved.items():
        is_measured = "DP-SGD sigma=2" in name and "PDP" not in name
        assert ({"early", "late"} <= result.keys()) == is_measured
    text = (folder / "table.md").read_text("utf-8")
    assert "12 steps, C = 1" in text
    best = max(
        100 * saved[f"PDP-SGD sigma=2 width=4 rate={r} seed=0"]["accuracy"]
        for r in ("0.1", "1")
    )
    assert re.search(rf"\| 2 \| [\d.]+ \| 4 \| .* \| {best:.1f} ± 0.0 \|", text)
    assert text.count("\n| 2 | ") == 2 + 2 + 2
    assert (folder / "accuracy.png").stat().st_size > 10_000
    out, *_ = run(tmp_path, capsys)
    assert "12 runs, 12 finished, 0 to run" in out


def test_a_rate_of_fewer_seeds_is_not_the_best():
    points = [
        study.Point("DP-SGD", 4.0, 8, rate, seed)
        for rate, seed in ((0.1, 0), (0.1, 1), (0.3, 0))
    ]
    accuracies = dict(zip((p.name for p in points), (0.5, 0.6, 0.9)))
    rows = study.best_rows(
        points,
        {k: {"accuracy": a, "parameters": 7} for k, a in accuracies.items()},
    )
    (row,) = rows.values()
    assert row.learning_rate == 0.1 and row.accuracies == [50, 60]
    assert not row.is_end
