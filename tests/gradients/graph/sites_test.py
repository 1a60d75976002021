"""All ways in which a site can compute norms and sums agree."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub import gradients
from tf_dpsub.gradients.graph import convolutions, sites
from tf_dpsub.gradients.matrices import KernelMatrix

BATCH = 5


def _losses(model):
    def loss_fn(batch):
        x, y = batch
        outputs = model(x, training=True)
        outputs = tf.reshape(outputs, [y.shape[0], -1])
        return tf.reduce_sum(tf.square(outputs - y[:, None]), 1), outputs

    return loss_fn


def _gradients(model, x, implementation):
    y = np.linspace(-1, 1, BATCH).astype("float32")
    c = tf.constant(np.linspace(0.1, 1, BATCH), tf.float32)
    variables = model.trainable_variables
    rng = np.random.default_rng(1)
    basis = [
        tf.constant(rng.normal(size=(np.prod(v.shape), 3)), tf.float32)
        for v in variables
    ]

    weights = tf.constant(rng.normal(size=(BATCH, 2)), tf.float32)

    @tf.function(autograph=False)
    def compute(x, y):
        rows, _ = gradients.per_example_gradients(
            _losses(model), (x, y), variables, implementation
        )
        return {
            "norms": rows.sq_norms(),
            "bounds": rows.sq_norm_bounds(),
            "nonzero": rows.nonzero(),
            "rows": [rows.rows(v) for v in variables],
            "sum": rows.weighted_sum(c),
            "projection": rows.project(basis),
            "gram": rows.gram(),
            "combinations": rows.combinations(weights),
            "own": [rows.sq_norms([v]) for v in variables],
            "products": [
                _products(rows, v, n)
                for v in variables
                for n in _divisors(v.shape)
            ],
        }

    return compute(tf.constant(x), tf.constant(y))


def _divisors(shape):
    """Numbers of rows of the matrices whose numbers a weight may be."""
    return [int(np.prod(shape[:k])) for k in range(1, len(shape))]


def _products(rows, variable, inputs):
    """Of rows as matrices and thin ones, none of which need be stored."""
    size = int(np.prod(variable.shape))
    rng = np.random.default_rng(inputs)
    left, right = (
        tf.constant(rng.normal(size=(n, 2)), tf.float32)
        for n in (inputs, size // inputs)
    )
    shape, axes = variable.shape, tuple(range(len(variable.shape)))
    split = next(k for k in axes if np.prod(shape[: k + 1]) == inputs) + 1
    matrix = KernelMatrix(shape, axes, split)
    transposed = KernelMatrix(
        shape, axes[split:] + axes[:split], len(axes) - split
    )
    weights = tf.constant(rng.uniform(size=BATCH), tf.float32)
    return [
        rows.two_sided_products(variable, matrix, left, right),
        rows.two_sided_products(variable, transposed, right, left),
        rows.second_moment_products(variable, matrix, left, right, weights),
    ]


def _assert_same(model, x, expected=None):
    """Compares with one example at a time, which keeps rows in any case."""
    results = _gradients(model, x, "graph")
    if expected is None:
        expected = _gradients(model, x, "map_fn")
    bounds = results.pop("bounds")
    assert np.all(bounds >= expected["norms"])
    expected = {key: expected[key] for key in results}
    for a, b in zip(
        tf.nest.flatten(results), tf.nest.flatten(expected), strict=True
    ):
        scale = np.max(np.abs(b)) + 1e-30
        np.testing.assert_allclose(a / scale, b / scale, atol=2e-6)


def _model(shape, *layers):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input(shape), *layers])


def _normal(*shape):
    return np.random.default_rng(0).normal(size=(BATCH, *shape)).astype("f")


L = keras.layers
MODELS = {
    # By Gram matrices: few positions, many weights.
    "dense_gram": ((3, 40), [L.Dense(30)]),
    # By rows: many positions.
    "dense_rows": ((30, 4), [L.Dense(5)]),
    "einsum_groups": (
        (6, 4, 5),
        [L.EinsumDense("bthd,hde->bthe", (None, 4, 7))],
    ),
    "einsum_heads": ((6, 8), [L.EinsumDense("btd,dhe->bthe", (None, 2, 3))]),
    "conv_patches": ((9, 9, 2), [L.Conv2D(4, 3, 2, padding="same")]),
    "conv_taps": ((6, 6, 33), [L.Conv2D(3, 3)]),
    "conv_dilated": ((9, 9, 2), [L.Conv2D(4, 3, dilation_rate=2)]),
    "conv_uneven": ((9, 9, 2), [L.Conv2D(4, (3, 2), strides=(2, 1))]),
    "conv_depthwise": ((7, 7, 3), [L.DepthwiseConv2D(3, depth_multiplier=2)]),
    "conv_grouped": ((7, 7, 4), [L.Conv2D(6, 3, groups=2)]),
    "conv_transposed": ((5, 5, 3), [L.Conv2DTranspose(4, 3, 2)]),
    "conv_1d": ((12, 3), [L.Conv1D(4, 3, padding="causal")]),
    "conv_3d": ((5, 5, 5, 2), [L.Conv3D(3, 2, padding="same")]),
    "conv_3d_transposed": ((3, 3, 3, 2), [L.Conv3DTranspose(2, 2, 2)]),
    "steps_gram": ((3, 8), [L.LSTM(20, unroll=True)]),
    "steps_rows": ((12, 3), [L.SimpleRNN(4, unroll=True)]),
    "loop_gram": ((3, 8), [L.LSTM(20)]),
    "loop_rows": ((12, 3), [L.SimpleRNN(4)]),
    "loop_conv": ((3, 5, 5, 2), [L.ConvLSTM2D(2, 3, padding="same")]),
}


@pytest.fixture(params=[True, False], ids=["kept", "formed_again"])
def rows_kept(request, monkeypatch):
    """Keeps rows wherever there is a choice, or never."""
    if not request.param:
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)


def _model_of(name):
    shape, layers = MODELS[name]
    layers = [type(la).from_config(la.get_config()) for la in layers]
    return _model(shape, *layers, L.Activation("tanh")), _normal(*shape)


@functools.cache
def _one_by_one(name):
    """A model, its inputs, and what one example at a time gives."""
    model, x = _model_of(name)
    return model, x, _gradients(model, x, "map_fn")


# Kernels whose rows are sums of outer products.
FACTORED = [
    "dense_gram",
    "dense_rows",
    "einsum_heads",
    "conv_patches",
    "conv_taps",
    "conv_dilated",
    "conv_uneven",
    "conv_transposed",
    "conv_1d",
    "conv_3d",
    "steps_gram",
    "loop_gram",
]


@pytest.mark.parametrize("name", FACTORED)
def test_thin_products_form_no_rows(name, monkeypatch):
    monkeypatch.setattr(sites, "KEPT_ROWS", 0)
    monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)
    model, x = _model_of(name)
    kernel = model.trainable_variables[0]
    inputs = int(np.prod(kernel.shape[: 1 if "einsum" in name else -1]))

    def fail(*_):
        raise AssertionError("rows are formed")

    monkeypatch.setattr(gradients.GraphGradients, "rows", fail)

    def compute(x, y):
        rows, _ = gradients.per_example_gradients(
            _losses(model), (x, y), model.trainable_variables
        )
        return _products(rows, kernel, inputs)

    tf.function(compute, autograph=False)(x, np.zeros(BATCH, "float32"))


def test_thin_products_of_a_tied_matrix(monkeypatch):
    """Of a table that is looked up, and multiplied by the other way round."""
    monkeypatch.setattr(sites, "KEPT_ROWS", 0)
    table = L.ReversibleEmbedding(7, 4)
    tokens = keras.Input((3,), dtype="int32")
    outputs = L.Activation("tanh")(table(table(tokens), reverse=True))
    model = keras.Model(tokens, outputs)
    x = np.random.default_rng(0).integers(0, 3, (BATCH, 3)).astype("int32")

    def compute(x, y):
        variables = model.trainable_variables
        rows, _ = gradients.per_example_gradients(
            _losses(model), (x, y), variables
        )
        found = _products(rows, variables[0], 7)
        assert rows._pairs_of_terms(
            variables[0], KernelMatrix((7, 4), (0, 1), 1)
        )
        monkeypatch.setattr(rows, "_pairs_of_terms", lambda *_: None)
        return found, _products(rows, variables[0], 7)

    y = np.linspace(-1, 1, BATCH).astype("float32")
    for a, b in zip(
        *map(tf.nest.flatten, tf.function(compute, autograph=False)(x, y))
    ):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.max(np.abs(b)))


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_ids_of_any_type(dtype):
    table = tf.Variable(np.linspace(-1, 1, 28).reshape(7, 4).astype("f"))
    ids = np.random.default_rng(0).integers(0, 7, (BATCH, 3)).astype(dtype)

    def losses(ids):
        looked_up = tf.gather(tf.convert_to_tensor(table), ids)
        return tf.reduce_sum(looked_up**3, [1, 2]), None

    def compute(implementation):
        rows, _ = gradients.per_example_gradients(
            losses, tf.constant(ids), [table], implementation
        )
        return rows.rows(table)

    by_graph, one_by_one = (
        tf.function(compute, autograph=False)(name)
        for name in ("graph", "map_fn")
    )
    np.testing.assert_allclose(by_graph, one_by_one, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_sites_equal_one_example_at_a_time(rows_kept, name):
    _assert_same(*_one_by_one(name))


# What a loop reads is kept, and gathered, as the loop runs.
@pytest.mark.parametrize("name", [n for n in MODELS if "loop" not in n])
def test_nothing_made_of_an_operand_waits_for_the_gradient(
    rows_kept, monkeypatch, name
):
    """Otherwise, a step's peak would hold copies of all layers' inputs."""
    monkeypatch.setattr(sites, "LARGE", 0)
    model, x = _model_of(name)
    forward = []

    def loss_fn(batch):
        losses, outputs = _losses(model)(batch)
        forward.extend(losses.graph.get_operations())
        return losses, outputs

    @tf.function(autograph=False)
    def compute(x, y):
        rows, _ = gradients.per_example_gradients(
            loss_fn, (x, y), model.trainable_variables, "graph"
        )
        return rows.sq_norms(), rows.weighted_sum(tf.ones([BATCH]))

    graph = compute.get_concrete_function(x, np.zeros(BATCH, "f")).graph
    forward = set(forward)
    by_input, by_gradient, waiting = {graph.inputs[0].op}, set(), []
    for op in graph.get_operations():  # Each after all that it needs.
        operands = {i.op for i in op.inputs}
        if operands & by_input:
            by_input.add(op)
        if op in forward:
            continue
        backward = op.name.startswith("gradients/") and op in by_input
        if backward or (operands | set(op.control_inputs)) & by_gradient:
            by_gradient.add(op)
        elif op in by_input and not op.name.startswith("gradients/"):
            waiting += [t for t in op.outputs if t.shape.rank]
    assert by_gradient and not waiting


@pytest.mark.parametrize("padding", [[[0, 0], [1, 2], [2, 0], [0, 0]]])
def test_explicit_padding(rows_kept, padding):
    class Conv(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 2, shape[-1], 4))

        def call(self, x):
            return tf.nn.conv2d(x, self.kernel, 2, padding)

    _assert_same(_model((8, 7, 3), Conv()), _normal(8, 7, 3))


class _TiedLanguageModel(keras.layers.Layer):
    """One table for tokens and for logits."""

    def build(self, shape):
        self.table = self.add_weight(shape=(50, 6), initializer="uniform")

    def call(self, tokens):
        x = keras.ops.tanh(keras.ops.take(self.table, tokens, axis=0))
        return keras.ops.matmul(x, keras.ops.transpose(self.table))


def test_tied_table(rows_kept):
    layer = _TiedLanguageModel()
    layer.build((None, 8))
    # Repeated tokens: terms of one example meet in the same entries.
    tokens = np.random.default_rng(0).integers(0, 9, (BATCH, 8)).astype("int32")
    inputs = keras.Input((8,), dtype="int32")
    _assert_same(keras.Model(inputs, layer(inputs)), tokens)


def test_steps_of_a_loop_are_terms_of_one_site():
    """Otherwise, each step would store rows, to be added up."""
    model, x = _model_of("steps_gram")
    sites = []

    @tf.function(autograph=False)
    def compute(x, y):
        rows, _ = gradients.per_example_gradients(
            _losses(model), (x, y), model.trainable_variables, "graph"
        )
        sites.extend(site for site, _ in rows._parts.values())
        return rows.sq_norms()

    compute(x, np.zeros(BATCH, "f"))
    assert sites[0].terms == 3


@pytest.mark.parametrize("implementation", ["graph", "map_fn"])
def test_cancelling_positions_take_rows(implementation):
    """Gram matrices lose all digits here; the norm must stay right."""
    model = _model((2, 64), L.Dense(64, use_bias=False))
    kernel = model.trainable_variables[0]
    x = _normal(1, 64)
    x = np.concatenate([x, -x], 1) + 1e-4 * _normal(2, 64)

    def loss_fn(batch):
        return tf.reduce_sum(model(batch), [1, 2]), None

    @tf.function(autograph=False)
    def norms(x):
        rows, _ = gradients.per_example_gradients(
            (lambda b: (loss_fn(b)[0], b)), x, [kernel], implementation
        )
        return rows.sq_norms()

    exact = 64 * np.sum(np.square(np.sum(x.astype("float64"), 1)), 1)
    np.testing.assert_allclose(norms(tf.constant(x)), exact, rtol=1e-3)


def test_a_weight_without_effect_has_zero_rows():
    model = _model((3,), L.Dense(2))
    unused = keras.Variable(np.ones((2, 2), "float32"))

    @tf.function(autograph=False)
    def compute(x):
        rows, _ = gradients.per_example_gradients(
            lambda b: (tf.reduce_sum(model(b), 1), b),
            x,
            [*model.trainable_variables, unused],
        )
        return rows.rows(unused), rows.weighted_sum(tf.ones([BATCH]))[-1]

    rows, total = compute(tf.constant(_normal(3)))
    assert rows.shape == (BATCH, 2, 2) and not np.any(rows)
    assert total.shape == (2, 2) and not np.any(total)


@pytest.mark.parametrize(
    "layer", [L.Dense(4, use_bias=False), L.Conv2D(4, 2, use_bias=False)]
)
def test_squares_that_underflow_hide_no_factor(monkeypatch, layer):
    """Positions that cancel leave rounding errors of the size of products."""
    monkeypatch.setattr(sites, "KEPT_ROWS", 0)
    monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)
    tiny, huge, positions = 5e-20, 2e16, 16
    x = np.full((BATCH, 5, 5, 3), tiny, "float32")
    layer.build(x.shape)
    sign = np.resize([1.0, -1.0], layer(x).shape[1:3])[..., None]
    sign = tf.constant(sign, tf.float32)

    def loss_fn(batch):
        return tf.reduce_sum(huge * sign * layer(batch), [1, 2, 3]), None

    @tf.function(autograph=False)
    def bounds(x):
        rows, _ = gradients.per_example_gradients(
            loss_fn, x, layer.trainable_variables
        )
        return rows.sq_norm_bounds()

    sq_size = (tiny * huge * positions) ** 2 * 3 * 4
    assert np.all(bounds(tf.constant(x)) >= 2.0**-18 * sq_size)


@pytest.mark.parametrize("longest, parts", [(45, 1), (44, 2), (20, 3), (1, 5)])
def test_products_of_patches_have_short_sums(monkeypatch, longest, parts):
    """Long ones in float32 would lose what is left for the residual of GEP."""
    monkeypatch.setattr(convolutions, "LONGEST_COORDINATE", longest)
    random = np.random.default_rng(0)
    image = random.normal(size=(2, 1, 6, 6, 5)).astype("float32")
    filters = random.normal(size=(3, 3, 5, 4)).astype("float32")

    @tf.function(autograph=False)
    def products(image, filters):
        op = tf.nn.conv2d(image[:, 0], filters, 1, "SAME").op
        geometry = convolutions._Geometry(op, filters.shape, image.shape[2:])
        return geometry.convolved(image, filters), op.outputs[0]

    graph = products.get_concrete_function(image, filters).graph
    kinds = [op.type for op in graph.get_operations()]
    assert kinds.count("Conv2D") == 1 + parts
    np.testing.assert_allclose(*products(image, filters), atol=1e-5)
