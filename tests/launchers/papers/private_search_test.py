"""A few trials of a private search on digits."""

import numpy as np
import pytest

from tests.launchers.programs import run_main
from tf_dpsub.accounting import selection
from tf_dpsub.launchers import reproduce
from tf_dpsub.launchers.papers import private_search as study


@pytest.fixture
def stand_ins(monkeypatch):
    """Trials that train nothing; a higher score has a higher accuracy."""

    def run_point(digits, point, epochs):
        assert epochs == 20
        return {
            "score": point.seed / 100,
            "accuracy": point.seed / 100,
            "seconds": 1.0,
        }

    monkeypatch.setattr(study, "run_point", run_point)


@pytest.fixture
def run(tmp_path, capsys):
    def run(**values):
        values = {
            "experiment": "private_search",
            "workdir": str(tmp_path),
        } | values
        return run_main(reproduce, capsys, **values)

    return run


def test_writes_a_table(stand_ins, run, tmp_path):
    _, _, code = run()
    assert code == 0
    folder = tmp_path / "private_search"
    text = (folder / "table.md").read_text("utf-8")
    assert "100 trials with hyper-parameters at random, of 120 steps" in text
    assert "| one trial at random | 1.285 | 4 % | 24 % | 49 % | 74 % |" in text
    # ε of the tutorial.
    assert "| 30 expected trials, logarithmic | 2.67" in text
    assert "| 30 expected trials, geometric | 3.29" in text
    assert "| 30 trials, all of them counted | 8.847 |" in text
    assert (folder / "accuracy.png").stat().st_size > 5000


def test_a_trial_has_a_private_score_and_an_accuracy():
    result = study.run_point(study._digits(), study.Point(3), epochs=1)
    assert 0 < result["accuracy"] <= 1
    assert 0.01 <= result["learning_rate"] <= 10
    assert 0.1 <= result["clip"] <= 3
    # σ of the score is 25 / 1438: it is off by more than rounding.
    assert abs(result["score"]) < 1.2


@pytest.mark.parametrize("distribution", selection.DISTRIBUTIONS)
def test_published_accuracies_are_those_of_drawn_searches(distribution):
    """Searches are drawn one by one, from trials that a score misjudges."""
    rng = np.random.default_rng(0)
    accuracies = rng.uniform(size=40)
    scores = accuracies + 0.2 * rng.normal(size=40)
    results = [{"score": s, "accuracy": a} for s, a in zip(scores, accuracies)]
    shape = selection.shape_of(distribution)
    found = []
    for _ in range(4000):
        count = selection.draw_trials(30, shape, rng.random)
        drawn = rng.integers(40, size=count)
        found.append(accuracies[drawn[scores[drawn].argmax()]])
    expected = study.published_accuracies(results, distribution)
    for level, accuracy in zip(study._LEVELS, expected):
        assert np.mean(np.array(found) < accuracy) < level + 0.03
        assert np.mean(np.array(found) <= accuracy) > level - 0.03
