"""Losses made to leak from one example's row into another's.

Each was accepted by a proof that was less strict. It must be refused, or the
row of an example must not depend on the others.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, tensor_pb2
from tensorflow.python.ops import handle_data_util

from tf_dpsub import gradients
from tf_dpsub.gradients.graph import sites

BATCH = 4


def _weight():
    return tf.Variable(np.ones(3, "float32"))


def _rows(loss_fn, x, variable, implementation):
    @tf.function(autograph=False)
    def compute(x):
        per_example, _ = gradients.per_example_gradients(
            lambda batch: (loss_fn(batch), None), x, [variable], implementation
        )
        return per_example.rows(variable)

    return compute(tf.constant(x)).numpy()


def _assert_refused_or_separate(loss_fn, variable, implementation="graph"):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, 3)).astype("float32")
    other = x.copy()
    other[1:] = 3 * rng.normal(size=other[1:].shape) + 5
    try:
        rows = _rows(loss_fn, x, variable, implementation)
        changed = _rows(loss_fn, other, variable, implementation)
    except (gradients.Unproven, gradients.UpdatesState):
        return
    np.testing.assert_array_equal(rows[0], changed[0])


def test_broadcast_gradient_arguments_of_values():
    w = _weight()

    def loss_fn(x):
        sizes = tf.where(x[:, 0] > 2.0, 2, 1)
        axes, _ = tf.raw_ops.BroadcastGradientArgs(
            s0=sizes, s1=tf.fill([BATCH], 2)
        )
        return tf.reduce_sum(x * w * (1.0 + tf.cast(tf.size(axes), x.dtype)), 1)

    _assert_refused_or_separate(loss_fn, w)


def test_gather_that_counts_batch_axes_from_the_end():
    w = _weight()
    table = tf.random.stateless_normal([BATCH, 5, BATCH], [1, 2])

    def loss_fn(x):
        indices = tf.cast(tf.clip_by_value(tf.abs(x[:, :2]), 0, 4), tf.int32)
        gathered = tf.raw_ops.GatherV2(
            params=table, indices=indices, axis=1, batch_dims=-1
        )
        return tf.reduce_sum(x * w, 1) * tf.reduce_sum(gathered, [0, 1])

    _assert_refused_or_separate(loss_fn, w)


@pytest.mark.parametrize("new_axis_mask", [1, 4, 8])
def test_strided_slice_with_stray_bits(new_axis_mask):
    w = _weight()

    def loss_fn(x):
        flipped = tf.strided_slice(
            tf.transpose(x),
            [0, 0],
            [0, 0],
            [1, -1],
            begin_mask=3,
            end_mask=3,
            ellipsis_mask=1,
            new_axis_mask=new_axis_mask,
        )
        flipped = tf.reshape(flipped, [3, BATCH])
        return tf.reduce_sum(x * w, 1) * tf.reduce_sum(flipped, 0)

    _assert_refused_or_separate(loss_fn, w)


def _descend(state, x):
    tf.raw_ops.ResourceApplyGradientDescent(
        var=state.handle, alpha=1.0, delta=-tf.reduce_mean(x)
    )


@pytest.mark.parametrize("implementation", gradients.IMPLEMENTATIONS)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_state_is_written_by_a_training_operation(hidden, implementation):
    w, state = _weight(), tf.Variable(0.0, trainable=False)

    def loss_fn(x):
        def write():
            _descend(state, x)
            return 0.0

        if hidden:
            tf.cond(tf.reduce_sum(x) < 1e30, write, lambda: 0.0)
        else:
            write()
        return tf.reduce_sum(x * w * state.read_value(), 1)

    x = np.ones((BATCH, 3), "float32")
    with pytest.raises((gradients.UpdatesState, gradients.Unproven)):
        _rows(loss_fn, x, w, implementation)
    assert state.numpy() == 0.0


@pytest.mark.parametrize("implementation", gradients.IMPLEMENTATIONS)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_table_is_written(hidden, implementation):
    w = _weight()
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    key = tf.constant([0], tf.int64)

    def loss_fn(x):
        old = table.lookup(key)

        def write():
            table.insert(key, tf.reshape(tf.reduce_sum(x), [1]))
            return 0.0

        if hidden:
            tf.cond(tf.reduce_sum(x) < 1e30, write, lambda: 0.0)
        else:
            write()
        return tf.reduce_sum(x * w, 1) * old[0]

    x = np.ones((BATCH, 3), "float32")
    with pytest.raises((gradients.UpdatesState, gradients.Unproven)):
        _rows(loss_fn, x, w, implementation)


def test_inputs_of_another_batch_are_refused():
    w = _weight()

    def loss_fn(x):
        folded = tf.reshape(x, [2, BATCH // 2, 3])
        return tf.reduce_sum(folded * w, [1, 2])

    with pytest.raises(gradients.Unproven):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: tf.nn.relu(x) @ w + w[0],
        lambda x, w: tf.nn.relu(2.0 * x) * w[0],
    ],
)
def test_functions_of_several_operations_fall_back(layer):
    w = tf.Variable(np.eye(3, dtype="float32"))
    function = tf.function(lambda x: layer(x, w), autograph=False)
    with pytest.raises(gradients.Unproven):
        _rows(
            lambda x: tf.reduce_sum(function(x), 1),
            np.ones((BATCH, 3), "float32"),
            w,
            "graph",
        )


# A function that TensorFlow does not look into when it finds shapes.
_hidden = tf.function(tf.identity, autograph=False)


def _set(tensor, shape):
    tensor.set_shape(shape)
    return tensor


def _column(w):
    """A row of numbers, for each example another one in truth."""
    column = tf.reshape(tf.stack([w, 2 * w]), _hidden(tf.constant([6, 1])))
    return column[:BATCH]


# Any shape may be assigned to it.
_COLUMN = tf.Variable(
    np.arange(BATCH, dtype="float32")[:, None], shape=tf.TensorShape(None)
)


def _looped(w):
    return tf.while_loop(
        lambda k, _: k < 1,
        lambda k, _: (k + 1, _set(_column(w), [1, 3])),
        [0, tf.ones([1, 3])],
    )[1]


def _called(function):
    """The result of a function that TensorFlow does not look into."""
    return tf.function(function, autograph=False)()


def _chosen(function):
    return tf.cond(tf.ones([]) > 0.0, function, lambda: tf.ones([1, 3]))


def _lie():
    return _set(_column(tf.ones(3)), [1, 3])


def _parsed():
    rows = tf.reshape(tf.range(3.0 * BATCH), [BATCH, 3])
    return tf.io.parse_tensor(tf.io.serialize_tensor(rows), tf.float32)


def _unpacked():
    """Ragged rows that are not ragged."""
    packed = tf.raw_ops.RaggedTensorToVariant(
        rt_nested_splits=[],
        rt_dense_values=_column(tf.ones(3)),
        batched_input=False,
    )
    return tf.raw_ops.RaggedTensorFromVariant(
        encoded_ragged=packed,
        input_ragged_rank=0,
        output_ragged_rank=0,
        Tvalues=tf.float32,
        Tsplits=tf.int64,
    ).output_dense_values


def _list(element):
    """A list of one element whose shape TensorFlow was not told."""
    return tf.raw_ops.TensorListPushBack(
        input_handle=tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=1, element_dtype=tf.float32
        ),
        tensor=element,
    )


def _first(handle, shape):
    return tf.raw_ops.TensorListGetItem(
        input_handle=handle,
        index=0,
        element_shape=shape,
        element_dtype=tf.float32,
    )


def _last(handle, shape):
    return tf.raw_ops.TensorListPopBack(
        input_handle=handle, element_shape=shape, element_dtype=tf.float32
    ).tensor


def _array():
    array = tf.TensorArray(tf.float32, 1, infer_shape=False)
    return array.write(0, _column(tf.ones(3)))


def _new_list(shape):
    return tf.raw_ops.TensorListReserve(
        element_shape=shape, num_elements=1, element_dtype=tf.float32
    )


def _long_in_list():
    item = tf.reshape(tf.range(4.0), _hidden(tf.constant([1, 4])))
    return tf.raw_ops.TensorListSetItem(
        input_handle=_new_list(-1), index=0, item=item
    )


def _scattered():
    return tf.raw_ops.TensorListScatterIntoExistingList(
        input_handle=_new_list([1, 1]),
        tensor=tf.reshape(tf.range(4.0), _hidden(tf.constant([1, 1, 4]))),
        indices=[0],
    )


def _split():
    return tf.raw_ops.TensorListSplit(
        tensor=tf.range(4.0)[:, None],
        element_shape=[1, 1],
        lengths=tf.constant([4], tf.int64),
    )


def _reserve(shape):
    """An output of a kernel that may use it or not."""
    return tf.raw_ops.FusedBatchNormV3(
        x=tf.ones([1, 2, 2, 1]),
        scale=[1.0],
        offset=[0.0],
        mean=[0.0],
        variance=[1.0],
        is_training=False,
    ).reserve_space_3


def _clamped_sizes():
    """[1, 1], of numbers of which one is 4 before it is clamped."""
    sizes = tf.maximum(_hidden(tf.constant([1, BATCH])), 1)
    return tf.raw_ops.Minimum(x=sizes, y=1)


def _passed_on():
    """The handle of a variable, with another shape."""
    handle = tf.raw_ops.Identity(input=_ROWS.handle)
    handle_data_util.set_handle_data(
        handle,
        handle_data_util.create_handle_data(tf.TensorShape([1, 3]), tf.float32),
    )
    return handle


_ROWS = tf.Variable(np.arange(3.0 * BATCH, dtype="float32").reshape(BATCH, 3))
# Their shapes follow from values, and were set to others.
_OF_VALUES = {
    "Where": lambda w: _set(tf.where(tf.stack([w[0]] * BATCH) > 0), [1, 1]),
    "Unique": lambda w: _set(tf.unique(tf.range(1.0, 5.0) * w[0]).y, [1]),
    "ListDiff": lambda w: _set(
        tf.raw_ops.ListDiff(x=tf.range(1.0, 5.0) * w[0], y=[7.0]).out, [1]
    ),
    "Range": lambda w: _set(tf.range(0.0, BATCH * w[0]), [1]),
    "DecodeRaw": lambda w: _set(
        tf.io.decode_raw(
            tf.constant(np.arange(BATCH, dtype="float32").tobytes()),
            tf.float32,
        ),
        [1],
    ),
    "DynamicPartition": lambda w: _set(
        tf.dynamic_partition(tf.range(1.0, 5.0) * w[0], [0] * BATCH, 1)[0], [1]
    ),
    "CheckNumericsV2": lambda w: _set(
        tf.raw_ops.CheckNumericsV2(tensor=_column(w), message=""), [1, 3]
    ),
    "ResizeBilinearGrad": lambda w: tf.raw_ops.ResizeBilinearGrad(
        grads=tf.reshape(tf.range(1.0, 5.0), [BATCH, 1, 1, 1]),
        original_image=tf.ones([1, 1, 1, 1]),
    )[:, 0, 0, 0],
    "ParseTensor": lambda w: _set(_parsed(), [1, 3]),
    "RaggedTensorFromVariant": lambda w: _set(_unpacked(), [1, 3]),
    "a list's first": lambda w: _first(_list(_column(w)), [1, 3]),
    "a list's last": lambda w: _set(_last(_list(_column(w)), [1, 3]), [1, 3]),
    "an array's first": lambda w: _set(_array().read(0), [1, 3]),
    "a sum of lists": lambda w: _first(
        tf.raw_ops.AddN(inputs=[_new_list([1, 1]), _long_in_list()]), [1, 1]
    ),
    "a list that was scattered to": lambda w: _first(_scattered(), [1, 1]),
    "a list that was split": lambda w: _first(_split(), [1, 1]),
    "FusedBatchNormV3": lambda w: _set(_reserve([1]), [1]),
    "clamped sizes": lambda w: _set(
        tf.raw_ops.Tile(input=tf.ones([1, 1]), multiples=_clamped_sizes()),
        [1, 4],
    )[:, :1],
    "a handle": lambda w: tf.raw_ops.ReadVariableOp(
        resource=_passed_on(), dtype=tf.float32
    ),
    "all of an array": lambda w: _set(_array().stack(), [1, 1, 3])[0],
}


def _weighed_by_values(x, w, name):
    numbers = tf.cast(_OF_VALUES[name](tf.stop_gradient(w + 0)), x.dtype)
    return x * w * (numbers[:, None] if numbers.shape.rank == 1 else numbers)


_LIES = {
    **{
        name: functools.partial(_weighed_by_values, name=name)
        for name in _OF_VALUES
    },
    "a branch in a function": lambda x, w: (
        x * w * _called(lambda: _chosen(_lie))
    ),
    "a function in a function": lambda x, w: (
        x * w * _called(lambda: 1.0 * _called(_lie))
    ),
    "a loop in a function": lambda x, w: (
        x * w * _called(lambda: _looped(tf.ones(3)))
    ),
    "a branch in a branch": lambda x, w: x * w * _chosen(lambda: _chosen(_lie)),
    "a loop in a branch": lambda x, w: (
        x * w * _chosen(lambda: _looped(tf.ones(3)))
    ),
    "rows": lambda x, w: tf.cumsum(
        _set(
            tf.reshape(x * w, _hidden(tf.constant([BATCH // 2, 6]))),
            [BATCH, 3],
        ),
        1,
    ),
    "weights": lambda x, w: x * w * _set(_column(w), [1, 3]),
    "weights, later": lambda x, w: x * w * _set(tf.tanh(_column(w)), [1, 3]),
    "of a function": lambda x, w: (
        x * w * _set(tf.function(lambda: _column(w), autograph=False)(), [1, 3])
    ),
    "in a function": lambda x, w: (
        x * w * tf.function(lambda: _set(_column(w), [1, 3]), autograph=False)()
    ),
    "in a branch": lambda x, w: (
        x
        * w
        * tf.cond(
            tf.ones([]) > 0.0,
            lambda: _set(_column(tf.ones(3)), [1, 3]),
            lambda: tf.ones([1, 3]),
        )
    ),
    "in a case": lambda x, w: (
        x
        * w
        * tf.switch_case(
            _hidden(tf.constant(0)),
            [
                lambda: _set(_column(tf.ones(3)), [1, 3]),
                lambda: tf.ones([1, 3]),
            ],
        )
    ),
    "in a loop": lambda x, w: x * w * _looped(tf.ones(3)),
    "of a variable": lambda x, w: (
        x
        * w
        * _set(
            tf.raw_ops.ReadVariableOp(resource=_COLUMN.handle, dtype=x.dtype),
            [1, 3],
        )
    ),
}


@pytest.mark.parametrize("name", _LIES)
def test_shapes_that_were_set(name):
    """Nothing checks them when the graph runs."""
    w = _weight()
    with pytest.raises(gradients.Unproven, match="was set|an effect of"):
        _rows(
            lambda x: tf.reduce_sum(tf.tanh(_LIES[name](x, w)), 1),
            np.ones((BATCH, 3), "float32"),
            w,
            "graph",
        )


@pytest.mark.parametrize("take", [_first, _last])
def test_rows_taken_from_a_list(take):
    """Its kernels do not look whether an element has the shape they claim."""
    w = _weight()

    def loss_fn(x):
        numbers = tf.reshape(take(_list(x), [BATCH, 1]), [-1])
        return tf.reduce_sum(x * w, 1) * numbers[:BATCH]

    with pytest.raises(gradients.Unproven):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_clamped_numbers_whose_shape_was_set():
    """Equal numbers are public, but not how many there are."""
    w = _weight()

    def loss_fn(x):
        numbers = tf.reshape(tf.range(BATCH), _hidden(tf.constant([1, BATCH])))
        sums = tf.cast(tf.reduce_sum(x), tf.int32) + numbers
        fives = tf.raw_ops.Minimum(x=tf.maximum(sums, 5), y=5)
        products = tf.cast(x[:, :1], tf.int32) * _set(fives, [1, 1])
        first = tf.slice(tf.reshape(products, [-1]), [0], [BATCH])
        return tf.reduce_sum(x * w, 1) * tf.cast(first, x.dtype)

    with pytest.raises(gradients.Unproven, match="a shape that was set"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_a_shape_that_is_set_when_gradients_are_made():
    """What had been found of it was found of another shape."""
    w = _weight()

    def loss_fn(x):
        column = _column(tf.stop_gradient(w + 0))

        @tf.custom_gradient
        def weigh(x):
            def gradient(dy):
                return dy * _set(column, [1, 3])

            return tf.identity(x), gradient

        weighed = tf.reduce_sum(tf.tanh(weigh(x * w)), 1)
        return weighed + 0 * tf.reduce_sum(column)

    with pytest.raises(gradients.Unproven):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_zeros_of_two_signs():
    """An example's place would show in the sign of a reciprocal."""
    w = _weight()
    zeros = np.zeros((BATCH, 1), "float32")
    zeros[1::2] = -0.0

    def loss_fn(x):
        signs = tf.where(1.0 / tf.constant(zeros) > 0.0, 1.0, 2.0)
        return tf.reduce_sum(tf.tanh(x * w * signs), 1)

    with pytest.raises(gradients.Unproven, match="differs from place to place"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_constants_that_are_truncated():
    """Rounded, they would be the same."""
    w = _weight()
    numbers = np.full((BATCH, 1), 1.0078125, "float32")
    numbers[1::2] = 1.006

    def loss_fn(x):
        truncated = tf.raw_ops.Cast(
            x=tf.constant(numbers), DstT=tf.bfloat16, Truncate=True
        )
        return tf.reduce_sum(tf.tanh(x * w * tf.cast(truncated, x.dtype)), 1)

    with pytest.raises(gradients.Unproven, match="differs from place to place"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_constants_that_kernels_take_as_zero():
    """Some kernels do, others do not: they may differ where others agree."""
    w = _weight()
    numbers = np.ones((BATCH, 1), "float32")
    numbers[1::2] = 1e-40

    def loss_fn(x):
        signs = tf.where(tf.constant(numbers) * 1.0 > 0.0, 1.0, 2.0)
        return tf.reduce_sum(tf.tanh(x * w * signs), 1)

    with pytest.raises(gradients.Unproven, match="differs from place to place"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_logits_without_an_axis_of_the_batch():
    """TensorFlow takes the examples as the classes of one."""
    w = _weight()

    def loss_fn(x):
        loss, _ = tf.raw_ops.SoftmaxCrossEntropyWithLogits(
            features=tf.reduce_sum(x * w, 1), labels=tf.ones([BATCH, BATCH])
        )
        return loss

    with pytest.raises(
        (gradients.Unproven, gradients.MixesExamples), match="rows of logits"
    ):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_a_table_whose_keys_are_vectors():
    """All examples together are one key."""
    w = _weight()
    table = tf.lookup.experimental.DenseHashTable(
        tf.int64,
        tf.float32,
        default_value=tf.ones([]),
        empty_key=tf.constant([-1] * BATCH, tf.int64),
        deleted_key=tf.constant([-2] * BATCH, tf.int64),
    )
    handle = table.resource_handle

    def loss_fn(x):
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=handle,
            keys=tf.cast(x[:, 0], tf.int64),
            default_value=tf.ones([]),
        )
        return tf.reduce_sum(x * w, 1) * tf.reshape(found, [])

    with pytest.raises(gradients.Unproven, match="vectors as keys"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_a_table_whose_keys_are_scalars_is_read():
    w = _weight()
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.constant([1, 2], tf.int64), tf.constant([5.0, 7.0])
        ),
        default_value=1.0,
    )

    def loss_fn(x):
        found = table.lookup(tf.cast(x[:, 0], tf.int64))
        return tf.reduce_sum(x * w, 1) * found

    x = np.tile(np.array([[1], [2], [3], [1]], "float32"), 3)
    rows = _rows(loss_fn, x, w, "graph")
    np.testing.assert_array_equal(rows[:, 0], [5.0, 14.0, 3.0, 5.0])


def test_the_number_of_an_algorithm_as_a_key():
    """Anybody can draw the same numbers."""
    w = _weight()
    seed = tf.Variable([1, 2])

    def loss_fn(x):
        made = tf.raw_ops.StatelessRandomGetKeyCounterAlg(seed=seed)
        numbers = tf.random.stateless_uniform([BATCH], [made.alg, made.alg])
        return tf.reduce_sum(x * w, 1) * numbers

    with pytest.raises(gradients.Unproven):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


@pytest.mark.parametrize("implementation", ["graph", "map_fn"])
def test_a_dataset_that_was_captured(implementation):
    """It may read a state, or files, whenever it is asked."""
    w = _weight()
    dataset = tf.data.Dataset.range(3)._variant_tensor

    def loss_fn(x):
        (element,) = tf.raw_ops.GetElementAtIndex(
            dataset=dataset,
            index=tf.constant(1, tf.int64),
            output_types=[tf.int64],
            output_shapes=[tf.TensorShape([])],
        )
        return tf.reduce_sum(x * w, 1) * tf.cast(element, x.dtype)

    with pytest.raises(
        gradients.Unproven, match="captured from outside|effect"
    ):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, implementation)


