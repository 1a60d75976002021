"""One example in a batch changes how sums of the others are rounded.

The batches below are made so that all of these changes add up: rows that carry
the float32 sum of a microbatch beyond a power of two, and many whose last bits
then are lost, or not.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.gradients import tensor_cores
from tf_dpsub import gradients, optimizers, subspaces
from tf_dpsub.data import given_batches
from tf_dpsub.gradients import precision, summation
from tf_dpsub.gradients.graph import convolutions, graph_gradients, sites
from tf_dpsub.primitives import clipping

_INPUTS, _OUTPUTS = 64, 4
_SIZE = _INPUTS * _OUTPUTS
# Others have norms so close to the clip, or so far above that of a residual,
# that their factor is still 1.
_SHARE = {
    "DPSGD": 0.96,
    "ProjectedDPSGD": 0.96,
    "GEP": 31.0,
    "GEP in pairs": 29.0,
}


def private_model(method, clip, batch_size, microbatch_size):
    arguments = {
        "noise_multiplier": 1.0,
        "batch_size": batch_size,
        "microbatch_size": microbatch_size,
    }
    if method == "DPSGD":
        optimizer = optimizers.DPSGD("sgd", l2_norm_clip=clip, **arguments)
    else:
        basis = np.ones((_SIZE, 1), np.float32)
        subspace = subspaces.FixedSubspace(basis, public=True)
        if method == "GEP in pairs":
            # The same direction, of a gradient of ones alone.
            public = np.ones((2, _INPUTS)), np.ones((2, _OUTPUTS))
            subspace = subspaces.KroneckerSubspace(*public, rank=1, side_rank=1)
        clips = {"l2_norm_clip": clip}
        if method.startswith("GEP"):
            clips = {"l2_norm_clip": 1.0, "residual_norm_clip": clip}
        optimizer = getattr(optimizers, method.split()[0])(
            "sgd", subspace=subspace, **clips, **arguments
        )
    layer = keras.layers.Dense(_OUTPUTS, use_bias=False)
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input((_INPUTS,)), layer])
    )
    # The gradient is the input, once for each output.
    model.compile(optimizer, loss=lambda y, p: keras.ops.sum(y * p, -1))
    return model


def released(model, x):
    """Releases of a batch without noise: a vector for each part."""
    batch = given_batches.padded(
        given_batches.named(x, np.ones((len(x), _OUTPUTS), np.float32)),
        model.microbatch_size,
    )
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    optimizer = model.optimizer
    optimizer.prepare()
    sums = optimizer.released_sums(model.training_step(batch))
    parts = [np.ravel(s).astype(np.float64) for s in sums]
    return parts[1:] if isinstance(optimizer, optimizers.GEP) else parts


def hostile_batch(method, microbatch_size, microbatches):
    """Rows of which the first one is the victim."""
    half = microbatch_size // 2
    unit = 2.0**-23 * half  # of float32 just above `half`
    turn = np.where(np.arange(_INPUTS) % 2 == 0, 1.0, -1.0)
    if not method.startswith("GEP"):
        # There, the victim lies outside of what the others span.
        turn = np.ones(_INPUTS)
    up = 2.0**-6 + unit / 2 + turn * unit * 2.0**-9
    down = -(2.0**-6 + unit / 2 - turn * unit * 2.0**-9)
    rows = []
    for k in range(microbatches):
        rows.append(np.ones(_INPUTS) if k else 100 * turn)
        rows += [np.ones(_INPUTS)] * (half - 1)
        rows += [(up, down)[i % 2] for i in range(microbatch_size - half)]
    return np.array(rows, np.float32)


@pytest.mark.parametrize(
    "microbatch_size, microbatches", [(64, 4), (64, 64), (256, 1), (256, 4)]
)
@pytest.mark.parametrize("method", _SHARE)
def test_one_example_moves_the_sum_by_the_clip(
    method, microbatch_size, microbatches
):
    """If removed, all later rows move up, and every microbatch changes."""
    clip = float(np.sqrt(_SIZE) / _SHARE[method])
    batch_size = microbatch_size * microbatches
    model = private_model(method, clip, batch_size, microbatch_size)
    rows = hostile_batch(method, microbatch_size, microbatches)
    emptied = np.concatenate([np.zeros_like(rows[:1]), rows[1:]])
    before = np.concatenate(released(model, rows))
    for neighbour in (emptied, rows[1:]):
        after = np.concatenate(released(model, neighbour))
        assert 0.9 * clip < np.linalg.norm(before - after) <= clip


@pytest.mark.parametrize("method", ["DPSGD", "ProjectedDPSGD"])
def test_large_batches_are_summed_in_float64(method):
    """The share that is kept for rounding would grow with the batch."""
    rows = np.ones((8, _INPUTS), np.float32)
    sums = {}
    for batch_size in (4096, 4097):
        model = private_model(method, 1.0, batch_size, 4)
        sums[batch_size] = np.linalg.norm(np.concatenate(released(model, rows)))
    assert sums[4096] / 8 == pytest.approx(
        1 - (4480 / 128 + 0.25) * 2.0**-10, abs=2.0**-18
    )
    assert sums[4097] / 8 == pytest.approx(1 - 1.25 * 2.0**-10, abs=2.0**-18)


def test_a_batch_far_beyond_the_batch_size_raises():
    """Clipping keeps for rounding what the optimizer's batch size needs."""
    model = private_model("DPSGD", 1.0, 8, 448)
    x, y = np.ones((129, _INPUTS)), np.ones((129, _OUTPUTS))
    model.train_on_batch(x[:128], y[:128])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="batches of 128 examples at most"
    ):
        model.train_on_batch(x, y)
    dataset = tf.data.Dataset.from_tensors((x, y))
    with pytest.raises(tf.errors.InvalidArgumentError, match="128 examples"):
        model.fit(dataset, verbose=0)


