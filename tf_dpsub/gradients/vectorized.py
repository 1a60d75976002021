"""Per-example gradients by running one example at a time."""

from collections.abc import Callable

import tensorflow as tf
from absl import logging
from keras.src import backend

from tf_dpsub.gradients import precision
from tf_dpsub.gradients.graph import converters, draws, effects, sources
from tf_dpsub.gradients.graph.constants import ConstantFolder
from tf_dpsub.gradients.graph.states import Key, Unproven
from tf_dpsub.gradients.per_example import (
    ROUNDING_MARGIN,
    PerExampleGradients,
    tf_variable,
)
from tf_dpsub.gradients.rows import (
    add_in_order,
    any_nonzero,
    inner_products,
    mask_rows,
    sum_squares,
)
from tf_dpsub.gradients.tracing import trace


class StoredGradients(PerExampleGradients):
    """Per-example gradients given as rows.

    Args:
        variables: list of variables.
        rows: list aligned with them of tensors `[batch, *variable.shape]`.
    """

    def __init__(self, variables: list, rows):
        super().__init__(variables, rows[0].shape[0])
        rows = [precision.rounded(tf.cast(row, tf.float32)) for row in rows]
        sq_norms = [sum_squares(row) for row in rows]
        self.valid = tf.math.is_finite(_bound(add_in_order(sq_norms)))
        keys = [tf_variable(v).ref() for v in self.variables]
        self._rows = dict(zip(keys, mask_rows(self.valid, rows)))
        self._sq_norms = {
            key: tf.where(self.valid, norm, 0.0)
            for key, norm in zip(keys, sq_norms)
        }

    def sq_norms(self, variables=None):
        variables = self.variables if variables is None else variables
        return add_in_order(
            [self._sq_norms[tf_variable(v).ref()] for v in variables]
        )

    def sq_norm_bounds(self, variables=None):
        return _bound(self.sq_norms(variables))

    def nonzero(self):
        return any_nonzero(list(self._rows.values()))

    def rows(self, variable):
        return self._rows[tf_variable(variable).ref()]

    def gram(self, variables=None):
        variables = self.variables if variables is None else variables
        return tf.add_n([inner_products(self.rows(v)) for v in variables])

    def weighted_sum(self, c, variables=None):
        variables = self.variables if variables is None else variables
        return [
            precision.tensordot(
                c, tf.cast(self.rows(v), c.dtype), 1, short=(False, True)
            )
            for v in variables
        ]


def _bound(sq_norms):
    return precision.bound((1 + ROUNDING_MARGIN) * sq_norms)


def one_by_one(
    loss_fn: Callable,
    inputs,
    variables: list,
    map_function=tf.vectorized_map,
    loss_scale: float = 1.0,
    may_read: sources.Sources | None = None,
    is_vectorizable: bool | None = None,
):
    """Rows from the loss of one example at a time.

    The model only ever sees one example, and what outlives it is public. So a
    row cannot depend on another, except through what Python functions of the
    model keep, which is taken to be public. With `tf.vectorized_map`, dropout
    masks are common to all examples.

    Args:
        loss_fn: callable that takes a structure of tensors with a batch axis
            and returns losses `[batch]` and a structure of tensors, or None.
        inputs: structure of tensors whose axis 0 is the batch.
        variables: list of variables.
        map_function: `tf.vectorized_map` or `tf.map_fn`, which also replaces
            the former where TensorFlow cannot run it. Defaults to
            `tf.vectorized_map`.
        loss_scale: float, the factor that `loss_fn` multiplied the losses by.
            Defaults to `1.0`.
        may_read: `Sources`. Defaults to `None`, all variables are public.
        is_vectorizable: bool, what `vectorizes` returned for inputs of the
            same shapes. Defaults to `None`: it is called.

    Returns:
        A `StoredGradients`, and the structure of the whole batch.

    Raises:
        UpdatesState: if a variable is assigned a value computed from the batch.
        ReadsState: if a variable is read that is none of `may_read`.
        Unproven: if something else is stored that a later row may read, if an
            operation returns what its inputs do not determine, or if rows may
            be mixed, against `is_vectorizable`.
    """
    tf_variables = [tf_variable(v) for v in variables]
    if map_function is tf.vectorized_map:
        if is_vectorizable is None:
            is_vectorizable = vectorizes(loss_fn, inputs, variables)
        if not is_vectorizable:
            map_function = tf.map_fn
    in_range: list = []
    row_of = _row_function(loss_fn, tf_variables, loss_scale, in_range)
    writes, outputs = require_no_effect(row_of, inputs, may_read)
    # Another trace of the model may be of other operations.
    row_of = without_effect(row_of, may_read)
    # A user cannot change what TensorFlow warns of: operations run in loops.
    arguments: dict = {}
    if map_function is tf.vectorized_map:
        arguments["warn"] = False
        row_of = converters.keeping_rows_apart(row_of, in_range)
    if map_function is tf.map_fn:
        if writes:
            # One example after another: states are set, then read.
            arguments["parallel_iterations"] = 1
        arguments["fn_output_signature"] = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype), outputs
        )
    try:
        rows, aux, masks = map_function(row_of, inputs, **arguments)
    except converters.MixesRows as error:
        raise Unproven(
            f"{error}, which the model had not when it was checked. Change no "
            "layer while a model trains: compile it again"
        ) from error
    aux, masks = (
        tf.nest.map_structure(lambda t: t[:, 0], part) for part in (aux, masks)
    )
    for tensor, mask in zip(tf.nest.flatten(aux), masks):
        if tf.is_tensor(mask):
            backend.set_keras_mask(tensor, mask)
    return StoredGradients(variables, rows), None if _is_empty(aux) else aux


