"""Examples made to move a clipped sum beyond the clip, and steps on them."""

import dataclasses
import functools
import pickle

import keras
import numpy as np
import tensorflow as tf

import tf_dpsub
from tf_dpsub import gradients, optimizers

layers = keras.layers

BATCH = 6
HOSTILE = 2  # the example that differs
CLIP = 0.01

# Constant, and divided out of the rows again, as a private model does.
LOSS_SCALE = {"mixed_float16": 1024.0}


def dense(dtype):
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, dtype=dtype)])


def dense_by_gram(dtype):
    """Few positions, many channels: norms come from Gram matrices."""
    return keras.Sequential(
        [keras.Input((4, 32)), layers.Dense(32, dtype=dtype)]
    )


def dense_by_rows(dtype):
    return keras.Sequential(
        [keras.Input((16, 4)), layers.Dense(4, dtype=dtype)]
    )


def conv(dtype):
    return keras.Sequential(
        [keras.Input((6, 6, 2)), layers.Conv2D(3, 3, dtype=dtype)]
    )


def weight_standardized(dtype):
    layer = tf_dpsub.layers.WeightStandardizedConv2D(3, 3, dtype=dtype)
    return keras.Sequential([keras.Input((6, 6, 2)), layer])


def layer_norm(dtype):
    return keras.Sequential(
        [keras.Input((5, 8)), layers.LayerNormalization(dtype=dtype)]
    )


def embedding(dtype):
    tokens = keras.Input((4,), dtype="int32")
    return keras.Model(tokens, layers.Embedding(5, 3, dtype=dtype)(tokens))


def tied_embedding(dtype):
    """One matrix, at the input and at the output."""
    table = layers.ReversibleEmbedding(40, 32, dtype=dtype)
    tokens = keras.Input((4,), dtype="int32")
    return keras.Model(tokens, table(table(tokens), reverse=True))


MODELS = [
    dense,
    dense_by_gram,
    dense_by_rows,
    conv,
    weight_standardized,
    layer_norm,
    embedding,
    tied_embedding,
]
DTYPES = ["float32", "mixed_bfloat16", "mixed_float16"]


def vary(scale):
    """Numbers of all sizes around a scale."""
    return lambda z: scale * z


def alternate(scale):
    """One vector at every position, with alternating signs: they cancel."""

    def make(z):
        signs = (-1.0) ** np.arange(len(z))
        return scale * signs.reshape([-1] + [1] * (z.ndim - 1)) * z[:1]

    return make


def repeat(scale):
    """One vector at every position: they add."""
    return lambda z: scale * np.broadcast_to(z[:1], z.shape)


def pairs(scale, sign, off=0.0):
    """Positions in pairs, alike or opposite, but for a share of `off`."""

    def make(z):
        changed = z.copy()
        half = len(z) // 2
        changed[half : 2 * half] = sign * z[:half] * (1 + off * z[half:][:half])
        return scale * changed

    return make


