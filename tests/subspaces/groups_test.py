"""Every weight is in one group, and ranks add up to what was asked for."""

import itertools
import math

import keras
import numpy as np
import pytest

from tf_dpsub import models
from tf_dpsub.subspaces import groups

layers = keras.layers


def network():
    """Layers of 20, 40, 2, 12, 6 and 15 weights, two of them nested."""
    inner = keras.Sequential(
        [
            keras.Input((4,)),
            layers.LayerNormalization(center=False, scale=False),
            layers.Dense(3, use_bias=False, name="inner"),
            layers.Dense(2, use_bias=False, name="inner_too"),
        ],
        name="block",
    )
    inputs = keras.Input((5,))
    x = layers.Dense(4, use_bias=False, name="first")(inputs)
    x = layers.Activation("relu", name="relu")(x)
    x = layers.Dense(8, name="second")(x)
    x = layers.Dense(4, use_bias=False, name="wide")(x)
    x = inner(x)
    return keras.Model(inputs, layers.Dense(5, name="last")(x), name="net")


def make(groups_argument, model=None):
    model = model or network()
    return groups.make_groups(model, model.trainable_variables, groups_argument)


def sizes(made):
    return [group.size for group in made]


def check_partition(made, model):
    """Each weight is in one group, and sizes count the weights."""
    variables = model.trainable_variables
    indices = [k for group in made for k in group.indices]
    assert sorted(indices) == list(range(len(variables)))
    for group in made:
        assert group.size == sum(
            math.prod(variables[k].shape) for k in group.indices
        )


class TestByCount:
    # first, second, wide, inner, inner_too, last
    LAYERS = [20, 40, 32, 12, 6, 15]

    @pytest.mark.parametrize("count", range(1, 7))
    def test_sizes_are_as_equal_as_layers_allow(self, count):
        model = network()
        made = make(count, model)
        check_partition(made, model)
        found = [
            np.add.reduceat(self.LAYERS, [0, *cuts]).tolist()
            for cuts in itertools.combinations(range(1, 6), count - 1)
        ]
        assert sizes(made) in found
        assert max(sizes(made)) == min(map(max, found))

    def test_groups_are_named_after_their_layers(self):
        assert [group.name for group in make(2)] == [
            "first to second",
            "wide to last",
        ]

    def test_more_than_layers(self):
        with pytest.raises(ValueError, match="groups <= 6.*'net', got 7"):
            make(7)


class TestLayers:
    def test_one_group_for_each_layer_with_weights(self):
        model = network()
        made = make("layers", model)
        check_partition(made, model)
        assert [(group.name, group.size) for group in made] == [
            ("first", 20),
            ("second", 40),
            ("wide", 32),
            ("inner", 12),
            ("inner_too", 6),
            ("last", 15),
        ]

    def test_shared_layer_is_one_group(self):
        shared = layers.Dense(3, name="shared")
        inputs = keras.Input((3,))
        model = keras.Model(inputs, shared(shared(inputs)))
        made = make("layers", model)
        check_partition(made, model)
        assert sizes(made) == [12]

    def test_frozen_layer_has_no_group(self):
        model = network()
        model.get_layer("second").trainable = False
        made = make("layers", model)
        check_partition(made, model)
        assert "second" not in [group.name for group in made]

    def test_weights_of_the_model_itself(self):
        class Own(keras.Model):
            def build(self, shape):
                self.dense = layers.Dense(2, name="dense")
                self.dense.build(shape)
                self.scale = self.add_weight(shape=(3,), name="scale")

            def call(self, x):
                return self.dense(x) * self.scale[0]

        model = Own(name="own")
        model.build((None, 4))
        made = make("layers", model)
        check_partition(made, model)
        assert sorted(sizes(made)) == [3, 10]


