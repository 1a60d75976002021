import functools

import numpy as np
import pytest
from matplotlib import image

from tests.launchers.papers.engine import finished_trials
from tf_dpsub.launchers.papers.engine import plots, results, trials
from tf_dpsub.launchers.reports import figures

_RECORDED = ("errors", "spectra", "residuals")


def results_of(folder, settings, fraction=1.0):
    """Results of settings: labels, an accuracy, what else trials leave."""
    made_trials = []
    for i, setting in enumerate(settings):
        recorded = {n: setting[n] for n in _RECORDED if n in setting}
        labels = {
            name: value
            for name, value in setting.items()
            if name not in (*recorded, "accuracy", "paper")
        }
        for seed in (0, 1):
            trial = finished_trials.trial(
                f"trial{i}_{seed}",
                seed=seed,
                sigma=labels.get("σ", 4.0),
                paper=setting.get("paper"),
                **labels,
            )
            made_trials.append(trial)
            accuracy = setting["accuracy"] + 0.01 * seed
            finished_trials.write(folder, trial, accuracy, **recorded)
    experiment = trials.Experiment(
        name="x",
        title="X on Y",
        trials=tuple(made_trials),
        figures={},
        fraction=fraction,
    )
    return results.Results(experiment, folder)


def texts(canvas):
    """All texts of a figure."""
    with figures.style():
        canvas.draw_without_rendering()
    return [text.get_text() for text in canvas.findobj(match=_is_text)]


def _is_text(artist):
    return hasattr(artist, "get_text")


def heights(container):
    """Values of points with error bars, as floats."""
    return np.asarray(container.lines[0].get_ydata(), float)


def saved(canvas, path):
    """The pixels of a figure."""
    canvas.savefig(path)
    return image.imread(path)[..., :3]


PDP = [
    {"units": units, "σ": sigma, "method": method, "accuracy": accuracy}
    for units in ("tanh", "ReLU")
    for sigma in (18.0, 4.0)
    for method, accuracy in (("DP-SGD", 0.7), ("PDP-SGD", 0.8))
]


class TestAccuracyAgainstEpsilon:
    def test_a_panel_for_each_unit_with_a_line_for_each_method(self, tmp_path):
        pdp_results = results_of(tmp_path, PDP)
        canvas = plots.accuracy_against_epsilon(pdp_results)
        assert {"tanh units", "ReLU units"} <= set(texts(canvas))
        (legend,) = canvas.legends
        assert [t.get_text() for t in legend.get_texts()] == [
            "DP-SGD",
            "PDP-SGD",
        ]
        panels = canvas.get_axes()
        assert len(panels) == 2
        (dp, pdp) = panels[0].containers
        # Mean of two seeds, and one point for each σ.
        np.testing.assert_allclose(heights(dp), [0.705, 0.705])
        np.testing.assert_allclose(heights(pdp), [0.805, 0.805])
        expected = [row.epsilon("rdp") for row in pdp_results.rows[:3:2]]
        places = np.asarray(dp.lines[0].get_xdata(), float)
        np.testing.assert_allclose(places, expected, rtol=0.05)

    def test_the_papers_points_are_hollow(self, tmp_path):
        setting = {"method": "GEP", "accuracy": 0.9, "paper": 0.963}
        canvas = plots.accuracy_against_epsilon(results_of(tmp_path, [setting]))
        (points,) = [
            line
            for line in canvas.get_axes()[0].lines
            if line.get_label() == "GEP, paper"
        ]
        assert points.get_markerfacecolor() == "none"
        assert (points.get_xdata(), points.get_ydata()) == ([0.5], [0.963])

    def test_the_best_of_each_method(self, tmp_path):
        settings = [
            {"method": m, "ε": e, "rate": rate, "accuracy": accuracy}
            for m, e, rate, accuracy in (
                ("GP", 1, 0.1, 0.7),
                ("GP", 1, 0.5, 0.6),
                ("GEP", 1, 0.1, 0.5),
                ("GEP", 1, 0.5, 0.8),
                ("GP", 2, 0.1, 0.9),
            )
        ]
        canvas = plots.accuracy_against_epsilon(
            results_of(tmp_path, settings), best=True
        )
        (axes,) = canvas.get_axes()
        gp, gep = axes.containers
        np.testing.assert_allclose(heights(gp), [0.705, 0.905])
        np.testing.assert_allclose(heights(gep), [0.805])

    def test_is_drawn_on_white(self, tmp_path):
        canvas = plots.accuracy_against_epsilon(results_of(tmp_path, PDP))
        pixels = saved(canvas, tmp_path / "figure.png")
        np.testing.assert_array_equal(pixels[-1, -1], [1, 1, 1])
        coloured = pixels.max(-1) - pixels.min(-1) > 0.3
        assert 0.001 < coloured.mean() < 0.1

    def test_says_what_was_shortened(self, tmp_path):
        short_results = results_of(tmp_path, PDP, fraction=0.05)
        canvas = plots.accuracy_against_epsilon(short_results)
        assert any("0.05 of the epochs" in text for text in texts(canvas))