def one_entry(value):
    def make(z):
        changed = z.copy()
        changed.flat[z.size // 2] = value
        return changed

    return make


# Parts of a hostile example: its inputs, and the gradient of its loss with
# respect to the outputs.
KINDS = {
    "ordinary": (vary(1.0), vary(1.0)),
    "small": (vary(1e-4), vary(1e-4)),
    "aligned": (np.ones_like, np.ones_like),
    "cancelling": (alternate(1e2), repeat(1e2)),
    "cancelling_gradients": (repeat(1e2), alternate(1e2)),
    "cancelling_pairs": (pairs(1e6, -1), pairs(1e6, 1)),
    "almost_cancelling": (pairs(1e3, -1, 1e-6), pairs(1e3, 1)),
    "almost_cancelling_gradients": (pairs(1e2, 1), pairs(1e2, -1, 1e-5)),
    "denormal_inputs": (vary(1e-40), vary(1e30)),
    "denormal_gradients": (vary(1e18), vary(1e-40)),
    "underflowing_inputs": (vary(1e-22), vary(1e18)),
    "underflowing_gradients": (vary(1e18), vary(1e-19)),
    "aligned_underflowing_gradients": (repeat(1e18), repeat(1e-19)),
    "cancelling_underflowing": (alternate(1e18), repeat(1e-18)),
    "large_1e15": (vary(1e15), vary(1.0)),
    "large_1e19": (vary(1e19), vary(1.0)),
    "large_1e30": (vary(1e30), vary(1e-30)),
    "large_gradients": (vary(1.0), vary(1e19)),
    "largest": (one_entry(3.4e38), one_entry(3.4e38)),
    "infinite_input": (one_entry(np.inf), vary(1.0)),
    "infinite_gradient": (vary(1.0), one_entry(-np.inf)),
    "nan_input": (one_entry(np.nan), vary(1.0)),
    "nan_gradient": (vary(1.0), one_entry(np.nan)),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """The clipped sums of a model, on given inputs and output gradients.

    Attributes:
        model: `keras.Model`.
        sums: function of `x`, `t` and `keep`, returns a list.
        of_batches: function of a list of such, gives the list for all of them,
            each with an axis for the batches in front.
    """

    model: keras.Model
    sums: object
    of_batches: object

    def __call__(self, x, t, keep):
        *sums, valid = self.sums(x, t, tf.constant(keep, tf.float32))
        flat = np.concatenate([np.ravel(s) for s in sums])
        return flat.astype("float64"), valid.numpy()

    @property
    def takes_tokens(self):
        return self.model.inputs[0].dtype == "int32"

    def ordinary(self, random, batch=BATCH):
        """Inputs and output gradients of a batch."""
        shape = self.model.inputs[0].shape[1:]
        if self.takes_tokens:
            x = random.integers(0, 5, [batch, *shape]).astype("int32")
        else:
            x = random.normal(size=[batch, *shape]).astype("float32")
        shape = [batch, *self.model.outputs[0].shape[1:]]
        return x, random.normal(size=shape).astype("float32")


def losses_of(model, dtype):
    """The loss of each example, and the scale that is divided out of rows.

    It is the inner product of the outputs and of `t`, their gradient.

    Args:
        model: `keras.Model`.
        dtype: string, its policy.

    Returns:
        Function of a batch `{"x": ..., "t": ...}`, and a float.
    """
    scale = LOSS_SCALE.get(dtype, 1.0)

    def losses(batch):
        outputs = tf.cast(model(batch["x"], training=True), tf.float32)
        products = tf.reshape(outputs * batch["t"], [outputs.shape[0], -1])
        return scale * tf.reduce_sum(products, 1), None

    return losses, scale


def build_step(
    model,
    dtype,
    implementation="graph",
    jit_compile=False,
    **arguments,
):
    """Builds the step of one optimizer, as `build_steps`."""
    (step,) = build_steps(
        model, dtype, [arguments], implementation, jit_compile
    )
    return step


def build_steps(
    model,
    dtype,
    optimizers_arguments,
    implementation="graph",
    jit_compile=False,
):
    """Builds the steps of several optimizers of one model.

    They clip the same per-example gradients, which are traced once.

    Args:
        model: function of a dtype policy, gives a `keras.Model`.
        dtype: string.
        optimizers_arguments: list of dicts, arguments of `DPSGD` for each.
        implementation: string, of per-example gradients.
        jit_compile: bool.

    Returns:
        List of `Step`.
    """
    model = model(dtype)
    losses, scale = losses_of(model, dtype)
    made = [
        optimizers.DPSGD(
            "sgd",
            noise_multiplier=0.0,
            batch_size=BATCH,
            **{"l2_norm_clip": CLIP} | arguments,
        )
        for arguments in optimizers_arguments
    ]
    for optimizer in made:
        optimizer.build(model.trainable_variables)

    @tf.function(autograph=False, jit_compile=jit_compile)
    def sums_of_all(x, t, keep):
        rows, _ = gradients.per_example_gradients(
            losses,
            {"x": x, "t": t},
            model.trainable_variables,
            implementation,
            scale,
        )
        return [
            [*optimizer.clipped_sums(rows, keep), rows.valid]
            for optimizer in made
        ]

    return steps_of(model, sums_of_all, len(made))


def steps_of(model, sums_of_all, count):
    """Steps that one function computes together.

    Args:
        model: `keras.Model`.
        sums_of_all: `tf.function` of `x`, `t` and `keep`, which returns a list
            of tensors for each step.
        count: int, the number of steps.

    Returns:
        List of `Step`. What was computed of batches for one of them serves the
        others.
    """
    seen = {}

    def of_batches(k, batches):
        key = pickle.dumps(batches)
        if key not in seen:
            seen[key] = one_by_one(sums_of_all, batches)
        return seen[key][k]

    return [
        Step(
            model,
            lambda *batch, k=k: sums_of_all(*batch)[k],
            functools.partial(of_batches, k),
        )
        for k in range(count)
    ]


def hostile_example(step, kind, random):
    x, t = (z[0] for z in step.ordinary(random))
    make_x, make_t = KINDS[kind]
    with np.errstate(over="ignore", under="ignore"):
        t = make_t(t.astype("float64")).astype("float32")
        if step.takes_tokens:
            # Entries that are repeated add, or cancel.
            return x if make_x is KINDS["ordinary"][0] else 0 * x, t
        return make_x(x.astype("float64")).astype("float32"), t


def one_by_one(sums, batches):
    """Results of a traced step on several batches, in one call.

    Args:
        sums: `tf.function` of `x`, `t` and `keep`, which returns lists.
        batches: list of such `x`, `t` and `keep`.

    Returns:
        Arrays in these lists, each with an axis for the batches in front.
    """
    parts = [np.stack(part) for part in zip(*batches)]
    parts[-1] = parts[-1].astype("float32")
    one = sums.get_concrete_function(
        *(tf.TensorSpec(part.shape[1:], part.dtype) for part in parts)
    )
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), one.structured_outputs
    )

    @tf.function(autograph=False)
    def every(*parts):
        return tf.map_fn(
            lambda part: sums(*part),
            parts,
            fn_output_signature=specs,
            parallel_iterations=1,
        )

    return tf.nest.map_structure(lambda t: t.numpy(), every(*parts))


