"""Settings that follow from a recipe, and advice to take one."""

import numpy as np
import pytest

from tf_dpsub import accounting
from tf_dpsub.configs import default
from tf_dpsub.configs.best import mnist
from tf_dpsub.data import Dataset
from tf_dpsub.launchers.training import config_plan, recipes


def test_settings_of_a_recipe():
    config = mnist.get_config()
    config.recipe_kwargs = {"steps": 5, "learning_rate": 2.0}
    config = recipes.with_recipe(config, 1000)
    assert (config.epochs, config.learning_rate) == (5, pytest.approx(20))


def test_a_start_from_public_examples_halves_the_rate():
    config = mnist.get_config()
    rate = recipes.with_recipe(config, 1000).learning_rate
    config.ridge_start_examples = 100
    started = recipes.with_recipe(config, 1000)
    assert started.learning_rate == pytest.approx(rate / 2)


def test_a_config_without_a_recipe_stays():
    config = mnist.get_config()
    config.recipe = None
    assert recipes.with_recipe(config, 1000) is config


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"recipe": "half_batch"}, "Did you mean 'full_batch'"),
        ({"epsilon": None, "noise_multiplier": 1.0}, "epsilon with a recipe"),
        ({"recipe_kwargs": {"rate": 1.0}}, "the recipe in the config"),
    ],
)
def test_errors(changes, message):
    config = mnist.get_config()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        recipes.with_recipe(config, 1000)


def test_a_budget_of_a_person_is_a_smaller_one_of_a_row():
    """By the noise that keeps both, in each of all steps."""
    config = mnist.get_config()
    config.rows_per_person = 4
    of_row = recipes._epsilon_of_row(config)
    run = {"delta": config.delta, "sampling_rate": 1.0, "steps": 50}
    assert accounting.noise_multiplier(epsilon=of_row, **run) == pytest.approx(
        accounting.noise_multiplier(
            epsilon=config.epsilon, rows_per_person=4, **run
        ),
        rel=1e-3,
    )
    settings = recipes.with_recipe(config, 1000)
    config.rows_per_person, config.epsilon = None, of_row
    for name in ("l2_norm_clip", "learning_rate", "epochs"):
        assert settings[name] == recipes.with_recipe(config, 1000)[name]


@pytest.mark.parametrize(
    "plan", [config_plan.plan_of, config_plan.recommendation_of]
)
def test_a_plan_is_by_the_epsilon_of_a_row(plan):
    config = mnist.get_config()
    config.rows_per_person = 4
    with pytest.raises(ValueError, match="by the ε of one row, got 4"):
        plan(config)


def _dataset(name, x):
    return Dataset(
        name=name,
        x_train=x,
        y_train=np.zeros(len(x), int),
        x_public=x[:0],
        y_public=np.zeros(0, int),
        x_test=x,
        y_test=np.zeros(len(x), int),
        num_classes=2,
    )


_IMAGES = _dataset("mnist", np.zeros((2, 28, 28, 1), "float32"))
_TEXTS = _dataset("glue/sst2", np.array(["good", "bad"], object))
_NUMBERS = _dataset("numbers.npz", np.zeros((2, 5), "float32"))


def _config(dataset, model="mnist_cnn", **changes):
    config = default.get_config()
    with config.unlocked():
        config.update({"dataset": dataset, "model": model, **changes})
    return config


def test_training_images_from_scratch_through_much_noise():
    advice = recipes.advice(_config("mnist"), _IMAGES, 0.5)
    assert "mnist_cnn learns from scratch" in advice
    assert advice.endswith("try --config=configs/best/mnist.py")


def test_training_texts_from_scratch_through_much_noise():
    config = _config("imdb_reviews", "bert_classifier")
    advice = recipes.advice(config, _TEXTS, 0.99)
    assert advice.endswith("try docs/frozen_features.md")


@pytest.mark.parametrize(
    "loaded, epsilon, changes",
    [
        (_IMAGES, 1.0, {}),
        (_IMAGES, 0.5, {"model": "feature_classifier"}),
        (_IMAGES, 0.5, {"initial_weights": "start.keras"}),
        (_TEXTS, 0.5, {"model_kwargs": {"folder": "bert"}}),
        (_NUMBERS, 0.5, {"model": "mlp"}),
    ],
    ids=["little noise", "features", "a start", "pretrained", "numbers"],
)
def test_nothing_to_advise(loaded, epsilon, changes):
    config = _config(loaded.name, **changes)
    assert recipes.advice(config, loaded, epsilon) is None


@pytest.mark.parametrize(
    "dataset, kind, name",
    [
        ("fashion_mnist", "grey images", "fashion_mnist"),
        ("svhn_cropped", "coloured images", "cifar10"),
        ("vectors.npz", "vectors", "mnist"),
    ],
)
def test_config_of_a_recipe(dataset, kind, name):
    path = recipes.path(dataset, kind)
    assert path == f"configs/best/{name}.py"
    assert recipes.config_at(path).recipe == "full_batch"