def _is_empty(aux):
    return isinstance(aux, dict) and not aux


def vectorizes(loss_fn, inputs, variables) -> bool:
    """Returns whether `tf.vectorized_map` can compute rows, each alone.

    Not with operations of which it may mix rows: `graph.converters`. In
    TensorFlow 2.20 and 2.21 the oneDNN kernel of BatchMatMul for CPU writes
    out of bounds where it repeats some operands.

    Args: as `one_by_one`.
        inputs: the same, or `tf.TensorSpec`s of it.

    Returns:
        bool.
    """
    if any(t.dtype == tf.string for t in tf.nest.flatten(inputs)):
        # Its converters would stack strings that split into unequal parts.
        return False
    tf_variables = [tf_variable(v) for v in variables]
    in_range: list = []
    row_of = _row_function(loss_fn, tf_variables, 1.0, in_range)
    row_of = converters.keeping_rows_apart(row_of, in_range)
    log = tf.get_logger()
    level = log.level
    # Before it raises, it logs pages about what it could not convert.
    log.setLevel("CRITICAL")
    try:
        traced = trace(
            lambda batch: tf.vectorized_map(
                _of_fixed_shapes(row_of), batch, warn=False
            ),
            inputs,
        )
    except Exception as e:  # whatever a converter of TensorFlow may raise
        logging.info("tf.vectorized_map cannot run the model: %s", e)
        return False
    finally:
        log.setLevel(level)
    if any(
        op.type.startswith("BatchMatMul")
        and op.inputs[0].shape[:-2] != op.inputs[1].shape[:-2]
        for op in traced.graph.get_operations()
    ):
        return False
    # Keras compiles what may have no kernel, such as grouped convolutions on a
    # CPU; the map takes it apart.
    return not _calls_xla(loss_fn, inputs) or _runs(traced, inputs)


def _calls_xla(loss_fn, inputs):
    """Whether a part of the model is always compiled."""
    graph = trace(lambda batch: loss_fn(batch)[0], inputs).graph
    definition = graph.as_graph_def()
    parts = [
        definition.node,
        *(f.node_def for f in definition.library.function),
    ]
    return any(
        "_XlaMustCompile" in node.attr for part in parts for node in part
    )


def _runs(traced, inputs):
    """Whether what was traced runs, on zeros."""
    try:
        traced(
            tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), inputs)
        )
    except tf.errors.OpError as e:
        logging.info("tf.vectorized_map cannot run the model: %s", e.message)
        return False
    return True


