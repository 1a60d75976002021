"""PATE on a few of scikit-learn's digits."""

import dataclasses
import json

import numpy as np
import pytest

from tests.launchers.programs import run_main
from tf_dpsub import accounting, data
from tf_dpsub.launchers import reproduce
from tf_dpsub.launchers.papers import pate_mnist as study
from tf_dpsub.launchers.papers.engine import consistency_student


@pytest.fixture(name="images", scope="module")
def _images():
    loaded = data.load("digits")
    of = study._features()
    return study.Images(
        private=of(loaded.x_train),
        private_labels=loaded.y_train,
        public=loaded.x_test,
        public_features=of(loaded.x_test).astype(np.float32),
        public_labels=loaded.y_test,
        split=300,
    )


@pytest.fixture
def small(monkeypatch, images):
    """Few teachers; students are not trained, but counted."""
    for name, value in {
        "_TEACHERS": 12,
        "_THRESHOLD": 8,
        "_THRESHOLD_NOISE": 4.0,
        "_NOISE": 2.0,
        "_QUERIES": 60,
        "_ANSWERS": 30,
        "_PUBLIC": 300,
        "_STUDENT_STEPS": 100,
        "_SEEDS": range(2),
    }.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "_images", lambda: images)
    trained = []

    class Student:
        def predict(self, x, verbose):
            return np.eye(10)[np.zeros(len(x), int)]

    def train(x_labelled, labels, x_unlabelled, classes, *, steps, seed):
        trained.append((len(x_labelled), len(x_unlabelled), steps, seed))
        return Student()

    monkeypatch.setattr(consistency_student, "train", train)
    return trained


def run(tmp_path, capsys, **values):
    values = {"experiment": "pate_mnist", "workdir": str(tmp_path)} | values
    return run_main(reproduce, capsys, **values)


def test_teachers_vote_better_than_one_of_them(small, images):
    votes = study.teachers_votes(images, seed=0)
    assert votes.shape == (60, 12)
    truth = images.public_labels[:60]
    one = np.mean(votes == truth[:, None])
    counts = (votes[..., None] == np.arange(10)).sum(1)
    assert 0.8 < one < np.mean(counts.argmax(1) == truth)


def test_one_example_changes_one_teacher(small, images):
    """Its replacement by an empty one: the votes of the others are the same."""
    private, labels = images.private.copy(), images.private_labels.copy()
    private[17], labels[17] = 0, (labels[17] + 1) % 10
    other = dataclasses.replace(images, private=private, private_labels=labels)
    votes, moved = (study.teachers_votes(i, seed=3) for i in (images, other))
    assert np.sum((votes != moved).any(0)) <= 1


class TestRun:
    def test_writes_a_table_and_keeps_the_ledger(self, small, tmp_path, capsys):
        out, _, code = run(tmp_path, capsys)
        assert code == 0
        assert "2 runs, 0 finished, 2 to run" in out
        assert "NOT TO BE PUBLISHED" in out
        folder = tmp_path / "pate_mnist"
        text = (folder / "table.md").read_text("utf-8")
        assert "not to be published" in text and "98.5 %" in text
        assert "| seed0 |" in text and "| seed1 |" in text
        ledger = accounting.PrivacyLedger(folder / "ledger_seed0.json")
        assert [e.steps for e in ledger.entries] == [60, 30]
        saved = json.loads((folder / "points.json").read_text("utf-8"))
        result = saved["points"]["seed0"]
        assert result["epsilon"] == ledger.epsilon(1e-5)
        assert 0 < result["data_dependent_epsilon"]
        assert 0.7 < result["linear"] <= 1 and 0.8 < result["right"] <= 1
        assert small == [
            (saved["points"][f"seed{s}"]["answered"], 300, 100, s)
            for s in (0, 1)
        ]
        assert (folder / "accuracy.png").stat().st_size > 5000
        statement = (folder / "privacy_seed0.txt").read_text("utf-8")
        assert "60 checks" in statement and "30 answers" in statement
        # Votes are in no file.
        assert not any("votes" in f.name for f in folder.iterdir())

    def test_goes_on_where_it_stopped(
        self, small, tmp_path, capsys, monkeypatch
    ):
        def stopped(*args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(consistency_student, "train", stopped)
            *_, code = run(tmp_path, capsys, only="seed0")
        assert code == 130
        file = tmp_path / "pate_mnist" / "ledger_seed0.json"
        before = accounting.PrivacyLedger(file).steps
        run(tmp_path, capsys, only="seed0")
        # The answers were there: teachers are not asked again.
        assert accounting.PrivacyLedger(file).steps == before == 90
        out, *_ = run(tmp_path, capsys)
        assert "2 runs, 1 finished, 1 to run" in out
        assert len(small) == 2

    def test_answers_that_were_lost_are_not_bought_again(
        self, small, tmp_path, capsys
    ):
        run(tmp_path, capsys, only="seed0")
        folder = tmp_path / "pate_mnist"
        (folder / "answers_seed0.json").unlink()
        (folder / "points.json").unlink()
        _, error, _ = run(tmp_path, capsys, only="seed0")
        assert "Expected queries within" in error
        assert len(small) == 1

    def test_a_fraction_is_of_the_students_steps(self, small, tmp_path, capsys):
        run(tmp_path, capsys, fraction=0.5, only="seed0")
        text = (tmp_path / "pate_mnist" / "table.md").read_text("utf-8")
        assert "Shortened: 0.5 of the student's steps." in text
        _, error, _ = run(tmp_path, capsys)
        assert "runs of 100 steps" in error


def test_student_learns_from_few_labels(images, monkeypatch):
    """More of the other images than guessing, in a few steps."""
    monkeypatch.setattr(consistency_student, "_MOMENTUM", 0.5)
    labelled = slice(None, 60)
    student = consistency_student.train(
        images.public[labelled],
        images.public_labels[labelled],
        images.public[:300],
        10,
        steps=35,
        seed=0,
    )
    outputs = student.predict(images.public[60:], verbose=0)
    assert np.mean(outputs.argmax(1) == images.public_labels[60:]) > 0.2


def test_changed_images_stay_images(images):
    x = images.public[:50]
    same = consistency_student._changed(x, 0.0, 0.0, 0.0).numpy()
    np.testing.assert_allclose(same, x, atol=1e-6)
    changed = consistency_student._changed(x, 0.2, 0.3, 0.2).numpy()
    assert changed.shape == x.shape and np.isfinite(changed).all()
    assert np.abs(changed - x).mean() > 0.05
    cut = consistency_student._cut(np.ones_like(x)).numpy()
    assert set(np.unique(cut)) == {0.0, 1.0}
