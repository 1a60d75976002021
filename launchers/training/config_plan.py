"""Plans from training configs."""

import copy

import keras

from tf_dpsub import planning
from tf_dpsub.launchers.training import config_checks, objects, tasks, tokens

LABELLED = ("public", "test")


def plan_of(
    config,
    labelled="public",
    max_examples=1000,
    *,
    best_batch_size=False,
    search=None,
    simulation=None,
    measure_cost=True,
):
    """Plans the run that a config describes, from public examples.

    Formal guarantees: of the private examples, only their number is read.

    Args:
        config: `ml_collections.ConfigDict`. Its optimizer, clip and learning
            rate are those of the simulated run.
        labelled: string, the labelled examples that stand for the private ones:
            `"public"`, those of the config, or `"test"`, the test split, which
            is taken to be public. Defaults to `"public"`.
        max_examples: int, the largest number of labelled examples to use.
            Defaults to `1000`.
        best_batch_size: bool, whether the plan chooses the batch size, instead
            of the config. Defaults to `False`.
        search: dict, arguments of `tf_dpsub.planning.SearchSpace` beside those
            that the config has. Defaults to `None`.
        simulation: dict, arguments of `tf_dpsub.planning.Simulation` beside
            the config's optimizer and clip. Defaults to `None`.
        measure_cost: bool, as for `tf_dpsub.planning.plan`. Defaults to `True`.

    Returns:
        A `tf_dpsub.planning.Plan`.

    Raises:
        ValueError: if the config does not fit, or there are no such examples.
    """
    config_checks.check(config)
    config_checks.choose(dict.fromkeys(LABELLED), labelled, "a split")
    config = copy.deepcopy(config)
    carriers = config.reparametrize.to_dict()
    carriers.pop("rank", None)
    config.reparametrize = {}
    keras.utils.set_random_seed(config.seed)
    dataset = objects.dataset(config)
    plain = objects.plain_model(config, dataset)
    task = tasks.of(dataset)
    dataset = tokens.tokenized(dataset, plain)
    if getattr(plain, "preprocessor", None) is not None:
        plain.preprocessor = None
    if labelled == "public" and not len(dataset.y_public):
        raise ValueError(
            "Expected labelled public examples, got none. Set public_examples "
            "in the config, or look at the test split, which is taken to be "
            "public, by --labelled=test."
        )
    x, y = keras.tree.map_structure(
        lambda a: a[:max_examples],
        (getattr(dataset, f"x_{labelled}"), getattr(dataset, f"y_{labelled}")),
    )
    basis = None
    if config.public_data is not None:
        (images,) = objects.public_examples(config, dataset)
        basis = (images, None)
    has_budget = config.noise_multiplier is None
    return planning.plan(
        plain,
        x,
        y,
        loss=task.loss(),
        run=planning.PlannedRun(
            examples=len(dataset.y_train),
            epochs=config.epochs,
            delta=config.delta,
            epsilon=config.epsilon if has_budget else None,
            noise_multiplier=config.noise_multiplier,
            batch_size=None if best_batch_size else config.batch_size,
            accountant=config.accountant,
        ),
        search=planning.SearchSpace(
            carriers=carriers,
            groups=config.subspace_kwargs.get("groups", 1),
            basis=basis,
            **(search or {}),
        ),
        simulation=planning.Simulation(
            # A constant rate: the simulation ends before a schedule would.
            optimizer=objects.inner_optimizer(_constant(config), 1),
            l2_norm_clip=config.l2_norm_clip,
            **(simulation or {}),
        ),
        measure_cost=measure_cost,
        seed=config.seed,
    )


def _constant(config):
    config = copy.deepcopy(config)
    config.learning_rate_schedule = "constant"
    return config
