"""Choice of the implementation for a model, made once, before any step."""

import contextlib
import dataclasses
import hashlib

import tensorflow as tf
from absl import logging
from tensorflow.python.ops import handle_data_util

from tf_dpsub import gradients
from tf_dpsub.gradients import precision, vectorized, zero_terms
from tf_dpsub.gradients.graph import effects, functions, provenance, sources
from tf_dpsub.gradients.per_example import tf_variable
from tf_dpsub.gradients.tracing import shared_integers, trace

# Relative error of the self-check, by the precision of the model's products.
_PRECISE = ("float32", "float64")
_TOLERANCE, _LOW_PRECISION_TOLERANCE = 1e-3, 5e-2
# Of a gradient this small nothing is compared: squares of it underflow.
_TINY = 1e-10
# Fingerprints of graphs whose walk agreed with the ordinary gradient in this
# process, and how they use their seeds.
_CHECKED: dict[bytes | None, dict] = {}


def select_implementation(
    loss_fn,
    inputs,
    variables: list,
    *,
    requested: str = "auto",
    states: tuple | list = (),
    may_read: gradients.Sources | None = None,
    compute_dtype: str = "float32",
    name: str = "model",
    forward: "Forward | None" = None,
):
    """Chooses how per-example gradients of a model are computed.

    The graph walk is traced, and checked against an ordinary gradient on
    synthetic inputs. Where its proof fails, one example at a time is taken
    instead, and one log line says so and names the operation. A graph that
    passed before in this process, of a model that is built again, is not
    checked again.

    Formal guarantees: nothing private is read. What is chosen is private
    whatever the check says: the walk rests on its proof, which is repeated
    whenever a step is traced, and the other implementations on seeing one
    example at a time.

    Args:
        loss_fn: as for `per_example_gradients`, without a loss scale.
        inputs: structure of `tf.TensorSpec` of static shapes, batch in front.
        variables: list of trainable variables.
        requested: string, `"auto"`, `"graph"` or `"vectorized_map"`. Defaults
            to `"auto"`.
        states: list of variables that a forward pass may change; their values
            are restored. Defaults to `()`.
        may_read: `gradients.Sources`. Defaults to `None`, all variables are
            public.
        compute_dtype: string, the precision of the model. Defaults to
            `"float32"`.
        name: string, names the model in the log. Defaults to `"model"`.
        forward: `Forward` of `loss_fn`. Defaults to `None`: it is checked,
            whatever passed before.

    Returns:
        `"graph"`, `"vectorized_map"` or `"map_fn"`.

    Raises:
        MixesExamples: if it mixes examples, unless one example at a time was
            requested.
        Unproven: if `requested="graph"` and the proof or the check fails.
    """
    reason = "as requested"
    if requested != "vectorized_map":
        fingerprint = None
        if forward is not None and may_read is not None:
            fingerprint = forward.fingerprint(variables, may_read)
        if may_read is not None and fingerprint in _CHECKED:
            may_read.settle(_CHECKED[fingerprint])
            logging.info(
                "Per-example gradients of %s: graph walk, as of the same graph "
                "before.",
                name,
            )
            return "graph"
        try:
            is_precise = compute_dtype in _PRECISE and not precision.narrowed()
            error = _self_check(
                loss_fn, inputs, variables, states, may_read, is_precise
            )
            tolerance = _TOLERANCE if is_precise else _LOW_PRECISION_TOLERANCE
            if error <= tolerance:
                logging.info(
                    "Per-example gradients of %s: graph walk, proved; differs "
                    "from the ordinary gradient by %.1e.",
                    name,
                    error,
                )
                if may_read is not None and fingerprint is not None:
                    _CHECKED[fingerprint] = may_read.uses or {}
                return "graph"
            raise gradients.Unproven(
                f"the self-check differs from the ordinary gradient by {error}"
            )
        except gradients.MixesExamples as e:
            raise gradients.MixesExamples(
                f"{name} mixes the examples of a batch: {e}. A per-example "
                "gradient has no meaning then. Remove the operation (use "
                "GroupNormalization for BatchNormalization, a loss of one "
                "example), or, if each example alone has a meaning, pass "
                'per_example="vectorized_map" to the optimizer.'
            ) from e
        except gradients.Unproven as e:
            if requested == "graph":
                raise
            reason = str(e)
    vectorizes = vectorized.vectorizes(loss_fn, inputs, variables)
    chosen = "vectorized_map" if vectorizes else "map_fn"
    logging.warning(
        "Per-example gradients of %s: %s, one example at a time, which is "
        "slower (%s).",
        name,
        chosen,
        reason,
    )
    return chosen


