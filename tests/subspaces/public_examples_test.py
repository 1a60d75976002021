import json

import numpy as np
import pytest

from tf_dpsub.subspaces.public_examples import PublicExamples

X = np.arange(12, dtype="uint8").reshape(4, 3)
Y = np.array([0, 1, 1, 0])


@pytest.mark.parametrize("x", [X, {"a": X, "b": [X, X[:, 0]]}])
@pytest.mark.parametrize("y", [Y, None])
def test_config_holds_them(x, y):
    examples = PublicExamples(x, y)
    config = json.loads(json.dumps(examples.get_config()))
    again = PublicExamples(config["x_public"], config["y_public"])
    assert again.count == examples.count == 4
    assert again.get_config() == examples.get_config()
    assert (again.y is None) == (y is None)


def test_are_copies():
    x = X.copy()
    examples = PublicExamples(x)
    x[:] = 0
    np.testing.assert_array_equal(examples.x, X)


def test_a_statement_names_them():
    assert PublicExamples(X, Y).note == "4 examples with their labels"
    assert PublicExamples(X).note == "4 examples with random labels"


@pytest.mark.parametrize("x, y", [(X[:0], None), (X, Y[:2]), ({}, None)])
def test_not_as_many_of_each(x, y):
    with pytest.raises(ValueError, match="Expected public data with the same"):
        PublicExamples(x, y)