def test_a_microbatch_has_448_examples_at_most():
    with pytest.raises(ValueError, match="microbatch_size <= 448"):
        private_model("DPSGD", 1.0, 1024, 449)


def cancelling_batch(terms, width):
    """Rows of which two terms cancel, and of tiny ones between them.

    Where the first is added up just above a power of two, because of the
    victim, all tiny terms are lost; just below it, they are rounded up.
    """
    rows = 1 + _CHAIN // terms
    x = np.zeros([rows, terms, width], np.float32)
    t = np.zeros_like(x)
    x[1:, [0, -1]] = 1
    t[1:, 0], t[1:, -1] = 1, -1
    x[1:, 1:-1] = 2.0**-12
    t[1:, 1:-1] = -0.37 * 2.0**-12 / _LEVEL
    x[0, -1], t[0, -1] = 1, 10
    return x, t


# Products that are added up one after another.
_CHAIN = 384
# What a row has added up after its first term.
_LEVEL = 0.499


@pytest.mark.parametrize(
    "terms, is_limited",
    [(65, True), (65, False), pytest.param(200, True, marks=pytest.mark.slow)],
)
def test_terms_that_cancel_move_the_sum_by_the_clip(
    terms, is_limited, monkeypatch
):
    """Without a limit of what is added up within a row, it moves by more."""
    # Whatever the processor's blocks are.
    monkeypatch.setattr(precision, "bilinear", tensor_cores.one_after_another)
    monkeypatch.setattr(sites, "KEPT_ROWS", 0)
    tensor_cores.merge_terms(monkeypatch)
    if not is_limited:
        walk = graph_gradients.GraphGradients
        monkeypatch.setattr(walk, "merged_terms", 1)
    width = 32
    layer = keras.layers.Dense(width, use_bias=False)
    model = keras.Sequential([keras.Input((terms, width)), layer])
    x, t = cancelling_batch(terms, width)

    def step(l2_norm_clip):
        @tf.function(autograph=False)
        def clipped(keep):
            rows, _ = gradients.per_example_gradients(
                lambda b: (tf.reduce_sum(model(b["x"]) * b["t"], [1, 2]), None),
                {"x": tf.constant(x), "t": tf.constant(t)},
                model.trainable_variables,
                "graph",
            )
            factors = clipping.sum_factors(
                rows, rows.sq_norm_bounds(), l2_norm_clip, 1, clipping.FLAT
            )
            sums = clipping.clipped_sum(rows, keep, l2_norm_clip, 1)
            return sums[0], factors

        return clipped

    keep = np.ones(len(x), np.float32)
    _, factors = step(2.0**-30)(keep)
    clip = 2.0**-30 * _LEVEL / factors[1]
    clipped = step(float(clip))
    whole, factors = clipped(keep)
    np.testing.assert_allclose(factors[1:], _LEVEL, rtol=1e-5)
    others, _ = clipped(np.arange(len(x)) > 0)
    moved = np.linalg.norm(np.subtract(whole, others, dtype=np.float64))
    if is_limited:
        assert 0.97 * clip < moved <= clip
    else:
        assert moved > 1.001 * clip


