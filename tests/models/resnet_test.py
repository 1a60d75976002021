import re

import keras
import numpy as np
import pytest

from tf_dpsub.models import (
    resnet20_gn,
    wide_resnet_gn,
    wrn28_2_gn,
    wrn28_4_gn,
)


def test_resnet20_is_the_papers_network():
    model = resnet20_gn()
    assert model.count_params() == 272_474
    kernels = [w for w in model.weights if w.name == "kernel"]
    # 19 convolutions and the classifier, and two projection shortcuts.
    assert len(kernels) == 20 + 2


def test_wide_resnet_28_4_is_the_papers_network():
    model = wide_resnet_gn()
    assert model.count_params() == 5_849_050
    kernels = [w for w in model.weights if w.name == "kernel"]
    # 25 convolutions and the classifier, and three projection shortcuts.
    assert len(kernels) == 26 + 3


def test_the_networks_of_the_rgp_paper():
    assert wrn28_4_gn().count_params() == 5_849_050
    assert wrn28_2_gn().count_params() == 1_467_610


@pytest.mark.parametrize("build", [resnet20_gn, wide_resnet_gn])
def test_two_stages_halve_the_image(build):
    model = build(input_shape=(8, 8, 1))
    assert model.layers[-2].input.shape[1:3] == (2, 2)


@pytest.mark.parametrize("build", [resnet20_gn, wide_resnet_gn])
def test_no_example_sees_another(build):
    model = build(input_shape=(8, 8, 1))
    x = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype("float32")
    poisoned = x.copy()
    poisoned[1:] = np.nan
    clean = keras.ops.convert_to_numpy(model(x, training=True))[0]
    beside_nan = keras.ops.convert_to_numpy(model(poisoned, training=True))[0]
    np.testing.assert_array_equal(beside_nan, clean)


@pytest.mark.parametrize("depth", [4, 20, 27, 0])
def test_refuses_a_depth_no_wide_resnet_has(depth):
    with pytest.raises(ValueError, match=f"depth = 6n \\+ 4.*got {depth}"):
        wide_resnet_gn(depth=depth)


@pytest.mark.parametrize("build", [resnet20_gn, wide_resnet_gn])
def test_layers_with_weights_are_named_by_their_place(build):
    pattern = r"input_\w+|stage[123]_block[1-4]_\w+|output_norm|logits"
    # Names do not depend on what else was built.
    for _ in range(2):
        names = [layer.name for layer in build().layers if layer.weights]
        assert [n for n in names if not re.fullmatch(pattern, n)] == []
