"""The study of network width, on a few of scikit-learn's digits."""

import json
import re

import keras
import numpy as np
import pytest

from tests.launchers.programs import run_main
from tf_dpsub import data, models
from tf_dpsub.launchers import reproduce
from tf_dpsub.launchers.papers import network_width as study


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


def softmax(logits):
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.fixture(name="linear", scope="module")
def _linear(images):
    """A linear model, whose Hessian has a closed form."""
    keras.utils.set_random_seed(0)
    x, y = (a[:60] for a in images.private)
    model = models.mlp(x.shape[1:], (), 10)
    flat = x.reshape(60, -1).astype(np.float64)
    inputs = np.concatenate([flat, np.ones([60, 1])], axis=1)
    p = softmax(model.predict(x, verbose=0).astype(np.float64))
    # In the order of the kernel, [inputs, classes], and the bias after it.
    hessian = sum(
        np.kron(np.outer(a, a), np.diag(q) - np.outer(q, q))
        for a, q in zip(inputs, p)
    ) / len(x)
    errors = p - np.eye(10)[y]
    rows = np.einsum("np,nd->npd", inputs, errors).reshape(60, -1)
    return model, study._Local(model, x, y), hessian, rows


class TestNoiseTerms:
    def test_products_are_those_of_the_hessian(self, linear):
        _, local, hessian, _ = linear
        vector = np.random.default_rng(0).normal(size=len(hessian))
        np.testing.assert_allclose(
            local.hessian_product(vector), hessian @ vector, atol=1e-5
        )

    def test_gradients_and_clipped_gradients(self, linear, monkeypatch):
        model, local, _, rows = linear
        norms = np.linalg.norm(rows, axis=1)
        # Half of them are clipped.
        clip = float(np.median(norms))
        monkeypatch.setattr(study, "_CLIP", clip)
        local = study._Local(model, local._x, local._y)
        factors = np.minimum(1, clip / norms)
        gradient, clipped = local.gradients()
        np.testing.assert_allclose(gradient, rows.mean(0), atol=1e-5)
        np.testing.assert_allclose(
            clipped, (factors[:, None] * rows).mean(0), atol=1e-5
        )

    def test_noise_changes_the_loss_by_its_curvature(self, linear):
        model, local, hessian, _ = linear
        vector = 0.01 * np.random.default_rng(1).normal(size=len(hessian))
        before = model.get_weights()
        assert local.change(vector) == pytest.approx(
            vector @ hessian @ vector / 2, rel=0.02
        )
        for value, old in zip(model.get_weights(), before):
            np.testing.assert_array_equal(value, old)

    def test_the_basis_is_that_of_public_gradients(self, linear, monkeypatch):
        _, local, _, rows = linear
        monkeypatch.setattr(study, "_RANK", 5)
        basis = local.basis(local._x.numpy(), local._y.numpy())
        _, _, expected = np.linalg.svd(rows, full_matrices=False)
        np.testing.assert_allclose(basis.T @ basis, np.eye(5), atol=1e-9)
        np.testing.assert_allclose(
            np.linalg.norm(expected[:5] @ basis, axis=1), 1, atol=1e-4
        )

    def test_terms(self, linear, images, small):
        model, local, hessian, rows = linear
        point = study.Point("DP-SGD", 2.0, 0, 0.5, 0)
        measured = study._Local(model, *(a[:100] for a in images.private))
        terms = study.noise_terms(model, images, point)
        basis = measured.basis(*images.public)
        inside = np.stack(
            [measured.hessian_product(v) for v in basis.T], axis=1
        )
        inside = basis.T @ inside
        assert terms["trace_inside"] == pytest.approx(np.trace(inside))
        assert terms["largest"] == pytest.approx(
            np.linalg.eigvalsh(inside).max(), rel=1e-4
        )
        # One step of noise: the rate times σ C / B.
        length = 0.5 * 2 / 50
        assert terms["loss_by_noise"] == pytest.approx(
            length**2 * terms["trace"] / 2
        )
        gradient, clipped = measured.gradients()
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