@pytest.fixture(name="order_is_measured")
def _order_is_measured():
    """The order of sums is measured in the test, and anew after it."""
    summation._is_exact.cache_clear()
    yield
    summation._is_exact.cache_clear()


@pytest.mark.parametrize("is_merged", [False, True])
def test_sums_of_every_other_term_move_by_the_clip(
    is_merged, monkeypatch, order_is_measured
):
    """Sums that hold a part of each row are long, where terms cancel."""
    monkeypatch.setattr(precision, "bilinear", tensor_cores.every_other)
    monkeypatch.setattr(sites, "KEPT_ROWS", 0)
    if is_merged:
        tensor_cores.merge_terms(monkeypatch)
    # As large as a batch of 380 may be.
    batch_size, count, side, half = 380, 496, 8, 131
    power, spacing = 256.0, 2.0**-15
    values = np.zeros([count, 4])
    # The victim carries the sum of the first and third terms over the power.
    values[0, 0] = 10.0
    level = (power - 0.7) / half / 2
    values[1 : 1 + half] = level * np.array([1, -1, 1, -1])
    values[1 + half :, ::2] = -0.37 * spacing
    x = tf.ones([count, 4, side])
    t = np.repeat(values[..., None] / side, side, -1).astype("float32")
    layer = keras.layers.Dense(side, use_bias=False)
    model = keras.Sequential([keras.Input((4, side)), layer])

    @tf.function(autograph=False)
    def clipped(keep):
        rows, _ = gradients.per_example_gradients(
            lambda b: (tf.reduce_sum(model(b["x"]) * b["t"], [1, 2]), None),
            {"x": x, "t": tf.constant(t)},
            model.trainable_variables,
            "graph",
        )
        return clipping.clipped_sum(rows, keep, 1.0, batch_size)[0]

    whole = clipped(np.ones(count))
    others = clipped(np.arange(count) > 0)
    moved = np.linalg.norm(np.subtract(whole, others, dtype=np.float64))
    if is_merged:
        assert moved > 1.001
    else:
        assert 0.99 < moved <= 1


KINDS = {
    # A filter gradient has one running sum of all places of all examples.
    "filter": (
        (5, 5, 64),
        lambda: keras.layers.Conv2D(64, 3, strides=2, use_bias=False),
        False,
    ),
    # So has a product with a side of size 1, where XLA compiles it.
    "narrow": ((64, 128), lambda: keras.layers.Dense(1, use_bias=False), True),
}


@pytest.mark.parametrize("name", KINDS)
def test_terms_of_all_rows_have_no_sum_of_their_own(name, monkeypatch):
    """A half of the rows raises it, and all terms of the others are lost."""
    monkeypatch.setattr(sites, "KEPT_ROWS", 0)
    monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)
    shape, make, jit_compile = KINDS[name]
    model = keras.Sequential([keras.Input(shape), make()])
    # As large as a batch of 380 may be.
    count, half = 496, 247
    outputs = model.output_shape[1:]
    terms = int(np.prod(outputs[:-1]))
    above = 2.0**-4
    values = np.full(count, -0.37 * above * 2.0**-23)
    values[0] = 10
    values[1 : 1 + half] = above / (half + 0.5) / terms
    t = np.broadcast_to(
        values.reshape([-1] + [1] * len(outputs)), [count, *outputs]
    ).astype("float32")
    batch = {"x": tf.ones([count, *shape]), "t": tf.constant(t)}

    @tf.function(autograph=False, jit_compile=jit_compile)
    def of_batch(batch, keep, l2_norm_clip):
        rows, _ = gradients.per_example_gradients(
            lambda b: (
                tf.reduce_sum(
                    model(b["x"]) * b["t"], list(range(1, 1 + len(outputs)))
                ),
                None,
            ),
            batch,
            model.trainable_variables,
            "graph",
        )
        sums = clipping.clipped_sum(rows, keep, l2_norm_clip, 380)
        return sums[0], tf.sqrt(rows.sq_norms())

    def clipped(keep, l2_norm_clip):
        keep = tf.constant(keep, tf.float32)
        return of_batch(batch, keep, tf.constant(l2_norm_clip))

    keep = np.ones(count)
    _, norms = clipped(keep, 1.0)
    # Of the rows that raise the sum, with what is left for rounding.
    clip = 1.04 * norms[1].numpy()
    whole, _ = clipped(keep, clip)
    others, _ = clipped(np.arange(count) > 0, clip)
    moved = np.linalg.norm(np.subtract(whole, others, dtype=np.float64))
    assert 0.9 * clip < moved <= clip