def test_accuracy_against_setting(tmp_path):
    settings = [{"method": "DP-SGD", "k": "", "accuracy": 0.7}]
    settings += [
        {"method": "PDP-SGD", "k": k, "accuracy": accuracy}
        for k, accuracy in ((10, 0.6), (50, 0.8), ("auto", 0.75))
    ]
    canvas = plots.accuracy_against_setting(
        results_of(tmp_path, settings), setting="k"
    )
    (axes,) = canvas.get_axes()
    assert [t.get_text() for t in axes.get_xticklabels()] == [
        "10",
        "50",
        "auto",
    ]
    (points,) = axes.containers
    np.testing.assert_allclose(heights(points), [0.605, 0.805, 0.755])
    assert {"DP-SGD", "PDP-SGD"} <= set(texts(canvas))


class TestTrainingCurves:
    def test_mean_over_seeds_by_epoch(self, tmp_path):
        canvas = plots.training_curves(
            results_of(tmp_path, PDP), panel="σ", labels={"units": "tanh"}
        )
        panels = canvas.get_axes()
        titles = [axes.get_title("left") for axes in panels]
        assert titles == ["σ = 18.0, tanh units", "σ = 4.0, tanh units"]
        (dp, _) = panels[0].lines
        np.testing.assert_array_equal(dp.get_xdata(), [1, 2])
        np.testing.assert_allclose(dp.get_ydata(), [0.3525, 0.705])

    def test_lines_by_another_label(self, tmp_path):
        settings = [
            {"method": "PDP-SGD", "k": k, "accuracy": 0.8} for k in (10, 50)
        ]
        settings += [{"method": "DP-SGD", "k": "", "accuracy": 0.7}]
        canvas = plots.training_curves(
            results_of(tmp_path, settings), panel=None, line="k"
        )
        assert {"k = 10", "k = 50", "DP-SGD"} <= set(texts(canvas))

    def test_none_without_rows(self, tmp_path):
        pdp_results = results_of(tmp_path, PDP[:4])
        chosen = {"units": "ReLU"}
        assert plots.training_curves(pdp_results, "σ", labels=chosen) is None


def test_projection_errors(tmp_path):
    settings = [
        {"method": "GP", "accuracy": 0.9},
        {"method": "GEP", "accuracy": 0.9, "errors": (0.3, 0.2)},
        {"method": "GEP, random basis", "accuracy": 0.8, "errors": (0.9, 0.9)},
    ]
    recorded_results = results_of(tmp_path, settings)
    (axes,) = plots.projection_errors(recorded_results).get_axes()
    assert [line.get_label() for line in axes.lines] == [
        "GEP",
        "GEP, random basis",
    ]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.3, 0.2])


def test_projection_errors_before_any_is_there(tmp_path):
    bare_results = results_of(tmp_path, [{"method": "GP", "accuracy": 0.9}])
    assert plots.projection_errors(bare_results) is None


def test_spectra_say_that_they_are_an_analysis_of_private_data(tmp_path):
    settings = [
        {
            "method": method,
            "accuracy": 0.9,
            "spectra": ([4.0, 2.0, 1.0], [8.0, 2.0, 0.5]),
        }
        for method in ("SGD", "DP-SGD, σ = 1")
    ]
    canvas = plots.spectra(results_of(tmp_path, settings))
    axes = canvas.get_axes()[1]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    np.testing.assert_allclose(axes.lines[1].get_ydata(), [8.0, 2.0, 0.5])
    shown_texts = texts(canvas)
    assert {"epoch 1", "epoch 2"} <= set(shown_texts)
    assert any("analysis of private data" in text for text in shown_texts)


def test_grid_of_settings(tmp_path):
    settings = [
        {"method": m, "clip": c, "learning rate": r, "k": k, "accuracy": 0.9}
        for c in (5.0, 1.0)
        for r in (0.5, 0.1)
        for m, k in (("GP", ""), ("GEP", 250), ("GEP", 50))
    ]
    canvas = plots.grid_of_settings(results_of(tmp_path, settings))
    first, second = canvas.get_axes()
    assert first.get_title("left") == "learning rate = 0.1"
    assert second.get_title("left") == "learning rate = 0.5"
    assert [t.get_text() for t in first.get_xticklabels()] == ["1", "5"]
    assert {"GP", "GEP, k = 50", "GEP, k = 250"} <= set(texts(canvas))