def test_a_variable_whose_handle_tells_another_shape():
    w = _weight()
    rows = tf.Variable(np.arange(3.0 * BATCH, dtype="float32").reshape(-1, 3))
    rows.handle._handle_data = handle_data_util.create_handle_data(
        tf.TensorShape([1, 3]), tf.float32
    )

    def loss_fn(x):
        read = tf.raw_ops.ReadVariableOp(resource=rows.handle, dtype=x.dtype)
        return tf.reduce_sum(x * w * read, 1)

    with pytest.raises(gradients.Unproven, match="told to be"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


@pytest.mark.parametrize(
    "start, refused",
    [
        (lambda counter: tf.constant([1, 0], tf.uint64), "counter of its own"),
        (
            lambda counter: counter + tf.constant([1, 0], tf.uint64),
            "counter of its own",
        ),
    ],
)
def test_draws_whose_numbers_overlap(start, refused):
    """By its counter, one draw begins within another one."""
    w = _weight()
    seed = tf.Variable([1, 2])

    def loss_fn(x):
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        own, others = (
            tf.raw_ops.StatelessRandomUniformV2(
                shape=[BATCH, BATCH], key=key, counter=first, alg=1
            )
            for first in (counter, start(counter))
        )
        return tf.reduce_sum(x * w, 1) * (own[:, 1] + others[:, 0])

    with pytest.raises(gradients.Unproven, match=refused):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


@pytest.mark.parametrize("implementation", gradients.IMPLEMENTATIONS)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", ["InplaceAdd", "InplaceSub", "InplaceUpdate"])
def test_a_weight_is_written_in_place(kind, hidden, implementation):
    """By an operation that TensorFlow does not declare to have an effect."""
    w, state = _weight(), tf.Variable(np.zeros([2, 3], "float32"))

    def loss_fn(x):
        def write():
            value = tf.reduce_sum(x, 0, keepdims=True)
            operation = getattr(tf.raw_ops, kind)
            return operation(x=state.read_value(), i=[0], v=value)[0, 0]

        written = (
            tf.cond(tf.reduce_sum(x) < 1e30, write, lambda: 0.0)
            if hidden
            else write()
        )
        with tf.control_dependencies([written]):
            return tf.reduce_sum(x * w * state.read_value()[0], 1)

    x = np.ones((BATCH, 3), "float32")
    with pytest.raises(gradients.UpdatesState, match="changes a tensor"):
        _rows(loss_fn, x, w, implementation)
    np.testing.assert_array_equal(state, np.zeros([2, 3]))


@pytest.mark.parametrize("implementation", gradients.IMPLEMENTATIONS)
def test_a_state_is_written_in_one_of_many_branches(implementation):
    """The branches of `Case` are a list of functions."""
    w, state = _weight(), tf.Variable(0.0, trainable=False)

    def loss_fn(x):
        total = tf.reduce_sum(x)
        tf.switch_case(
            _hidden(tf.constant(1)),
            [lambda: tf.constant(0.0), lambda: state.assign(total)],
        )
        return tf.reduce_sum(x * w, 1)

    x = np.ones((BATCH, 3), "float32")
    with pytest.raises((gradients.UpdatesState, gradients.Unproven)):
        _rows(loss_fn, x, w, implementation)
    assert state.numpy() == 0.0


def _uniform(seed):
    return tf.random.stateless_uniform([BATCH, BATCH], seed)


def _of_the_next_key(seed):
    own = _uniform(seed.read_value() + [0, 1])
    seed.assign_add([0, 1])
    return own, _uniform(seed.read_value())


def _of_added_and_moved_keys(seed):
    """The second number of a key is moved on, and so is what is added to it."""
    own = _uniform(seed.read_value() + [1, 1])
    seed.assign_add([0, 1])
    return own, _uniform(seed.read_value() + [1, 0])


def _of_gathered_keys(seed):
    gathered = tf.raw_ops.ResourceGatherNd(
        resource=seed.handle, indices=[[0], [1]], dtype=tf.int32
    )
    return _uniform(gathered), _uniform(seed.read_value())


def _of_two_numbers_as_one(seed):
    """What is added to one number is added to the first of two alone."""
    own = _uniform(seed.read_value() + 1)
    seed.assign_add([0, 1])
    both = tf.bitcast(seed.read_value(), tf.int64) + 1
    return own, _uniform(tf.bitcast(both, tf.int32))


def _of_half_a_key(seed):
    def half(key):
        low = tf.math.floormod(tf.bitcast(key, tf.int64), 2**32)
        return _uniform(tf.bitcast(low, tf.int32))

    own = half(seed.read_value())
    seed.assign_add([0, 1])
    return own, half(seed.read_value())


def _of_two_moduli(seed):
    key = tf.cast(seed.read_value(), tf.int64)
    modulus = 2**31 - 2
    return (
        _uniform(tf.math.floormod(key + 1, modulus + 1)),
        _uniform(tf.math.floormod(key, modulus)),
    )


def _of_another_integer_first(seed):
    """Of numbers that differ by 16, as 2^64 is 16 modulo 2^31 - 2."""
    key = tf.cast(seed.read_value(), tf.int64)
    modulus = 2**31 - 2
    unsigned = tf.math.floormod(tf.cast(key, tf.uint64), modulus)
    return (
        _uniform(tf.cast(unsigned, tf.int64)),
        _uniform(tf.math.floormod(key + 16, modulus)),
    )


def _of_no_keys(seed):
    size = tf.raw_ops.VariableShape(input=seed.handle)
    return _uniform(0 * seed.read_value()), _uniform(tf.tile(0 * size, [2]))


@pytest.mark.parametrize(
    "draw_two",
    [
        _of_the_next_key,
        _of_added_and_moved_keys,
        _of_gathered_keys,
        _of_two_numbers_as_one,
        _of_half_a_key,
        _of_two_moduli,
        _of_another_integer_first,
        _of_no_keys,
    ],
)
def test_keys_that_are_equal(draw_two):
    """Two draws have the same numbers, each at another example's place."""
    w = _weight()
    seed = tf.Variable([1, 2])

    def loss_fn(x):
        first, second = draw_two(seed)
        total = tf.reduce_sum(x * w, 1)
        return total * first[:, 1] + total * tf.transpose(second)[:, 0]

    with pytest.raises(gradients.Unproven):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_a_parameter_of_a_draw_that_is_made_of_a_key():
    """The law of a number is that of its place."""
    w = _weight()
    seed = tf.Variable([1, 2])

    def loss_fn(x):
        key = seed.read_value()
        alpha = np.array([0.1, 1, 10, 100], "float32")
        numbers = tf.raw_ops.StatelessRandomGammaV2(
            shape=[BATCH],
            seed=key,
            alpha=alpha + 0 * tf.cast(key[0], tf.float32),
        )
        return tf.reduce_sum(x * w, 1) * numbers

    with pytest.raises(gradients.Unproven):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


@pytest.mark.parametrize(
    "kind",
    [
        "InvGrad",
        "ReciprocalGrad",
        "RsqrtGrad",
        "SigmoidGrad",
        "SqrtGrad",
        "TanhGrad",
    ],
)
@pytest.mark.parametrize("is_public", [False, True])
def test_gradients_that_pair_numbers_by_their_order(kind, is_public):
    """They have the shape of one input, and look at no other."""
    w = _weight()
    gradient = getattr(tf.raw_ops, kind)

    def loss_fn(x):
        if is_public:
            given = gradient(y=0.5 + 0 * x[:, :2], dy=tf.range(2.0 * BATCH))
            factors = tf.reduce_sum(given, 1)
        else:
            given = gradient(y=tf.fill([2, BATCH, 1], 0.5), dy=x[:, :2])
            factors = tf.reshape(tf.reduce_sum(given, 0), [BATCH])
        return tf.reduce_sum(x * w, 1) * factors

    with pytest.raises(gradients.Unproven, match="number by number"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_a_list_that_was_captured():
    """It may hold what was computed from the batch."""
    w = _weight()

    @tf.function(autograph=False)
    def compute(x):
        total = tf.raw_ops.TensorListFromTensor(
            tensor=tf.reduce_sum(x)[None],
            element_shape=tf.constant([], tf.int32),
        )

        def rows(x):
            per_example, _ = gradients.per_example_gradients(
                lambda x: (
                    tf.reduce_sum(x * w, 1)
                    * _first(total, tf.constant([], tf.int32)),
                    None,
                ),
                x,
                [w],
            )
            return per_example.rows(w)

        return tf.function(rows, autograph=False)(x)

    with pytest.raises(gradients.Unproven, match="captured from outside"):
        compute(tf.ones([BATCH, 3]))


def _handle_proto():
    proto = tensor_pb2.TensorProto(dtype=tf.resource.as_datatype_enum)
    proto.tensor_shape.SetInParent()
    proto.resource_handle_val.add(
        device="/job:localhost/replica:0/task:0/device:CPU:0",
        container="localhost",
        name="metric",
        maybe_type_name="tensorflow::Var",
    )
    return proto


def _constant_handle(kind):
    attributes = {
        "value": attr_value_pb2.AttrValue(tensor=_handle_proto()),
        "dtype": attr_value_pb2.AttrValue(type=tf.resource.as_datatype_enum),
    }
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(kind, [], [tf.resource], attrs=attributes).outputs[0]


def _parsed_handle():
    return tf.raw_ops.ParseTensor(
        serialized=_handle_proto().SerializeToString(), out_type=tf.resource
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: _constant_handle("Const"),
        lambda: _constant_handle("HostConst"),
        _parsed_handle,
    ],
    ids=["constant", "on the host", "parsed"],
)
@pytest.mark.parametrize("implementation", ["graph", "map_fn"])
def test_a_variable_whose_handle_is_made(make, implementation):
    """It is none of those that a loss is known to read."""
    w = _weight()

    def loss_fn(x):
        handle = make()
        handle_data_util.set_handle_data(
            handle,
            handle_data_util.create_handle_data(tf.TensorShape([]), x.dtype),
        )
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=x.dtype)
        return tf.reduce_sum(x * w, 1) * value

    with pytest.raises(
        gradients.Unproven, match="do not determine|shape that was set"
    ):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, implementation)