def _row_function(loss_fn, tf_variables, loss_scale, in_range=None):
    """Builds the function of one example that returns its row and outputs.

    Operations that add up segments in range are appended to `in_range`.
    """
    in_range = [] if in_range is None else in_range

    def row_of(example):
        batch_of_one = tf.nest.map_structure(lambda t: t[None], example)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(tf_variables)
            losses, aux = loss_fn(batch_of_one)
        gradients = tape.gradient(
            losses,
            tf_variables,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        rows = [
            tf.cast(_dense(g, v.shape, in_range), tf.float32) / loss_scale
            for g, v in zip(gradients, tf_variables)
        ]
        aux = {} if aux is None else aux
        masks = [backend.get_keras_mask(t) for t in tf.nest.flatten(aux)]
        outputs = (rows, aux, [() if m is None else m for m in masks])
        return tf.nest.map_structure(tf.convert_to_tensor, outputs)

    return row_of


def _dense(gradient, shape, in_range):
    """A gradient as a tensor; ids of rows out of range count for nothing."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # Those of all rows together may exceed an int32.
    ids = tf.cast(gradient.indices, tf.int64)
    ids = tf.where(ids < tf.cast(shape[0], ids.dtype), ids, -1)
    dense = tf.math.unsorted_segment_sum(gradient.values, ids, shape[0])
    in_range.append(dense.op)
    return dense


def require_no_effect(row_of: Callable, inputs, may_read):
    """Checks that only public values outlive the row of an example.

    Args:
        row_of: callable that takes a structure of tensors, one example.
        inputs: the same with a batch axis, or `tf.TensorSpec`s of it.
        may_read: `Sources`; None if all variables are public.

    Returns:
        A pair: whether a state is written, with public values, and what
        `row_of` returned when it was traced.

    Raises:
        UpdatesState: if a variable is assigned a value computed from it, or
            from random numbers.
        ReadsState: if it is not known that what is read is public.
        Unproven: if something else is stored that a later row may read.
    """
    example = tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape[1:], t.dtype), inputs
    )
    writes: list = []
    checked = without_effect(row_of, may_read, writes)
    outputs = trace(checked, example).structured_outputs
    return writes[-1], outputs


def without_effect(row_of: Callable, may_read, writes=None) -> Callable:
    """Wraps the function of a row, so that each trace of it is checked.

    Args:
        row_of, may_read: as for `require_no_effect`.
        writes: list, to which each trace appends whether a state is written.
            Defaults to `None`.

    Returns:
        The function. Where it is traced, it raises as `require_no_effect`.
    """
    may_read = sources.AnySource() if may_read is None else may_read

    def checked(example):
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        depends = {t.ref() for t in tf.nest.flatten(example)}
        outputs = row_of(example)
        operations = graph.get_operations()[before:]
        may_read.require_readable(graph, set(operations))
        _require_arrays(graph, set(operations))
        keys = {
            inner.ref()
            for _, inner in graph.captures
            if inner.dtype == tf.resource
            and isinstance(may_read.state(inner), Key)
        }
        for op in operations:
            has_key = any(i.ref() in keys for i in op.inputs)
            is_secret = draws.is_draw(op) and (
                has_key or not op.type.startswith("Stateless")
            )
            if is_secret or any(i.ref() in depends for i in op.inputs):
                depends.update(t.ref() for t in op.outputs)
            elif has_key:
                keys.update(t.ref() for t in op.outputs)
        effects.require_none(
            operations,
            lambda t: t.ref() not in depends,
            lambda t: t.ref() in keys,
            allow_python=True,
        )
        constants = ConstantFolder()
        for op in operations:
            if op.outputs and not constants.stitches_all(op):
                _require_known(op)
        if writes is not None:
            writes.append(bool(effects.written_by(operations)))
        return outputs

    return checked


def _require_arrays(graph, operations):
    """Checks that no list or dataset is read that was made before."""
    for _, inner in graph.captures:
        if inner.dtype == tf.variant and operations & set(inner.consumers()):
            raise Unproven(
                f"'{inner.op.name}' is a list or a dataset captured from "
                "outside"
            )


def _require_known(op):
    """Checks that outputs are random numbers or follow from the inputs."""
    try:
        effects.require_known(op, draws_are=True, python_is=True)
    except Unproven as e:
        raise Unproven(f"{op.type} '{op.name}' {e}") from e


def _of_fixed_shapes(row_of):
    """Wraps `row_of`: it raises if shapes depend on values of the example.

    Rows of different shapes cannot be stacked: the map would fail when it runs.
    """

    def checked(example):
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        outputs = row_of(example)
        depends = {t.ref() for t in tf.nest.flatten(example)}
        for op in graph.get_operations()[before:]:
            read = [i for i in op.inputs if i.ref() in depends]
            if not read:
                continue
            depends.update(t.ref() for t in op.outputs)
            # A number of entries is computed from integers or booleans, or by
            # operations that find the nonzero or the distinct entries.
            chooses = any(not i.dtype.is_floating for i in read) or (
                op.type.startswith(("Where", "Unique"))
            )
            # Only the first such operation counts: what follows it has lost
            # its static shape anyway.
            if (
                chooses
                and all(i.shape.is_fully_defined() for i in op.inputs)
                and not all(t.shape.is_fully_defined() for t in op.outputs)
            ):
                raise ValueError(
                    f"the shape of what {op.type} '{op.name}' returns depends "
                    "on the values of an example"
                )
        return outputs

    return checked
