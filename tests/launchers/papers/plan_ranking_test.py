"""Pairs of methods: which are compared, and which were planned right."""

import json

import pytest

from tf_dpsub.configs import default
from tf_dpsub.launchers import papers
from tf_dpsub.launchers.papers import plan_ranking
from tf_dpsub.launchers.training import run_directory

PROJECTED = {
    "optimizer": "ProjectedDPSGD",
    "subspace": "PublicSubspace",
    "public_examples": 64,
}


def write(folder, name, accuracy, **fields):
    config = default.get_config()
    config.noise_multiplier = 4.0
    config.public_examples = 64
    config.batch_size = 256
    config.epochs = 1
    config.model_kwargs = {"hidden": (8,)}
    for field, value in fields.items():
        config[field] = value
    path = folder / name
    path.mkdir(parents=True)
    result = {
        "test_accuracy": accuracy,
        "config": run_directory.json_fields(config),
    }
    (path / "result.json").write_text(json.dumps(result), "utf-8")


def finished(folder):
    """Two settings: one with several methods, one with DP-SGD alone."""
    for seed, accuracy in enumerate((0.5, 0.6)):
        write(folder, f"dp_{seed}", accuracy, seed=seed)
        write(
            folder,
            f"pdp_{seed}",
            accuracy + 0.2,
            seed=seed,
            subspace_kwargs={"rank": 8},
            **PROJECTED,
        )
    write(folder, "dp_slow", 0.4, learning_rate=0.01)
    write(folder, "auto", 0.9, subspace_kwargs={"rank": "auto"}, **PROJECTED)
    write(folder, "other", 0.9, noise_multiplier=1.0)


def test_settings(tmp_path):
    finished(tmp_path)
    ((name, members),) = plan_ranking.settings(tmp_path).items()
    assert name == "mlp, σ = 4, 1 epochs"
    accuracies = {m.name: m.accuracies for m in members}
    # The better learning rate of DP-SGD; no rank that the planner cannot try.
    assert accuracies == {"DP-SGD": [0.5, 0.6], "PDP-SGD 8": [0.7, 0.8]}


def saved_plans(*planned):
    return {
        "setting": {
            "measured": [
                {"method": "DP-SGD", "rank": None, "accuracies": [0.5, 0.52]},
                {"method": "GEP", "rank": 5, "accuracies": [0.6, 0.62]},
                {"method": "GEP", "rank": 9, "accuracies": [0.61, 0.62]},
            ],
            "planned": dict(zip(("DP-SGD", "GEP 5", "GEP 9"), planned)),
        }
    }


def test_pairs():
    pairs = plan_ranking.pairs(saved_plans(0.3, 0.7, 0.6))
    assert [p.names for p in pairs] == [
        ("GEP 5", "GEP 9"), ("GEP 5", "DP-SGD"), ("GEP 9", "DP-SGD")
    ]  # fmt: skip
    assert [p.is_right for p in pairs] == [False, True, True]
    assert [p.is_decided for p in pairs] == [False, True, True]


def test_what_was_not_planned_is_left_out():
    pairs = plan_ranking.pairs(saved_plans(0.3, 0.7, None))
    assert [p.names for p in pairs] == [("GEP 5", "DP-SGD")]


@pytest.mark.slow
def test_study(tmp_path, capsys):
    finished(tmp_path / "pdp_mnist" / "trials")
    study = plan_ranking.PlanRanking()
    arguments = {
        "fraction": 0.005,
        "jobs": 1,
        "command": "the command",
        "inputs": papers.Inputs(),
    }
    folder = tmp_path / "plan_ranking"
    assert study.run(folder, study.points(), **arguments) == 0
    assert "planning pdp_mnist" in capsys.readouterr().out
    text = (folder / "table.md").read_text("utf-8")
    assert "Of 1 pairs of methods in 1 settings" in text
    assert (folder / "pairs.png").stat().st_size > 10_000
    pairs = json.loads((folder / "pairs.json").read_text("utf-8"))
    ((_, both),) = pairs.items()
    assert 0 <= both["planned"]["PDP-SGD 8"] <= 1
    # No setting is planned twice.
    study.run(folder, study.points(), **arguments)
    assert "planning" not in capsys.readouterr().out


def test_needs_finished_trials(tmp_path):
    study = plan_ranking.PlanRanking()
    with pytest.raises(ValueError, match="Expected finished trials"):
        study.run(
            tmp_path / "plan_ranking",
            study.points(),
            fraction=1.0,
            jobs=1,
            command="",
            inputs=papers.Inputs(),
        )