def _concrete(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _write_and_pass_on(handle, x):
    write = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.reduce_sum(x))
    with tf.control_dependencies([write]):
        return tf.identity(x)


_HANDLE = tf.TensorSpec([], tf.resource)


def _call_without_state(handle, x):
    spec = tf.TensorSpec(x.shape, x.dtype)
    return tf.raw_ops.PartitionedCall(
        args=[handle, x],
        Tout=[x.dtype],
        f=_concrete(_write_and_pass_on, _HANDLE, spec),
    )[0]


def _loop_without_state(handle, x):
    specs = tf.TensorSpec([], tf.int32), _HANDLE, tf.TensorSpec(x.shape)
    return tf.raw_ops.StatelessWhile(
        input=[tf.constant(0), handle, x],
        cond=_concrete(lambda k, handle, x: k < 1, *specs),
        body=_concrete(
            lambda k, handle, x: (k + 1, handle, _write_and_pass_on(handle, x)),
            *specs,
        ),
        output_shapes=[[], [], x.shape],
    )[2]


@pytest.mark.parametrize("run", [_call_without_state, _loop_without_state])
@pytest.mark.parametrize("implementation", ["graph", "map_fn"])
def test_a_state_is_written_where_none_is_declared(run, implementation):
    w, state = _weight(), tf.Variable(0.0, trainable=False)
    with pytest.raises(gradients.UpdatesState):
        _rows(
            lambda x: tf.reduce_sum(run(state.handle, x) * w, 1),
            np.ones((BATCH, 3), "float32"),
            w,
            implementation,
        )
    assert state.numpy() == 0.0


