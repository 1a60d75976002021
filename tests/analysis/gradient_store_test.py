"""Gradients on disk, whatever interrupts it."""

import errno

import numpy as np
import pytest

from tf_dpsub.analysis import GradientStore


class Parameter:
    """The attributes of a variable that a store reads."""

    def __init__(self, path, *shape):
        self.path, self.shape = path, shape


WEIGHTS = [Parameter("dense/kernel", 3, 2), Parameter("dense/bias", 2)]
_random = np.random.default_rng(0)


def gradients():
    return [_random.normal(size=v.shape).astype("float32") for v in WEIGHTS]


def flat(arrays):
    return np.concatenate([a.ravel() for a in arrays])


def everything(store):
    return store.block(slice(None), slice(None))


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-6), ("float16", 1e-3)]
)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_rows_are_what_was_written(tmp_path, dtype, tolerance, size):
    store = GradientStore.create(tmp_path, WEIGHTS, dtype=dtype)
    assert store.shape == (0, 8)
    rows = []
    for step in (0, 5, 10):
        scaled = [size * g for g in gradients()]
        store.append(scaled, step)
        rows.append(flat(scaled))
    opened = GradientStore(tmp_path)
    assert opened.shape == (3, 8)
    assert opened.steps.tolist() == [0, 5, 10]
    stack = everything(opened)
    assert stack.dtype == np.float32
    np.testing.assert_allclose(stack, rows, atol=tolerance * 4 * size)
    part = opened.block(slice(1, 3), slice(2, 5))
    np.testing.assert_array_equal(part, stack[1:3, 2:5])


def test_a_row_of_zeros(tmp_path):
    store = GradientStore.create(tmp_path, WEIGHTS)
    store.append([np.zeros(v.shape) for v in WEIGHTS], 0)
    assert not everything(store).any()


def test_goes_on_where_it_stopped(tmp_path):
    first = gradients()
    GradientStore.create(tmp_path, WEIGHTS).append(first, 0)
    store = GradientStore.create(tmp_path, WEIGHTS)
    store.append(gradients(), 1)
    assert len(store) == 2
    np.testing.assert_allclose(everything(store)[0], flat(first), rtol=1e-6)


def test_an_incomplete_row_does_not_count(tmp_path):
    store = GradientStore.create(tmp_path, WEIGHTS)
    first, second = gradients(), gradients()
    store.append(first, 0)
    with open(tmp_path / "gradients.bin", "ab") as file:
        file.write(b"half a row")
    assert len(GradientStore(tmp_path)) == 1
    store.append(second, 1)
    np.testing.assert_allclose(
        everything(store), [flat(first), flat(second)], rtol=1e-6
    )


def test_a_full_disk_leaves_what_was_written(tmp_path, monkeypatch):
    store = GradientStore.create(tmp_path, WEIGHTS)
    store.append(gradients(), 0)
    before = everything(store)

    def failing(path, mode, **kwargs):
        file = open(path, mode, **kwargs)
        write = file.write

        def some(content):
            write(content[:7])
            file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

        file = _Wrapped(file, some)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(
            "tf_dpsub.analysis.gradient_store.open", failing, raising=False
        )
        with pytest.raises(OSError, match="disk is full: 1 gradients of"):
            store.append(gradients(), 1)
    np.testing.assert_array_equal(everything(GradientStore(tmp_path)), before)
    store.append(gradients(), 2)
    assert store.steps.tolist() == [0, 2]


class _Wrapped:
    """A file with another `write`."""

    def __init__(self, file, write):
        self._file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def test_a_bound_on_the_size(tmp_path):
    store = GradientStore.create(tmp_path, WEIGHTS, max_bytes=100)
    assert not store.is_full
    store.append(gradients(), 0)
    store.append(gradients(), 1)
    assert store.is_full
    with pytest.raises(
        ValueError, match="got 2 rows, which fill max_bytes=100"
    ):
        store.append(gradients(), 2)
    assert (tmp_path / "gradients.bin").stat().st_size <= 100
    # It may be raised.
    more = GradientStore.create(tmp_path, WEIGHTS, max_bytes=200)
    more.append(gradients(), 2)
    assert len(more) == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named(tmp_path, value):
    store = GradientStore.create(tmp_path, WEIGHTS, dtype="float16")
    for step in (10, 20, 30):
        arrays = gradients()
        arrays[0][2, 1] = value if step == 20 else 0.5
        store.append(arrays, step)
    with pytest.raises(
        ValueError, match="NaN or infinity in row 1, of step 20"
    ):
        everything(store)
    # The others stay readable.
    assert store.block(slice(2, 3), slice(None)).shape == (1, 8)


class TestOtherModels:
    @pytest.mark.parametrize(
        "others, message",
        [
            (
                [Parameter("dense/kernel", 3, 4), WEIGHTS[1]],
                "weight 0 is .*3, 2",
            ),
            ([Parameter("other", 3, 2), WEIGHTS[1]], "weight 0 .*'other'"),
            (WEIGHTS[:1], r"weight 1 is 'dense/bias' \[2\] there and missing"),
        ],
    )
    def test_a_folder_of_another_model(self, tmp_path, others, message):
        GradientStore.create(tmp_path, WEIGHTS)
        with pytest.raises(ValueError, match=message):
            GradientStore.create(tmp_path, others)
        with pytest.raises(ValueError, match="those of another"):
            GradientStore(tmp_path).require_variables(others)

    def test_a_folder_of_another_type(self, tmp_path):
        GradientStore.create(tmp_path, WEIGHTS)
        with pytest.raises(ValueError, match="in float16, got .* in float32"):
            GradientStore.create(tmp_path, WEIGHTS, dtype="float16")

    def test_gradients_of_other_shapes(self, tmp_path):
        store = GradientStore.create(tmp_path, WEIGHTS)
        with pytest.raises(ValueError, match="Expected gradients of shapes"):
            store.append(gradients()[::-1], 0)


def test_no_store(tmp_path):
    with pytest.raises(ValueError, match="which has no gradients.json"):
        GradientStore(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": "float64"}, "float32.* got 'float64'"),
        ({"max_bytes": 0}, "max_bytes >= 1"),
        ({"variables": []}, "one variable at least"),
    ],
)
def test_arguments_that_are_wrong(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        GradientStore.create(tmp_path, **{"variables": WEIGHTS} | changes)
