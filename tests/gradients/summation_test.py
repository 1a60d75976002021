"""The order in which products of matrices are added up is measured."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients import tensor_cores
from tf_dpsub.gradients import precision, summation


@pytest.fixture(autouse=True)
def _measured_anew():
    summation._is_exact.cache_clear()
    yield
    summation._is_exact.cache_clear()


def added(terms, sums=1, block=None):
    """Terms that are added up in several float32 sums, in turns."""
    total = np.float32(0)
    for begin in range(0, len(terms), block or len(terms)):
        part = terms[begin : begin + (block or len(terms))]
        partial = [np.cumsum(part[k::sums])[-1] for k in range(sums)]
        for one in partial:
            total += one
    return total


@pytest.mark.parametrize("count", [40, 64, 384, 500, 512, 6400])
def test_terms_tell_orders_apart(count):
    terms = summation._terms(count)
    assert terms.dtype == np.float32
    exact = terms.sum(dtype=np.float64)
    assert exact > count / 2
    for block in (None, 384, 512):
        assert added(terms, 1, block) == exact
    for sums in (2, 3, 4, 8, 16):
        assert added(terms, sums) != exact
        assert added(terms, sums, 128) != exact


@pytest.mark.parametrize(
    "bilinear, is_in_order",
    [("one_after_another", True), ("every_other", False)],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_order_of_products(bilinear, is_in_order, groups, monkeypatch):
    monkeypatch.setattr(precision, "bilinear", getattr(tensor_cores, bilinear))
    assert summation.is_in_order(192, (8, 9), groups) == is_in_order


def test_it_is_measured_once(monkeypatch):
    monkeypatch.setattr(precision, "bilinear", tensor_cores.every_other)
    assert not summation.is_in_order(192, (8, 9))
    monkeypatch.undo()
    assert not summation.is_in_order(192, (8, 9))


def test_a_gpu_has_no_order(monkeypatch):
    monkeypatch.setattr(precision, "bilinear", tensor_cores.one_after_another)
    assert summation.is_in_order(192, (8, 9))
    tensor_cores.pretend_a_gpu(monkeypatch)
    assert not summation.is_in_order(192, (8, 9))


def test_xla_has_no_order(monkeypatch):
    monkeypatch.setattr(precision, "bilinear", tensor_cores.one_after_another)
    found = []

    def ask(x):
        found.append(summation.is_in_order(192, (8, 9)))
        return x

    for jit_compile in (False, True):
        tf.function(ask, jit_compile=jit_compile)(tf.ones([]))
    assert found == [True, False]