def _keep(state, numbers):
    state.assign(numbers)


def _write_file(state, numbers):
    text = tf.strings.reduce_join(tf.strings.as_string(numbers))
    tf.raw_ops.WriteFile(filename="/dev/null", contents=text)


def _stage(state, numbers):
    tf.raw_ops.Stage(values=[numbers], shared_name="attack")


def _print(state, numbers):
    tf.print(numbers)


def _fail(state, numbers):
    tf.raw_ops.Assert(condition=tf.ones([], "bool"), data=[numbers])


@pytest.mark.parametrize("tell", [_keep, _write_file, _stage, _print, _fail])
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("implementation", ["graph", "map_fn"])
def test_a_function_tells_secrets_of_a_step(tell, is_key, implementation):
    """They tell which place an example had."""
    w, state = _weight(), tf.Variable(np.zeros(BATCH, "float32"))
    seed = tf.Variable([1, 2])

    def tell_all(key):
        numbers = tf.cast(tf.repeat(key[:1], BATCH), tf.float32)
        tell(state, numbers if is_key else tf.random.uniform([BATCH]))
        return 1.0

    def loss_fn(x):
        key = seed.read_value()
        seed.assign_add([0, 1])
        factor = tf.function(tell_all, autograph=False)(key)
        return tf.reduce_sum(x * w, 1) * factor

    with pytest.raises(
        (gradients.Unproven, gradients.UpdatesState),
        match="a secret key|do not determine",
    ):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, implementation)


