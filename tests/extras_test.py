"""Errors and lines for users who did not install an extra."""

import configparser
import pathlib
import sys

import pytest

from tf_dpsub import extras, models
from tf_dpsub.launchers.training import tasks
from tf_dpsub.models import hugging_face

SETUP = pathlib.Path(__file__).parents[1] / "setup.cfg"


@pytest.fixture
def without(monkeypatch):
    """A function that makes imports of a package fail."""

    def hide(package):
        monkeypatch.setitem(sys.modules, package, None)
        for name in list(sys.modules):
            if name.startswith(package + "."):
                monkeypatch.setitem(sys.modules, name, None)

    return hide


def needs_nlp(package):
    return pytest.raises(
        ImportError,
        match=rf'^Expected {package} to be .* `pip install "tf_dpsub\[nlp\]"`',
    )


def test_a_module_that_is_installed():
    assert extras.require("json.decoder", "nlp") is sys.modules["json.decoder"]


@pytest.mark.parametrize(
    "name", ["bert_classifier", "gpt2", "prompted_classifier"]
)
def test_language_models(without, name):
    without("keras_hub")
    with needs_nlp("keras_hub"):
        models.NAMES[name](folder="anywhere")


def test_checkpoints(without, tmp_path):
    without("safetensors")
    with needs_nlp("safetensors"):
        hugging_face.Checkpoint.read(tmp_path, "bert")


def test_bleu_is_missed_before_training(without):
    class Loaded:
        num_classes = None

    without("sacrebleu")
    with needs_nlp("sacrebleu"):
        tasks.of(Loaded)


@pytest.mark.parametrize(
    "extra, packages",
    [
        ("nlp", {"keras-hub", "sacrebleu", "safetensors"}),
        ("tensorboard", {"tensorboard"}),
    ],
)
def test_the_extras_install_what_is_named(extra, packages):
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    listed = setup["options.extras_require"][extra]
    assert packages <= set(listed.split())