@pytest.mark.parametrize(
    "draw",
    [
        plots.accuracy_against_epsilon,
        functools.partial(plots.training_curves, panel="σ"),
    ],
)
def test_one_trial_is_enough_to_draw(tmp_path, draw):
    canvas = draw(results_of(tmp_path, PDP[:1]))
    saved(canvas, tmp_path / "figure.png")


class TestAccuracyByMethod:
    SETTINGS = [
        {"method": "Full, not private", "ε": "∞", "accuracy": 0.9},
        {"method": "RGP", "ε": 8, "accuracy": 0.8, "paper": 0.915},
        {"method": "RGP", "ε": 2, "accuracy": 0.7},
    ]

    def test_a_bar_for_each_method_and_epsilon(self, tmp_path):
        canvas = plots.accuracy_by_method(results_of(tmp_path, self.SETTINGS))
        (axes,) = canvas.axes
        labels = [t.get_text() for t in axes.get_yticklabels()]
        assert labels == ["Full, not private", "RGP, ε = 8", "RGP, ε = 2"]
        (bars,) = [c for c in axes.containers if hasattr(c, "patches")]
        widths = [patch.get_width() for patch in bars.patches]
        np.testing.assert_allclose(widths, [0.905, 0.805, 0.705])
        assert {"90.5", "80.5", "70.5"} <= set(texts(canvas))

    def test_a_panel_for_each_task(self, tmp_path):
        settings = [
            setting | {"task": task, "accuracy": accuracy}
            for task, accuracy in (("mnli", 0.6), ("qnli", 0.7))
            for setting in self.SETTINGS
        ]
        canvas = plots.accuracy_by_method(results_of(tmp_path, settings))
        assert len(canvas.axes) == 2
        for axes, name, width in zip(
            canvas.axes, ("mnli", "qnli"), (0.605, 0.705)
        ):
            assert axes.get_title("left") == f"task = {name}"
            (bars,) = [c for c in axes.containers if hasattr(c, "patches")]
            assert [p.get_width() for p in bars.patches] == [width] * 3
        saved(canvas, tmp_path / "figure.png")

    def test_the_papers_points_lie_at_their_bars(self, tmp_path):
        canvas = plots.accuracy_by_method(results_of(tmp_path, self.SETTINGS))
        (axes,) = canvas.axes
        (points,) = [v for v in axes.lines if "paper" in str(v.get_label())]
        np.testing.assert_allclose(points.get_xdata(), [0.915])
        assert list(points.get_ydata()) == ["RGP, ε = 8"]

    def test_nothing_yet(self, tmp_path):
        assert plots.accuracy_by_method(results_of(tmp_path, [])) is None


class TestProjectionResiduals:
    def test_means_over_kernels_by_epoch(self, tmp_path):
        settings = [
            {
                "method": "RGP",
                "ε": 8,
                "accuracy": 0.8,
                "residuals": ([0.2, 0.4], [0.4, 0.8]),
            },
            {"method": "DP-SGD", "ε": 8, "accuracy": 0.8},
        ]
        canvas = plots.projection_residuals(results_of(tmp_path, settings))
        left, right = canvas.axes
        historical, itself = left.lines
        np.testing.assert_allclose(historical.get_ydata(), [0.3, 0.6])
        np.testing.assert_allclose(itself.get_ydata(), [0.15, 0.3])
        np.testing.assert_allclose(right.lines[0].get_ydata(), [3.0, 6.0])
        assert right.get_ylim()[1] > 1
        assert any("carriers of the history" in t for t in texts(canvas))

    def test_one_epoch_is_seen(self, tmp_path):
        settings = [
            {
                "method": "RGP",
                "ε": 8,
                "accuracy": 0.8,
                "residuals": ([0.2, 0.4],),
            }
        ]
        canvas = plots.projection_residuals(results_of(tmp_path, settings))
        lines = [line for axes in canvas.axes for line in axes.lines]
        assert [line.get_marker() for line in lines] == ["o", "D", "o"]

    def test_nothing_recorded(self, tmp_path):
        settings = [{"method": "RGP", "ε": 8, "accuracy": 0.8}]
        bare_results = results_of(tmp_path, settings)
        assert plots.projection_residuals(bare_results) is None