def check_sensitivity(step):
    """The sum moves by at most the clip, and stays finite, for every kind."""
    random = np.random.default_rng(0)
    x, t = step.ordinary(random)
    all_of_them = np.ones(BATCH)
    others = all_of_them.copy()
    others[HOSTILE] = 0
    x[HOSTILE], t[HOSTILE] = 0, 0
    without, _ = step(x, t, others)
    assert np.linalg.norm(without) > 0
    # Rounding hides the rest of a sum in some draws only.
    kinds = [kind for kind in KINDS for _ in range(4)]
    batches = []
    for kind in kinds:
        x[HOSTILE], t[HOSTILE] = hostile_example(step, kind, random)
        for keep in (all_of_them, others):
            batches.append((x.copy(), t.copy(), keep))
    *sums, valids = step.of_batches(batches)
    flat = np.concatenate([s.reshape(len(s), -1) for s in sums], 1)
    flat = flat.astype("float64")
    reached = {}
    for kind, with_it, padded, valid in zip(
        kinds, flat[::2], flat[1::2], valids[::2], strict=True
    ):
        assert np.isfinite(with_it).all(), kind
        moved = np.linalg.norm(with_it - without)
        assert moved <= CLIP, kind
        assert np.delete(valid, HOSTILE).all(), kind
        if not valid[HOSTILE]:
            np.testing.assert_array_equal(with_it, without, kind)
        # A row that only pads the batch leaves no trace, whatever is in it.
        np.testing.assert_array_equal(padded, without, kind)
        reached[kind] = moved / CLIP, valid[HOSTILE]
    return reached
