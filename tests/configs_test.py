import importlib.util
import pathlib

import numpy as np
import pytest

from tests.models import checkpoints
from tf_dpsub import accounting, data
from tf_dpsub.configs import default
from tf_dpsub.launchers.training import config_checks, objects, tokens
from tf_dpsub.subspaces.groups import make_groups

FILES = sorted(
    path
    for path in (pathlib.Path(__file__).parents[1] / "configs").glob("[!_]*.py")
    if path.name != "default.py"
)
SHAPES = {
    "digits": (8, 8, 1),
    "mnist": (28, 28, 1),
    "fashion_mnist": (28, 28, 1),
    "cifar10": (32, 32, 3),
    "features.npz": (512,),
    "glue/sst2": (),
    "e2e": (),
}
EXAMPLES = {"digits": 1438, "mnist": 60_000, "cifar10": 50_000}


class LoadedAs:
    """What models and subspaces need to know of the data of a config."""

    def __init__(self, config):
        self.input_shape = SHAPES[config.dataset]
        self.is_text = self.input_shape == ()
        self.num_classes = None if config.dataset == "e2e" else 10
        if config.model == "prompted_classifier":
            self.num_classes = 2
        self.x_public = np.zeros((config.public_examples, *self.input_shape))
        self.y_public = np.zeros(config.public_examples, int)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def config(request):
    return load(request.param)


@pytest.fixture
def images(tmp_path):
    file = tmp_path / "images.npz"
    np.savez(file, images=np.zeros((40, 32, 32, 3), np.uint8))
    return str(file)


def is_without_public_data(config):
    return config.subspace == "PublicSubspace" and not config.public_examples


def named(stem):
    return load({path.stem: path for path in FILES}[stem])