class TestByName:
    def test_nested_names(self):
        model = network()
        made = make(
            [["last", "inner"], ["first", "second", "wide"], ["inner_too"]],
            model,
        )
        check_partition(made, model)
        assert sizes(made) == [27, 92, 6]

    def test_name_stands_for_all_layers_in_it(self):
        model = network()
        made = make([["block"], ["first", "second", "wide", "last"]], model)
        check_partition(made, model)
        assert sizes(made) == [18, 107]

    def test_order_of_names_does_not_matter(self):
        """Blocks follow the variables, in their order."""
        for group in make([["last", "first", "wide"], ["second", "block"]]):
            assert list(group.indices) == sorted(group.indices)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (
                [["first", "secnd", "wide", "block", "last"]],
                "unknown name 'secnd'. There are first, second, wide, inner",
            ),
            (
                [["first", "wide"], ["block", "last"]],
                "got second/kernel, second/bias in none. Add their layers",
            ),
            (
                [["first", "second", "wide"], ["block", "first", "last"]],
                "in one group, got first/kernel in two: by 'first' and by",
            ),
            (
                [["first", "second", "wide", "block", "last"], ["inner"]],
                "in two: by 'block' and by 'inner'",
            ),
            (
                [["first", "second", "wide", "block", "last"], ["relu"]],
                "groups with trainable weights, got none in .*relu",
            ),
        ],
    )
    def test_invalid(self, names, message):
        with pytest.raises(ValueError, match=message):
            make(names)


@pytest.mark.parametrize(
    "value", [0, -1, True, 1.5, "layer", None, [], [[]], ["first"], [["a"], []]]
)
def test_invalid_groups(value):
    with pytest.raises(ValueError, match="Expected groups.*got"):
        groups.check_groups(value)


@pytest.mark.parametrize("value", [1, np.int64(3), "layers", [["a", "b"]]])
def test_valid_groups(value):
    groups.check_groups(value)


def of_sizes(*values):
    return [
        groups.Group(f"group{k}", (k,), size) for k, size in enumerate(values)
    ]


class TestApportion:
    def gep_groups(self):
        """Those of the paper: input, three stages and output."""
        return make(
            [
                ["input_conv", "input_norm"],
                *(self.stage(k) for k in (1, 2, 3)),
                ["logits"],
            ],
            self.resnet(),
        )

    def resnet(self):
        return models.resnet20_gn()

    def stage(self, k):
        return [
            layer.name
            for layer in self.resnet().layers
            if layer.name.startswith(f"stage{k}") and layer.weights
        ]

    def test_example_of_gep(self):
        """Rounding down gives 999 of 1000."""
        made = self.gep_groups()
        assert sum(sizes(made)) == 272474
        roots = np.sqrt(sizes(made))
        shares = 1000 * roots / roots.sum()
        assert sum(map(int, shares)) < 1000
        ranks = groups.apportion(1000, made, math.inf)
        assert sum(ranks) == 1000
        assert np.abs(ranks - shares).max() < 1

    @pytest.mark.parametrize("seed", range(5))
    def test_sums_exactly_and_follows_the_roots(self, seed):
        random = np.random.default_rng(seed)
        for _ in range(50):
            made = of_sizes(
                *random.integers(1000, 10**6, random.integers(1, 9))
            )
            rank = int(random.integers(100, 1000))
            ranks = groups.apportion(rank, made, math.inf)
            assert sum(ranks) == rank
            roots = np.sqrt(sizes(made))
            # Each is a share of the rank, up to rounding.
            shares = rank * roots / roots.sum()
            assert np.abs(ranks - shares).max() < 1.5
            # A larger group has no fewer directions.
            assert np.all(np.diff(np.array(ranks)[np.argsort(roots)]) >= 0)

    def test_full_groups_pass_on_what_they_cannot_hold(self):
        made = of_sizes(4, 100, 400)  # 96 in the ratio 1 : 5 : 10
        assert groups.apportion(96, of_sizes(100, 2500, 10000), 80) == [
            6,
            30,
            60,
        ]
        assert groups.apportion(96, made, 80) == [4, 31, 61]
        assert groups.apportion(96, made, 50) == [4, 42, 50]

    def test_each_group_has_a_direction(self):
        ranks = groups.apportion(4, of_sizes(1, 10**6, 1, 10**6), math.inf)
        assert ranks == [1, 1, 1, 1]

    @pytest.mark.parametrize(
        ("rank", "limit", "expected"),
        [(31, math.inf, [10, 20]), (100, 7, [7, 7]), (13, 5, [5, 5])],
    )
    def test_reduces_what_nothing_spans(self, rank, limit, expected):
        with pytest.warns(UserWarning, match=f"got {rank}: {sum(expected)} is"):
            assert groups.apportion(rank, of_sizes(10, 20), limit) == expected

    def test_all_that_there_is_needs_no_warning(self):
        assert groups.apportion(30, of_sizes(10, 20), 20) == [10, 20]

    def test_fewer_than_groups(self):
        with pytest.raises(ValueError, match="rank >= 3, one for each.*got 2"):
            groups.apportion(2, of_sizes(10, 10, 10), math.inf)
