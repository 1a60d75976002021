"""Recipes by one command, on real images."""

import dataclasses
import importlib
import json

import numpy as np
import pytest

from tf_dpsub import heads
from tf_dpsub.launchers.training import objects, recipes, training_run

_NAMES = ("cifar10", "digits", "fashion_mnist", "mnist", "sst2")


def _config(name, public_data=None):
    config = importlib.import_module(f"tf_dpsub.configs.best.{name}")
    config = config.get_config()
    config.public_data = public_data
    return config


@pytest.fixture(scope="module")
def public_data(tmp_path_factory):
    """Random grey and coloured shapes: images of nobody."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (60, 8, 8, 3), np.uint8)
    images = coarse.repeat(4, 1).repeat(4, 2)
    path = tmp_path_factory.mktemp("public") / "images.npz"
    np.savez(path, images=images)
    return str(path)


@pytest.mark.parametrize("name", _NAMES)
def test_recipe(name):
    config = recipes.with_recipe(_config(name), 50_000)
    head = heads.FullBatch(50_000, config.epsilon, config.delta)
    assert (config.batch_size, config.epochs) == (50_000, head.steps)
    rate = head.learning_rate / head.l2_norm_clip
    assert config.learning_rate == pytest.approx(rate)
    assert config.accountant == "pld"


@pytest.mark.slow
@pytest.mark.usefixtures("data_dir")
def test_run(public_data, tmp_path):
    """2,000 digits at epsilon 1, far above chance, by features of shapes."""
    config = _config("mnist", public_data)
    config.private_examples = 2000
    config.features.rank = 50
    config.recipe_kwargs = {"steps": 10}
    config.fixed_noise_seed = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_load", _first(objects._load, 500))
        training_run.train(config, tmp_path / "run", results_only=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["test_accuracy"] > 0.5
    assert 0.99 < result["epsilon"] <= 1
    assert result["steps"] == 10


def _first(load, count):
    """Loads data with fewer test examples."""

    def loaded(*args, **kwargs):
        data = load(*args, **kwargs)
        return dataclasses.replace(
            data, x_test=data.x_test[:count], y_test=data.y_test[:count]
        )

    return loaded


def test_no_public_images():
    config = _config("mnist")
    with pytest.raises(ValueError, match="public_data"):
        objects.public_examples(config, _NoPublic())


class _NoPublic:
    y_public = ()