def planned_epsilon(config):
    steps = config.epochs * -(-config.private_examples // config.batch_size)
    return accounting.epsilon(
        noise_multiplier=config.noise_multiplier,
        sampling_rate=config.batch_size / config.private_examples,
        steps=steps,
        delta=config.delta,
    )


class TestEveryConfig:
    def test_has_the_fields_that_the_launcher_reads(self, config):
        config_checks.check(config)
        assert set(config) == set(default.get_config())

    def test_refuses_unknown_fields(self, config):
        with pytest.raises(AttributeError, match="locked"):
            config.lerning_rate = 0.1

    def test_refuses_values_of_another_type(self, config):
        with pytest.raises(TypeError):
            config.epochs = "many"

    def test_names_a_model_and_an_optimizer_that_exist(
        self, config, images, tmp_path
    ):
        if is_without_public_data(config):
            config.public_data = images
        outputs = (10,)
        if config.model == "gpt2":
            checkpoints.write_gpt2_of_bytes(tmp_path)
            config.model_kwargs.folder = str(tmp_path)
            outputs = (None, 258)
        elif config.model == "prompted_classifier":
            checkpoints.write_masked(tmp_path)
            config.model_kwargs.folder = str(tmp_path)
            # Of what the small vocabulary has.
            config.model_kwargs.words = ("bad", "good")
            config.model_kwargs.sequence_length = 12
            outputs = (2,)
        loaded = LoadedAs(config)
        model = objects.plain_model(config, loaded)
        assert model.output_shape == (None, *outputs)
        examples = config.private_examples or EXAMPLES.get(
            config.dataset, 50_000
        )
        batches = data.PoissonBatches(
            np.zeros(examples), batch_size=config.batch_size
        )
        optimizer = objects.private_optimizer(
            config, batches, objects.subspace(config, loaded)
        )
        assert type(optimizer).__name__ == config.optimizer
        assert optimizer.l2_norm_clip == config.l2_norm_clip
        assert float(optimizer.learning_rate) == pytest.approx(
            config.learning_rate
        )

    def test_a_subspace_has_public_data_or_asks_for_them(self, config):
        if not is_without_public_data(config):
            objects.subspace(config, LoadedAs(config))
            return
        with pytest.raises(ValueError, match="Expected public examples"):
            objects.subspace(config, LoadedAs(config))


@pytest.mark.parametrize(
    "stem, message",
    [
        ("e2e_dpsgd", "Expected a model with a tokenizer for 'e2e'"),
        ("sst2_prompt_dpsgd", "Expected a folder with a checkpoint of BERT or"),
    ],
)
def test_a_language_model_must_be_named(stem, message):
    config = named(stem)
    loaded = LoadedAs(config)
    # A random one is small here.
    sizes = {"vocabulary_size": 9, "num_layers": 1, "num_heads": 1}
    sizes |= {"hidden_dim": 4, "intermediate_dim": 4}
    if config.model == "gpt2":
        config.model_kwargs = config.model_kwargs.to_dict() | sizes
    with pytest.raises(ValueError, match=message):
        model = objects.plain_model(config, loaded)
        loaded.name = config.dataset
        tokens.tokenized(loaded, model)


def test_digits_calibrates_its_noise_to_a_small_epsilon():
    config = named("digits_dpsgd")
    assert config.noise_multiplier is None
    assert config.epsilon == 2.0


def test_sst2_trains_query_and_value_matrices():
    config = named("sst2_dpsgd")
    model = objects.plain_model(config, LoadedAs(config))
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    # Two of each of 6 layers, of 12 heads.
    assert sorted(shapes) == [(12, 32)] * 12 + [(384, 12, 32)] * 12


@pytest.mark.parametrize("stem", ["mnist_dpsgd", "fashion_mnist_dpsgd"])
def test_mnist_and_fashion_mnist_are_the_setting_of_the_paper(stem):
    config = named(stem)
    assert config.private_examples == 10_000
    assert (config.optimizer, config.inner_optimizer) == ("DPSGD", "SGD")
    assert (config.batch_size, config.epochs) == (250, 30)
    assert (config.l2_norm_clip, config.noise_multiplier) == (1.0, 4.0)
    assert planned_epsilon(config) <= 1.1
    model = objects.plain_model(config, LoadedAs(config))
    assert model.count_params() == 26_010


@pytest.mark.parametrize(
    "stem, rate, rank, start_epoch",
    [("pdp_mnist", 0.1, 50, 1), ("pdp_fashion_mnist", 0.01, 70, 15)],
)
def test_pdp_sgd_is_the_setting_of_the_paper(stem, rate, rank, start_epoch):
    config = named(stem)
    plain = named(f"{config.dataset}_dpsgd")
    changed = {
        *("optimizer", "subspace", "subspace_kwargs", "public_examples"),
        *("start_epoch", "learning_rate", "noise_multiplier", "model_kwargs"),
    }
    assert {n for n in config if config[n] != plain[n]} <= changed
    assert config.subspace_kwargs.rank == rank
    assert config.public_examples == 100
    assert config.noise_multiplier == 18.0
    assert (config.learning_rate, config.start_epoch) == (rate, start_epoch)


@pytest.mark.parametrize(
    "stem, rank, groups", [("gep_mnist", 250, 3), ("gep_cifar10", 1000, 5)]
)
def test_gep_is_the_setting_of_the_paper(stem, rank, groups, images):
    config = named(stem)
    assert (config.batch_size, config.l2_norm_clip) == (1000, 10.0)
    assert config.optimizer_kwargs.residual_norm_clip == 2.0
    assert config.learning_rate == 0.1
    assert config.learning_rate_schedule == "halfway"
    assert config.random_public_labels
    # Shrinks weights as fast as a decay that passes through the momentum.
    inner = config.inner_optimizer_kwargs
    assert inner.weight_decay * (1 - inner.momentum) == pytest.approx(1e-4)
    assert config.subspace_kwargs.rank == rank
    model = objects.plain_model(config, LoadedAs(config))
    made = make_groups(
        model, model.trainable_variables, config.subspace_kwargs.groups
    )
    assert len(made) == groups


def test_groups_of_cifar10_are_input_stages_and_output():
    config = named("gep_cifar10")
    model = objects.plain_model(config, LoadedAs(config))
    sizes = [
        group.size
        for group in make_groups(
            model, model.trainable_variables, config.subspace_kwargs.groups
        )
    ]
    kernels = 9 * 16
    assert sizes[0] == 9 * 3 * 16 + 2 * 16
    assert sizes[1] == 6 * (kernels * 16 + 2 * 16)
    assert sizes[4] == 64 * 10 + 10
    assert sum(sizes) == model.count_params()