@dataclasses.dataclass(frozen=True)
class Forward:
    """Effects of a forward pass, found before it is differentiated.

    Attributes:
        changed: list of the states that it changes, such as seeds of dropout.
        is_random: bool, whether it draws at all, keys included.
        draws: bool, whether it draws what no state determines.
        calls_python: bool, whether it runs Python functions.
        losses: tensor `[batch]`, in the graph of the pass.
        inputs: list of the tensors of that graph which make the batch.
    """

    changed: list
    is_random: bool
    draws: bool
    calls_python: bool
    losses: tf.Tensor
    inputs: list

    def fingerprint(self, variables: list, may_read) -> bytes | None:
        """Computes a digest of all that the walk of this graph depends on.

        Names that TensorFlow gives once in a process, to functions, custom
        gradients and loops, are part of it: graphs with these never agree.

        Args:
            variables: list of variables that are differentiated by.
            may_read: `gradients.Sources`.

        Returns:
            32 bytes; None where the graph does not tell all.
        """
        if self.draws or self.calls_python:
            return None
        graph = self.losses.graph
        positions = {
            identity: k
            for k, variable in enumerate(variables)
            for identity in sources.handles(variable)
        }
        captured = {
            inner.op.name: (
                positions.get(id(functions.origin(outer))),
                repr(may_read.state(inner)),
                *_content(inner),
            )
            for outer, inner in graph.captures
        }
        definition = graph.as_graph_def(add_shapes=True)
        # Names of layers count up in a process: places stand for them.
        places = {node.name: k for k, node in enumerate(definition.node)}
        digest = hashlib.sha256(
            definition.library.SerializeToString(deterministic=True)
        )
        for node in definition.node:
            described = (
                node.op,
                captured.get(node.name),
                [_numbered(places, name) for name in node.input],
                [
                    (key, node.attr[key].SerializeToString(deterministic=True))
                    for key in sorted(node.attr)
                    if key != "_class"
                ],
            )
            digest.update(repr(described).encode())
        ends = [self.losses, *self.inputs]
        digest.update(repr([places[t.op.name] for t in ends]).encode())
        return digest.digest()


def forward_pass(loss_fn, inputs, states: list) -> Forward:
    """Finds the states that a forward pass changes, by public values alone.

    Args:
        loss_fn: as for `per_example_gradients`.
        inputs: structure of `tf.TensorSpec` of static shapes, batch in front.
        states: list of variables that are not trained.

    Returns:
        A `Forward`.

    Raises:
        UpdatesState: if a variable is assigned a value that depends on the
            batch, or a state that is none of `states` is changed.
    """
    passes: list = []

    def forward(batch):
        losses, _ = loss_fn(batch)
        graph, flat = losses.graph, tf.nest.flatten(batch)
        proof = provenance.Provenance(graph, flat, losses.shape[0])
        try:
            proof.require_no_effect(graph)
        except gradients.Unproven as e:
            # Effects other than on variables are left to the implementations.
            logging.debug("%s", e)
        written = {
            id(functions.origin(ref.deref())): ref.deref()
            for ref in effects.written_resources(graph)
        }
        # The graph may be that of several replicas, with a copy for each.
        states_by_handle = {h: v for v in states for h in sources.handles(v)}
        for identity, inner in written.items():
            if identity not in states_by_handle:
                raise gradients.UpdatesState(
                    f"'{_name(inner)}' is updated in every forward pass "
                    "and is no weight of the model: the number of updates "
                    "would tell how many examples were drawn. Make it a weight "
                    "that is not trained (`add_weight(..., "
                    "trainable=False)`), or draw from a "
                    "`keras.random.SeedGenerator`."
                )
        changed = {
            id(v): v for h, v in states_by_handle.items() if h in written
        }
        passes.append(
            Forward(
                list(changed.values()),
                effects.draws(graph, stateless=True),
                effects.draws(graph),
                effects.calls_python(graph),
                losses,
                flat,
            )
        )
        return losses

    trace(forward, inputs)
    return passes[-1]


def _numbered(places, name):
    """The name of a node's input, with the place of a node for its name."""
    node, *output = name.removeprefix("^").split(":")
    return places[node], name.startswith("^"), output


def _content(handle):
    """Shape and dtype of what a handle, or another tensor, holds."""
    data = handle_data_util.get_resource_handle_data(handle)
    if not data.is_set:
        return (handle.shape, handle.dtype)
    return tuple((str(c.shape), c.dtype) for c in data.shape_and_type)


