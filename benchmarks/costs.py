"""Costs of a step on any machine, read off its graph without running it.

    python -m benchmarks.costs cnn resnet20

prints floating-point operations and bytes of Keras's gradients, and how many
times as many DP-SGD's clipped sums take.
"""

import collections
import dataclasses
import math

import keras
import tensorflow as tf
from absl import app

import tf_dpsub
from benchmarks import steps
from benchmarks.peers import workloads
from tf_dpsub.data import given_batches
from tf_dpsub.gradients.graph import functions

# Operations that pass on tensors, and compute nothing.
_FREE = frozenset({
    "Const", "ExpandDims", "Identity", "IdentityN", "NoOp", "Placeholder",
    "PreventGradient", "ReadVariableOp", "Reshape", "Shape", "Squeeze",
    "StopGradient",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Costs:
    """Sums over all operations of a graph.

    Attributes:
        flop: int, of products of matrices and of convolutions; a product and
            its addition are two.
        bytes: int, of all tensors that are computed.
        operations: `collections.Counter` of their types.
    """

    flop: int
    bytes: int
    operations: collections.Counter


def of(function, *inputs):
    """Costs of a function of tensors of static shapes.

    Args:
        function: callable of tensors.
        *inputs: structures of tensors.

    Returns:
        `Costs`.

    Raises:
        ValueError: if the size of a tensor that is computed is not known.
    """
    traced = tf.function(function, autograph=False).get_concrete_function(
        *inputs
    )
    flop, size, operations = 0, 0, collections.Counter()
    for op in _operations(traced.graph, traced.outputs):
        if op.type in _FREE:
            continue
        operations[op.type] += 1
        size += sum(map(_bytes, op.outputs))
        flop += _flop(op)
    return Costs(flop, size, operations)


def _operations(graph, outputs):
    """Operations that run, as outputs or changes of states need them."""
    pending = [t.op for t in outputs]
    pending += [op for op in graph.get_operations() if op.op_def.is_stateful]
    seen = set()
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        pending += [t.op for t in op.inputs]
        pending += op.control_inputs
        if op.type in functions.CALLS:
            body = functions.body(op)
            yield from _operations(body.graph, body.outputs)
        else:
            yield op


def _bytes(tensor):
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    if not tensor.shape.is_fully_defined():
        if tensor.dtype.is_integer:
            # Numbers of axes.
            return 0
        raise ValueError(
            f"Expected tensors of static shapes, got {tensor.name} of shape "
            f"{tensor.shape}."
        )
    return math.prod(tensor.shape) * tensor.dtype.size


def _flop(op):
    if op.type == "MatMul":
        rows, shared = op.inputs[0].shape
        if op.get_attr("transpose_a"):
            shared = rows
        return 2 * math.prod(op.outputs[0].shape) * shared
    if op.type.startswith("BatchMatMul"):
        shared = op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
        return 2 * math.prod(op.outputs[0].shape) * shared
    if op.type == "Einsum":
        return _einsum_flop(op)
    if op.type == "Conv2D":
        return _convolution_flop(op.outputs[0], op.inputs[1].shape)
    if op.type == "Conv2DBackpropInput":
        return _convolution_flop(op.inputs[2], op.inputs[1].shape)
    if op.type == "Conv2DBackpropFilter":
        return _convolution_flop(op.inputs[2], op.outputs[0].shape)
    return 0


def _convolution_flop(outputs, kernel):
    """2 · batch · height · width · outputs · (kernel's size / outputs)."""
    return 2 * math.prod(outputs.shape) * math.prod(kernel[:-1])


def _einsum_flop(op):
    operands = op.get_attr("equation").decode().split("->", maxsplit=1)[0]
    sizes = {}
    for letters, tensor in zip(operands.split(","), op.inputs):
        sizes |= dict(zip(letters, tensor.shape, strict=True))
    return 2 * math.prod(sizes.values()) if len(op.inputs) > 1 else 0


def of_plain(name, rows=None):
    """Costs of Keras's own gradients of a workload.

    Args:
        name: string, of the workload.
        rows: int, of its batch. Defaults to `None`, all.

    Returns:
        `Costs`.
    """
    model, x, y = _built(name, rows)
    loss = steps.loss_of(model)
    weights = [v.value for v in model.trainable_variables]

    def gradients(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        return tape.gradient(value, weights)

    return of(gradients, *tf.nest.map_structure(tf.constant, (x, y)))


def of_private(name, optimizer, carrier_rank=None, rows=None):
    """Costs of clipped sums of a workload, without noise.

    Args:
        name: string, of the workload.
        optimizer: function of the size of the batch that returns a
            `tf_dpsub.optimizers.PrivateOptimizer`.
        carrier_rank: int, for RGP. Defaults to `None`.
        rows: int, of its batch. Defaults to `None`, all.

    Returns:
        `Costs`.
    """
    plain, x, y = _built(name, rows)
    if carrier_rank is not None:
        tf_dpsub.layers.reparametrize(plain, carrier_rank)
    model = tf_dpsub.make_private(plain)
    model.compile(
        optimizer(len(y)),
        steps.loss_of(model),
    )
    batch = given_batches.padded(given_batches.named(x, y), len(y))
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    return of(model.training_step, batch)


def _built(name, rows):
    model, *data = steps.built(name)
    return model, *tf.nest.map_structure(lambda a: a[:rows], data)


def dpsgd(batch_size, make=tf_dpsub.optimizers.DPSGD):
    """An optimizer for `of_private`, which takes a batch in one pass."""
    return make(
        keras.optimizers.SGD(0.01),
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        batch_size=batch_size,
        microbatch_size=batch_size,
    )


def main(argv):
    unknown = [name for name in argv[1:] if name not in workloads.WORKLOADS]
    if unknown or not argv[1:]:
        return (
            f"error: Expected workloads among {', '.join(workloads.WORKLOADS)},"
            f" got {', '.join(unknown) or 'none'}."
        )
    print("| model | GFLOP | MB | DP-SGD: × GFLOP | × MB |")
    print("|---|---|---|---|---|")
    for name in argv[1:]:
        plain, private = of_plain(name), of_private(name, dpsgd)
        print(
            f"| {workloads.WORKLOADS[name].title} | {plain.flop / 1e9:.1f} | "
            f"{plain.bytes / 1e6:.0f} | {private.flop / plain.flop:.2f} | "
            f"{private.bytes / plain.bytes:.2f} |",
            flush=True,
        )
        keras.backend.clear_session()
    return 0


if __name__ == "__main__":
    app.run(main)
