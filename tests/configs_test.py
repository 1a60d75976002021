import importlib.util
import pathlib

import numpy as np
import pytest

from launchers import config_objects, train_config
from tf_dpsub import accounting, data

FILES = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.py"))
SHAPES = {
    "digits": (8, 8, 1),
    "mnist": (28, 28, 1),
    "fashion_mnist": (28, 28, 1),
}


class LoadedAs:
    """What a model needs to know of the data of a config."""

    def __init__(self, config):
        self.input_shape = SHAPES[config.dataset]
        self.num_classes = 10


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def config(request):
    return load(request.param)


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
        config_objects.check(config)
        assert set(config) == set(train_config.default_config())

    def test_refuses_unknown_fields(self, config):
        with pytest.raises(AttributeError, match="locked"):
            config.lerning_rate = 0.1

    def test_refuses_values_of_another_type(self, config):
        with pytest.raises(TypeError):
            config.epochs = "many"

    def test_names_a_model_and_an_optimizer_that_exist(self, config):
        model = config_objects.plain_model(config, LoadedAs(config))
        assert model.output_shape == (None, 10)
        examples = config.private_examples or 1438
        batches = data.PoissonBatches(
            np.zeros(examples), batch_size=config.batch_size
        )
        optimizer = config_objects.private_optimizer(config, batches)
        assert type(optimizer).__name__ == config.optimizer
        assert optimizer.l2_norm_clip == config.l2_norm_clip
        assert float(optimizer.learning_rate) == pytest.approx(
            config.learning_rate
        )


def test_digits_calibrates_its_noise_to_a_small_epsilon():
    config = named("digits_dpsgd")
    assert config.noise_multiplier is None
    assert config.epsilon == 2.0


@pytest.mark.parametrize("stem", ["mnist_dpsgd", "fashion_mnist_dpsgd"])
def test_mnist_and_fashion_mnist_are_the_setting_of_the_paper(stem):
    config = named(stem)
    assert config.private_examples == 10_000
    assert (config.optimizer, config.inner_optimizer) == ("DPSGD", "SGD")
    assert (config.batch_size, config.epochs) == (250, 30)
    assert (config.l2_norm_clip, config.noise_multiplier) == (1.0, 4.0)
    assert planned_epsilon(config) <= 1.1
    model = config_objects.plain_model(config, LoadedAs(config))
    assert model.count_params() == 26_010
