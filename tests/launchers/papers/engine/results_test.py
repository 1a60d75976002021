import json
import math

import pytest

from tests.launchers.papers.engine import finished_trials
from tf_dpsub import accounting
from tf_dpsub.launchers.papers.engine import results, trials


@pytest.fixture
def two_settings(tmp_path):
    """Two methods, of which one has a seed that has not finished."""
    settings = [("GP", 0, 0.7), ("GEP", 0, 0.9), ("GP", 1, 0.8), ("GEP", 1, 0)]
    made_trials = []
    for method, seed, accuracy in settings:
        trial = finished_trials.trial(f"{method}_{seed}", method, seed=seed)
        made_trials.append(trial)
        if accuracy:
            finished_trials.write(
                tmp_path,
                trial,
                accuracy,
                errors=(0.6, 0.4) if method == "GEP" else (),
                steps=20 + 5 * seed,
            )
    experiment = trials.Experiment(
        name="x",
        title="X",
        trials=tuple(made_trials),
        figures={},
        best_of=("method",),
    )
    return results.Results(experiment, tmp_path)


def epsilon(steps, accountant):
    return accounting.epsilon(
        noise_multiplier=4.0,
        sampling_rate=0.1,
        steps=steps,
        delta=1e-5,
        accountant=accountant,
    )


class TestRows:
    def test_hold_the_seeds_of_a_setting(self, two_settings):
        gp, gep = two_settings.rows
        assert (gp.method, gep.method) == ("GP", "GEP")
        assert (gp.seeds, gep.seeds) == ([0, 1], [0])

    def test_mean_and_deviation(self, two_settings):
        gp, gep = two_settings.rows
        assert gp.mean == pytest.approx(0.75)
        # Two seeds are 0.1 apart; the sum of squares is divided by n - 1.
        assert gp.deviation == pytest.approx(0.1 / math.sqrt(2))
        assert gep.mean == 0.9
        assert gep.deviation is None

    @pytest.mark.parametrize("accountant", ["rdp", "pld"])
    def test_epsilon_is_of_the_ledger_and_of_the_worst_seed(
        self, two_settings, accountant
    ):
        gp, gep = two_settings.rows
        assert gp.epsilon(accountant) == pytest.approx(epsilon(25, accountant))
        assert gep.epsilon(accountant) == pytest.approx(epsilon(20, accountant))

    def test_projection_error_is_of_all_groups_after_the_last_epoch(
        self, two_settings
    ):
        gp, gep = two_settings.rows
        assert gp.projection_error is None
        assert gep.projection_error == 0.4

    def test_choice(self, two_settings):
        assert [r.method for r in two_settings.where(method="GEP")] == ["GEP"]
        assert [r.method for r in two_settings.best("method")] == ["GP", "GEP"]


def test_best_is_the_most_accurate_row(tmp_path):
    made_trials = [
        finished_trials.trial(f"gp_{clip}", "GP", clip=clip)
        for clip in (1, 2, 3)
    ]
    for trial, accuracy in zip(made_trials, (0.5, 0.7, 0.6)):
        finished_trials.write(tmp_path, trial, accuracy)
    experiment = trials.Experiment(
        name="x", title="X", trials=tuple(made_trials), figures={}
    )
    (best,) = results.Results(experiment, tmp_path).best("method")
    assert best.labels["clip"] == 2


def test_as_json_holds_every_finished_trial(two_settings):
    content = json.loads(
        json.dumps(results.as_json(two_settings), allow_nan=False)
    )
    gp, gep = content["rows"]
    assert [trial["seed"] for trial in gp["trials"]] == [0, 1]
    assert [trial["accuracy"] for trial in gp["trials"]] == [0.7, 0.8]
    assert gp["accuracy_mean"] == pytest.approx(0.75)
    assert gep["accuracy_deviation"] is None
    assert gep["epsilon"]["rdp"] == pytest.approx(epsilon(20, "rdp"))


def test_without_noise_epsilon_is_infinite_also_in_json(tmp_path):
    trial = finished_trials.trial("sgd", "SGD", sigma=0.0)
    finished_trials.write(tmp_path, trial, 0.9)
    experiment = trials.Experiment(
        name="x", title="X", trials=(trial,), figures={}
    )
    noiseless = results.Results(experiment, tmp_path)
    assert noiseless.rows[0].epsilon("pld") == math.inf
    text = json.dumps(results.as_json(noiseless), allow_nan=False)
    assert json.loads(text)["rows"][0]["epsilon"]["rdp"] == "inf"


def test_epochs_done_counts_what_is_written_down(tmp_path):
    assert results.epochs_done(tmp_path) == 0
    finished_trials.write(tmp_path, finished_trials.trial("a", "GP"), 0.5)
    assert results.epochs_done(tmp_path / "a") == 2


@pytest.mark.parametrize("steps", [0, 19])
def test_a_ledger_that_has_lost_steps_is_refused(tmp_path, steps):
    trial = finished_trials.trial("gp", "GP")
    finished_trials.write(tmp_path / "whole", trial, 0.9)
    finished_trials.write(tmp_path / "other", trial, 0.9, steps=steps)
    ledger = tmp_path / "whole" / trial.name / "ledger.json"
    (tmp_path / "other" / trial.name / "ledger.json").replace(ledger)
    experiment = trials.Experiment(
        name="x", title="X", trials=(trial,), figures={}
    )
    with pytest.raises(ValueError, match=f"at least 20 steps.* of {steps}:"):
        results.Results(experiment, tmp_path / "whole")
    ledger.unlink()
    with pytest.raises(ValueError, match="at least 20 steps.* of 0:"):
        results.Results(experiment, tmp_path / "whole")
