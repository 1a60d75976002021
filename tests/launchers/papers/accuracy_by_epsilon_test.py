"""Accuracy by epsilon, on random features and on scikit-learn's digits."""

import dataclasses
import json
import os
import shutil
import stat

import numpy as np
import pytest

from tests.launchers.programs import run_main
from tf_dpsub.configs.best import digits
from tf_dpsub.launchers import papers, reproduce
from tf_dpsub.launchers.papers import accuracy_by_epsilon as study
from tf_dpsub.launchers.papers.engine import feature_cache, linear_heads
from tf_dpsub.launchers.training import objects


@pytest.fixture(scope="module")
def public_images(tmp_path_factory):
    """Random shapes, of the size of a digit."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (40, 4, 4, 1), np.uint8)
    path = tmp_path_factory.mktemp("public") / "images.npz"
    np.savez(path, images=coarse.repeat(2, 1).repeat(2, 2))
    return str(path)


@pytest.fixture(scope="class")
def small():
    """Digits at one epsilon, with a small grid."""
    task = study.Task(
        name="digits", title="Digits", config=_digits, held_out=300
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "TASKS", (task,))
        patch.setattr(study, "_EPSILONS", ((4.0,),))
        patch.setattr(study, "_SEEDS", (1, 2))
        patch.setattr(study, "_RATES", (1.0, 2.0))
        patch.setattr(study, "_CLIPS", (0.1,))
        patch.setattr(study, "_START_CLIP", 0.1)
        patch.setattr(study, "_STEPS", (60,))
        patch.setattr(study, "_RANKS", (16,))
        patch.setattr(study, "_WHITEN", (0.5,))
        patch.setattr(study, "_START_WHITEN", 0.5)
        yield task


def _digits():
    config = digits.get_config()
    config.public_examples = 0
    return config


@pytest.fixture(scope="class")
def finished(small, public_images, tmp_path_factory):
    """The folder of a finished run, which is not to be changed."""
    workdir = tmp_path_factory.mktemp("finished")
    experiment = study.AccuracyByEpsilon()
    code = experiment.run(
        workdir / experiment.name,
        experiment.points(),
        fraction=0.05,
        jobs=1,
        command="the command",
        inputs=papers.Inputs(public_images=public_images),
    )
    assert code == 0
    return workdir / experiment.name


@pytest.fixture
def copied(finished, tmp_path):
    folder = tmp_path / finished.name
    shutil.copytree(finished, folder)
    return folder


def run(tmp_path, capsys, **values):
    values = {
        "experiment": "accuracy_by_epsilon",
        "workdir": str(tmp_path),
        "fraction": 0.05,
    } | values
    return run_main(reproduce, capsys, **values)


def test_what_is_held_out_is_not_trained_on():
    x, y = np.arange(10.0)[:, None], np.arange(10)
    whole = feature_cache.Split(x_train=x, y_train=y, x_test=-x, y_test=-y)
    split = whole.held_out(3)
    np.testing.assert_array_equal(split.y_train, np.arange(7))
    np.testing.assert_array_equal(split.x_test[:, 0], [7, 8, 9])


@pytest.mark.slow
class TestRun:
    def test_writes_a_table_and_a_figure(self, finished):
        text = (finished / "table.md").read_text("utf-8")
        assert "Shortened: 0.05 of the steps." in text
        _, accuracies, settings = text.split("\n## ")
        (line,) = [s for s in accuracies.splitlines() if s.startswith("| 4 ")]
        assert line.count(" ± ") == 2
        rows = [row.split(" | ") for row in settings.splitlines()[4:]]
        assert [row[2] for row in rows] == list(study._METHODS)
        private, simulated = rows
        # Rounded up, from at most the ε that was asked for.
        assert 3.99 < float(private[9]) <= 4.01
        assert simulated[9] == "simulated"
        assert (finished / "accuracy.png").stat().st_size > 10_000

    def test_the_best_of_the_held_out_part_is_reported(self, finished):
        (row, _) = study.finished_rows(
            study.AccuracyByEpsilon().points(), finished, 0.05
        )
        tuned = {}
        for file in finished.glob("trials/*_simulated_rank*.json"):
            held = json.loads(file.read_text())
            del held["setting"]["steps"]
            tuned[held["accuracy"]] = held["setting"]
        chosen = dataclasses.asdict(row.setting)
        assert tuned[max(tuned)] == {n: chosen[n] for n in tuned[max(tuned)]}
        assert [r["seed"] for r in row.results] == [1, 2]
        # 1,437 training examples, of which 300 were held out.
        assert {r["examples"] for r in row.results} == {1438}
        assert held["examples"] == 1138

    def test_what_is_finished_is_not_run_again(
        self, copied, public_images, capsys, monkeypatch
    ):
        monkeypatch.setattr(linear_heads, "train", None)
        monkeypatch.setattr(linear_heads, "simulate", None)
        out, _, code = run(copied.parent, capsys, public_images=public_images)
        assert (code, "simulated" in out) == (0, False)

    def test_another_epsilon_starts_where_the_nearest_ended(
        self, small, finished
    ):
        (row, other) = study.finished_rows(
            [study.Point(small, 4.0)], finished, 0.05
        )
        trials = study._Trials(study.Point(small, 1.0), finished, 0.05)
        assert trials._starts() == {
            row.method: dataclasses.asdict(row.setting),
            other.method: dataclasses.asdict(other.setting),
        }

    @pytest.mark.parametrize(
        "features, seeds",
        [("_test_rank*", [1, 2]), ("_simulated_test_all_*", [2, 1])],
    )
    def test_a_missing_seed_is_run_again_and_shown_as_missing(
        self, small, copied, public_images, capsys, features, seeds
    ):
        (file,) = copied.glob(f"trials/*{features}_seed2.json")
        held = json.loads(file.read_text())
        file.unlink()
        rows = study.finished_rows([study.Point(small, 4.0)], copied, 0.05)
        assert [len(row.results) for row in rows] == seeds
        assert "(1 of 2 seeds)" in study.table("", rows, 0.05, "")
        out, *_ = run(copied.parent, capsys, public_images=public_images)
        assert out.count("digits_epsilon4_") == 1
        assert json.loads(file.read_text())["accuracy"] == held["accuracy"]

    def test_features_are_those_of_the_model_and_for_their_owner_alone(
        self, small, finished, public_images
    ):
        folder = finished / "features" / "digits"
        for path in folder.iterdir():
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        config = study.feature_config(
            small, papers.Inputs(public_images=public_images)
        )
        cache = feature_cache.FeatureCache(folder, config)
        loaded = objects.dataset(config)
        for rank, whiten in ((None, None), (10, 0.5)):
            config.features = {"kinds": ("scattering",), "seed": 0} | (
                {} if rank is None else {"rank": rank, "whiten": whiten}
            )
            plain = objects.plain_model(config, loaded)
            features = np.asarray(
                plain.get_layer("features")(loaded.x_test)
            ).reshape(len(loaded.y_test), -1)
            found = cache.split(rank, whiten)
            # Directions are found up to their sign, features rounded.
            np.testing.assert_allclose(
                np.abs(found.x_test.astype(np.float32)),
                np.abs(features),
                atol=2e-3 * np.abs(features).max(),
            )
            np.testing.assert_array_equal(found.y_test, loaded.y_test)

    def test_other_public_images_are_refused(
        self, copied, public_images, tmp_path, capsys
    ):
        with np.load(public_images) as held:
            images = held["images"]
        other = tmp_path / "other.npz"
        np.savez(other, images=images[:30])
        _, err, code = run(copied.parent, capsys, public_images=str(other))
        assert "to hold the features of digits as they are configured" in err
        assert code != 0


class TestFlags:
    def test_names_rows(self, tmp_path, capsys):
        out, _, code = run(
            tmp_path, capsys, dry_run=True, only="mnist_epsilon1"
        )
        assert out.split() == ["mnist_epsilon1", "fashion_mnist_epsilon1"]
        assert code == 0

    @pytest.mark.parametrize(
        "only, flag", [("^mnist", "public_images"), ("sst2", "public_texts")]
    )
    def test_public_data_are_needed(self, only, flag, tmp_path, capsys):
        _, err, code = run(tmp_path, capsys, only=only)
        assert f"Expected --{flag}=FILE" in err
        assert not list(tmp_path.iterdir())
