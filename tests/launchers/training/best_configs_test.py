"""Recipes by one command, on real images."""

import importlib
import json

import numpy as np
import pytest

from tests.data.short_splits import read_at_most
from tests.models.checkpoints import write
from tf_dpsub import data, heads
from tf_dpsub.configs.best import mnist
from tf_dpsub.data import public_origins
from tf_dpsub.launchers.training import objects, recipes, training_run
from tf_dpsub.planning import rules

_NAMES = ("cifar10", "digits", "fashion_mnist", "mnist", "sst2")


def _config(name, public_data=None):
    config = importlib.import_module(f"tf_dpsub.configs.best.{name}")
    config = config.get_config()
    config.public_data = public_data
    return config


@pytest.mark.parametrize("name", _NAMES)
def test_recipe(name):
    config = recipes.with_recipe(_config(name), 50_000)
    head = heads.FullBatch(50_000, config.epsilon, config.delta)
    assert (config.batch_size, config.epochs) == (50_000, head.steps)
    rate = head.learning_rate / head.l2_norm_clip
    assert config.learning_rate == pytest.approx(rate)
    assert config.accountant == "pld"


@pytest.mark.parametrize(
    "name, kind, public",
    [
        ("mnist", "grey images", 2000),
        ("fashion_mnist", "grey images", 2000),
        ("cifar10", "coloured images", 2000),
        ("digits", "grey images", 200),
    ],
)
def test_recipe_is_what_the_rules_have_first(name, kind, public):
    """Without labels, for so many public images, and much noise."""
    situation = rules.Situation(kind=kind, noise=1e-3, public=public)
    features = _config(name).features
    (first, *_), (whiten, *_) = (
        rules.rule_of(table, situation).choices
        for table in (rules.REPRESENTATIONS, rules.WHITENING)
    )
    assert first == " and ".join(features.kinds)
    assert features.get("whiten", 1.0) == whiten
    assert rules.ranks(situation, None)[0] == features.rank


@pytest.mark.slow
def test_a_run_from_a_ridge_start(tmp_path):
    """It is ahead of any head that one step makes of zero."""
    config = _config("digits")
    config.ridge_start_examples = 200
    config.recipe_kwargs = {"steps": 1, "learning_rate": 1e-3}
    training_run.train(config, tmp_path / "run", results_only=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["test_accuracy"] > 0.8
    statement = (tmp_path / "run" / "privacy_statement.txt").read_text()
    assert "200 examples that the head was started from" in " ".join(
        statement.split()
    )


@pytest.mark.slow
@pytest.mark.usefixtures("data_dir")
def test_run(tmp_path, monkeypatch):
    """2,000 digits at epsilon 1, far above chance, without a public image."""
    config = mnist.get_config()
    config.public_examples = 60
    config.private_examples = 2000
    config.features.rank = 50
    config.recipe_kwargs = {"steps": 10}
    config.fixed_noise_seed = 0
    monkeypatch.setattr(objects, "_load", data.load)
    read_at_most(monkeypatch, train=2000, test=500)
    training_run.train(config, tmp_path / "run", results_only=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["test_accuracy"] > 0.5
    assert 0.99 < result["epsilon"] <= 1
    assert result["steps"] == 10


def test_sentences_are_scaled_by_the_lines_of_a_file(tmp_path):
    """The scales show in the model that is built."""
    (tmp_path / "texts.txt").write_text("good\nbad film\na e\nfilm e a\n")
    config = _config("sst2", str(tmp_path / "texts.txt"))
    config.model_kwargs = {
        "folder": str(write(tmp_path, "bert")),
        "sequence_length": 12,
        "rank": 2,
    }
    texts = np.array(["good film", "bad"], object)
    loaded = data.Dataset(
        name=config.dataset,
        x_train=texts,
        y_train=np.array([1, 0]),
        x_public=texts[:0],
        y_public=np.array([], int),
        x_test=texts,
        y_test=np.array([1, 0]),
        num_classes=2,
    )
    model = objects.plain_model(config, loaded)
    (origin,) = public_origins.origins_of(model)
    assert origin.examples == 4
    assert model(model.preprocessor(list(texts))).shape == (2, 2)
    config.public_examples = 3
    (origin,) = public_origins.origins_of(objects.plain_model(config, loaded))
    assert origin.examples == 3
    config.public_data = None
    with pytest.raises(ValueError, match="or of a file with texts"):
        objects.plain_model(config, loaded)


def test_no_public_images():
    config = _config("mnist")
    with pytest.raises(ValueError, match="public_data"):
        objects.public_examples(config, _NoPublic())


class _NoPublic:
    y_public = ()