def _name(handle):
    """Name of a captured resource: that of the operations that read it."""
    return ", ".join(sorted({op.name for op in handle.consumers()}))


def _self_check(loss_fn, inputs, variables, states, may_read, is_precise):
    """Relative error of the walk, on synthetic inputs.

    It is that of a weighted sum of rows, or of the norm of the longest of them,
    whichever is larger. In low precision, single rows take the place of the
    sum: some processors round an ordinary gradient after each addition. The
    rows and the ordinary gradient share a forward pass, and are computed one
    after the other, so that there is not more in memory than a step needs.
    """
    tf_variables = [tf_variable(v) for v in variables]

    def both(batch_and_weights):
        batch, weights = batch_and_weights
        traced_losses = []

        def observed(batch):
            losses, aux = loss_fn(batch)
            traced_losses.append(losses)
            return losses, aux

        rows, _ = gradients.per_example_gradients(
            observed, batch, variables, may_read=may_read
        )
        (losses,) = traced_losses
        c = tf.where(rows.valid, weights, 0.0)
        sums = rows.weighted_sum(c)
        with tf.control_dependencies(sums):
            # The backward pass begins with it, and so waits for them.
            c = tf.identity(c)
        losses = tf.where(rows.valid, losses, 0.0)
        with shared_integers():
            ordinary = zero_terms.gradients(
                tf.reduce_sum(c * losses), tf_variables, rows.left_out
            )
        ordinary = [
            tf.zeros(v.shape)
            if g is None
            else tf.cast(tf.convert_to_tensor(g), tf.float32)
            for v, g in zip(tf_variables, ordinary)
        ]
        return sums, ordinary, tf.sqrt(rows.sq_norms())

    # One generator for all inputs: where two were equal, their difference
    # would have no gradient.
    generator = tf.random.Generator.from_seed(0)
    batch = tf.nest.map_structure(lambda s: _synthetic(s, generator), inputs)
    batch_size = tf.nest.flatten(batch)[0].shape[0]
    uniform = tf.random.stateless_uniform([batch_size], [0, 1])
    traced = _restoring(both, (batch, uniform), states)

    def compute(weights):
        sums, ordinary, norms = traced((batch, weights))
        difference = [
            tf.cast(total, tf.float32) - g for total, g in zip(sums, ordinary)
        ]
        norm_of = tf.linalg.global_norm
        return norm_of(difference), norm_of(ordinary), norms

    examples = [0, batch_size // 2, batch_size - 1]
    alone = [tf.one_hot(k, batch_size) for k in dict.fromkeys(examples)]
    errors = []
    for weights in [uniform] if is_precise else alone:
        difference, expected, norms = compute(weights)
        errors.append(difference / (expected + _TINY))
    longest = tf.one_hot(tf.argmax(norms), batch_size)
    difference, expected, norms = compute(longest)
    norm = tf.reduce_sum(longest * norms)
    difference += tf.abs(norm - expected)
    errors.append(difference / (expected + _TINY))
    # Where random labels have no finite loss, there is nothing to compare.
    return max(0.0, *(float(e) for e in errors if e == e))


def _restoring(function, inputs, states):
    """A function, traced for inputs, that restores the states it changes."""
    traced = trace(function, inputs)
    # Gradients that are left to the runtime need its optimizer.
    needs_optimizer = "SymbolicGradient" in effects.kinds(traced.graph)
    context = contextlib.nullcontext if needs_optimizer else _unoptimized

    def run(inputs):
        before = [tf.identity(tf_variable(v)) for v in states]
        with context():
            outputs = traced(inputs)
        for variable, value in zip(states, before):
            tf_variable(variable).assign(value)
        return outputs

    return run


@contextlib.contextmanager
def _unoptimized():
    """A context in which TensorFlow runs a new graph as it is.

    To optimize a graph takes longer than to run it once.
    """
    options = tf.config.optimizer.get_experimental_options()
    off = {**options, "disable_meta_optimizer": True}
    tf.config.optimizer.set_experimental_options(off)
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(options)


def _synthetic(spec, generator):
    if spec.dtype.is_floating:
        return tf.cast(generator.uniform(spec.shape), spec.dtype)
    if spec.dtype.is_integer:
        return tf.cast(generator.uniform(spec.shape) > 0.5, spec.dtype)
    if spec.dtype == tf.bool:
        return tf.ones(spec.shape, tf.bool)
    return tf.fill(spec.shape, "")