def test_a_function_in_whose_place_another_may_run():
    w = _weight()
    double, mixed = (
        tf.function(
            function,
            autograph=False,
            experimental_attributes={
                "api_implements": "attack",
                "api_preferred_device": device,
            },
        )
        for function, device in (
            (lambda x: 2.0 * x, "GPU"),
            (lambda x: x * tf.reduce_sum(x), "CPU"),
        )
    )

    def loss_fn(x):
        mixed.get_concrete_function(tf.TensorSpec([BATCH, 3])).add_to_graph(
            tf.compat.v1.get_default_graph()
        )
        return tf.reduce_sum(double(x) * w, 1)

    with pytest.raises(gradients.Unproven, match="another one"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


@pytest.mark.parametrize("is_called", [False, True])
def test_a_variable_that_is_assigned_another_shape(is_called):
    w = _weight()
    state = tf.Variable(np.ones([1, 1], "float32"), trainable=False)

    def assign():
        tf.raw_ops.AssignVariableOp(
            resource=state.handle,
            value=tf.reshape(tf.range(4.0), _hidden(tf.constant([4, 1]))),
        )
        return state.read_value()

    def loss_fn(x):
        read = _called(assign) if is_called else assign()
        return tf.reduce_sum(x * w * read, 1)

    with pytest.raises(gradients.Unproven, match="assigns a value of shape"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def _tiled(x, *sizes):
    """The first number of each example, as an image `[batch, *sizes]`."""
    first = tf.stop_gradient(x)[:, 0]
    column = tf.reshape(first, [BATCH] + [1] * len(sizes))
    return tf.tile(column, [1, *sizes])


def test_labels_of_several_bytes():
    """The kernel takes each byte for a label: the batch is on another axis."""
    w = _weight()

    def loss_fn(x):
        images = _tiled(x, 3, 2, BATCH)
        moved = tf.raw_ops.Einsum(inputs=[images], equation="éĀ->Āé")
        return tf.reduce_sum(x * w, 1) * tf.reduce_sum(moved, [0, 2, 3])

    _assert_refused_or_separate(loss_fn, w)


def _call_of(function):
    return lambda x: tf.raw_ops.PartitionedCall(
        args=[x], Tout=[tf.float32], f=function
    )[0]


def _loop_of(function):
    condition = _concrete(
        lambda k, x: k < 1,
        tf.TensorSpec([], tf.int32),
        tf.TensorSpec([1, 1, 3]),
    )
    return lambda x: tf.raw_ops.StatelessWhile(
        input=[tf.constant(0), x],
        cond=condition,
        body=_concrete(
            lambda k, x: (k + 1, tf.transpose(x, [1, 0, 2])),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([1, 1, 3]),
        ),
    )[1]


def _branch_of(function):
    return lambda x: tf.raw_ops.StatelessIf(
        cond=tf.size(x) > 0,
        input=[x],
        Tout=[tf.float32],
        then_branch=function,
        else_branch=function,
    )[0]


@pytest.mark.parametrize("run", [_call_of, _loop_of, _branch_of])
def test_a_function_traced_with_another_shape(run):
    """By the shape of its trace, a transposition changes nothing."""
    w = _weight()
    function = tf.function(
        lambda x: tf.transpose(x, [1, 0, 2]),
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function(tf.TensorSpec([1, 1, 3]))
    runs = run(function)

    def loss_fn(x):
        repeated = tf.tile(tf.stop_gradient(x)[:, None], [1, BATCH, 1])
        moved = tf.ensure_shape(runs(repeated), [BATCH, BATCH, 3])
        return tf.reduce_sum(x * w, 1) * tf.reduce_sum(moved, [0, 2])

    _assert_refused_or_separate(loss_fn, w)


@pytest.mark.parametrize(
    "pooled, given, window",
    [([1, 1, 4], [1, 1, 3], 1), ([2, 2, 4], [1, 1, 2], 2)],
)
def test_a_gradient_of_another_shape_than_what_was_pooled(
    pooled, given, window
):
    """Its numbers are paired with places by their order."""
    w = _weight()

    def loss_fn(x):
        spread = tf.raw_ops.AvgPoolGrad(
            orig_input_shape=[BATCH, *pooled],
            grad=_tiled(x, *given),
            ksize=[1, window, window, 1],
            strides=[1, window, window, 1],
            padding="VALID",
        )
        return tf.reduce_sum(x * w, 1) * tf.reduce_sum(spread, [1, 2, 3])

    with pytest.raises(gradients.Unproven, match="another shape"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


@pytest.mark.parametrize("output", [3, 4])
@pytest.mark.parametrize("is_public", [False, True])
def test_an_output_that_a_kernel_does_not_write(output, is_public):
    """By given moments, none are reserved for a gradient."""
    w, ones = _weight(), tf.ones([16])

    def loss_fn(x):
        outputs = tf.raw_ops.FusedBatchNormV3(
            x=tf.ones([BATCH, 2, 2, 16]) if is_public else _tiled(x, 2, 2, 16),
            scale=ones,
            offset=ones,
            mean=ones,
            variance=ones,
            is_training=False,
        )
        return tf.reduce_sum(x * w, 1) * tf.reduce_sum(outputs[output])

    with pytest.raises(gradients.Unproven, match="write it|do not determine"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_a_depthwise_gradient_of_no_images():
    """Its kernel has nothing to do, and writes nothing."""
    w = _weight()

    def loss_fn(x):
        gradient = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=tf.zeros([0, 8, 8, 4]),
            filter_sizes=[2, 2, 4, 1],
            out_backprop=tf.zeros([0, 7, 7, 4]),
            strides=[1] * 4,
            padding="VALID",
        )
        return tf.reduce_sum(x * w, 1) * tf.reduce_sum(gradient)

    with pytest.raises(gradients.Unproven, match="do not determine"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_draw_that_is_compiled(is_nested):
    """The same program draws the same numbers in every process."""
    w = _weight()
    draw = tf.function(
        lambda: tf.random.uniform([BATCH]), jit_compile=True, autograph=False
    )
    if is_nested:
        inner = tf.function(lambda: tf.random.uniform([BATCH]), autograph=False)
        draw = tf.function(lambda: inner(), jit_compile=True, autograph=False)

    def loss_fn(x):
        return tf.reduce_sum(x * w, 1) * draw()

    with pytest.raises(gradients.Unproven, match="XLA compiles"):
        _rows(loss_fn, np.ones((BATCH, 3), "float32"), w, "graph")


def test_an_id_below_zero_is_no_row_of_another_example():
    table = tf.Variable(np.ones((5, 2), "float32"))

    def rows(ids):
        site = sites.Lookup(
            tf.convert_to_tensor(table), ids, tf.ones([BATCH, 1, 2])
        )
        return site.rows().numpy()

    ids = np.array([[1], [2], [3], [4]])
    moved = np.array([[1], [-1], [3], [7]])
    np.testing.assert_array_equal(rows(ids)[[0, 2]], rows(moved)[[0, 2]])
    assert not rows(moved)[[1, 3]].any()
