"""Recipes: the settings that they give a config, and advice to use one."""

import importlib

from tf_dpsub import accounting, heads
from tf_dpsub.launchers.training.config_checks import choose, construct
from tf_dpsub.planning.rules import LEAST_EPSILON_FROM_SCRATCH
from tf_dpsub.primitives import clipping

# Configs of configs/best, by data set.
_RECIPES = {
    "cifar10": "cifar10",
    "digits": "digits",
    "fashion_mnist": "fashion_mnist",
    "glue/sst2": "sst2",
    "mnist": "mnist",
}
# That of other data sets, by the kind of their inputs.
_RECIPES_OF_KINDS = {
    "coloured images": "cifar10",
    "grey images": "mnist",
    "texts": "sst2",
    "vectors": "mnist",
}


def with_recipe(config, examples):
    """Gives a config the settings of its recipe.

    Args:
        config: `ml_collections.ConfigDict`.
        examples: int, number of private examples.

    Returns:
        The config, or a copy with the settings of the recipe.

    Raises:
        ValueError: if the recipe does not fit the config.
    """
    if config.recipe is None:
        return config
    choose({"full_batch": None}, config.recipe, "a recipe")
    if config.epsilon is None:
        raise ValueError(
            "Expected an epsilon with a recipe, which chooses its settings by "
            "it, got a noise_multiplier alone."
        )
    head = construct(
        heads.FullBatch,
        config.recipe_kwargs,
        "the recipe",
        examples,
        _epsilon_of_row(config),
        config.delta,
        public_start=config.ridge_start_examples > 0,
    )
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.optimizer = "DPSGD"
        config.inner_optimizer = "SGD"
        config.inner_optimizer_kwargs = {"momentum": head.momentum}
        config.learning_rate = head.learning_rate / head.l2_norm_clip
        config.l2_norm_clip = head.l2_norm_clip
        config.accountant = "pld"
        config.batch_size = examples
        config.microbatch_size = min(examples, clipping.LARGEST_MICROBATCH)
        config.epochs = head.steps
    return config


def _epsilon_of_row(config):
    """Epsilon of one row, where that of a person is the one of the config.

    All rows are in each step. Those of a person are as one row, with as many
    times less noise.
    """
    rows = config.rows_per_person or 1
    if rows == 1:
        return config.epsilon
    once = {"delta": config.delta, "sampling_rate": 1.0, "steps": 1}
    of_person = accounting.noise_multiplier(epsilon=config.epsilon, **once)
    return accounting.epsilon(noise_multiplier=rows * of_person, **once)


def advice(config, loaded, epsilon: float) -> str | None:
    """Recommends a recipe to a run that trains from scratch at a small ε.

    Args:
        config: `ml_collections.ConfigDict`.
        loaded: `tf_dpsub.data.Dataset`.
        epsilon: float, of the whole run.

    Returns:
        A string; None where no recipe is recommended.
    """
    is_image = not loaded.is_text and len(loaded.input_shape) == 3
    if (
        epsilon >= LEAST_EPSILON_FROM_SCRATCH
        or has_features(config)
        or not (is_image or loaded.is_text)
    ):
        return None
    cure = "docs/frozen_features.md"
    if config.dataset in _RECIPES:
        cure = f"--config={path(config.dataset)}"
    return (
        f"{config.model} learns from scratch, which at ε = {epsilon:.2g} "
        "leaves it far behind a private head on features that cost no "
        f"privacy: try {cure}"
    )


def has_features(config) -> bool:
    """Whether a config's model begins with features that were learned before.

    Args:
        config: `ml_collections.ConfigDict`.
    """
    return any(
        (
            config.model in ("feature_classifier", "sentence_classifier"),
            config.initial_weights is not None,
            {"preset", "folder"} & set(config.model_kwargs),
        )
    )


def path(dataset: str, kind: str | None = None) -> str:
    """The file of the recipe for a data set.

    Args:
        dataset: string.
        kind: string, of its inputs, as `tf_dpsub.planning.Recommendation` has
            it, where it has no recipe of its own. Defaults to `None`.
    """
    name = _RECIPES.get(dataset)
    if name is None and kind is not None:
        name = _RECIPES_OF_KINDS[kind]
    return f"configs/best/{name}.py"


def config_at(path: str):
    """The config of a recipe.

    Args:
        path: string, as `path` returns it.

    Returns:
        `ml_collections.ConfigDict`.
    """
    name = path.removesuffix(".py").replace("/", ".")
    return importlib.import_module(f"tf_dpsub.{name}").get_config()
