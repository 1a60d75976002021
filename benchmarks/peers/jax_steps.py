"""Times training steps by JAX and JAX Privacy.

    python -m benchmarks.peers.jax_steps --workload=cnn --method=vmap

Both methods compile the whole step, the update by Optax included, and donate
the weights:

- `plain`: `jax.grad` of the mean loss.
- `vmap`: `jax_privacy.clipped_grad`, which vectorizes the gradient of one
  example over a microbatch, microbatch by microbatch, and
  `jax_privacy.noise_addition.gaussian_privatizer`.

Epochs of `vmap` take the indices of their batches from JAX Privacy's
`CyclicPoissonSampling`, padded by its `pad_to_multiple_of` to multiples of an
eighth of the batch, so that few sizes are compiled; those of `plain` from a
permutation.

Models are functions of nested dictionaries of weights. What the group
"embeddings" holds is frozen in some workloads.
"""

import functools
import time

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jax_privacy import batch_selection

from benchmarks.peers import timing, workloads

_CLIP_NORM, _NOISE_MULTIPLIER, _LEARNING_RATE = 1.0, 1.0, 0.01
_STAGES = 3


def _normal(rng, shape, stddev):
    return jnp.array(stddev * rng.standard_normal(shape, "float32"))


def _new_kernel(rng, *shape):
    return _normal(rng, shape, np.float32((2 / np.prod(shape[:-1])) ** 0.5))


def _new_dense(rng, inputs, outputs):
    kernel = _new_kernel(rng, inputs, outputs)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def _new_norm(channels):
    return {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}


def _dense(weights, x):
    return x @ weights["kernel"] + weights["bias"]


def _conv(kernel, x, strides=1, padding="SAME"):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (strides, strides),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _max_pool(x):
    """Maxima of windows of 2×2, at every pixel."""
    # The gradient of reduce_window takes several times as long on a CPU.
    x = jnp.maximum(x[:, 1:], x[:, :-1])
    return jnp.maximum(x[:, :, 1:], x[:, :, :-1])


def _layer_norm(weights, x, epsilon):
    mean = jnp.mean(x, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + epsilon)
    return (x - mean) * scale * weights["scale"] + weights["bias"]


def _group_norm(weights, x, groups):
    def mean_of_group(x):
        means = x.mean((1, 2)).reshape(len(x), groups, -1).mean(-1)
        repeats = x.shape[-1] // groups
        return jnp.repeat(means, repeats, axis=-1)[:, None, None]

    mean = mean_of_group(x)
    variance = mean_of_group(x * x) - mean * mean
    scale = weights["scale"] * jax.lax.rsqrt(variance + 1e-3)
    return x * scale + (weights["bias"] - mean * scale)


def _new_cnn(rng, _):
    return {
        "conv1": {
            "kernel": _new_kernel(rng, 8, 8, 1, 16),
            "bias": jnp.zeros(16),
        },
        "conv2": {
            "kernel": _new_kernel(rng, 4, 4, 16, 32),
            "bias": jnp.zeros(32),
        },
        "hidden": _new_dense(rng, 4 * 4 * 32, 32),
        "logits": _new_dense(rng, 32, 10),
    }


def _cnn(weights, x):
    for name, padding in (("conv1", "SAME"), ("conv2", "VALID")):
        x = _conv(weights[name]["kernel"], x, 2, padding)
        x = _max_pool(jax.nn.relu(x + weights[name]["bias"]))
    x = jax.nn.relu(_dense(weights["hidden"], x.reshape(len(x), -1)))
    return _dense(weights["logits"], x)


def _new_mlp(rng, workload):
    return {
        "hidden1": _new_dense(rng, 784, 128),
        "hidden2": _new_dense(rng, 128, 128),
        "logits": _new_dense(rng, 128, workload.outputs),
    }


def _mlp(weights, x):
    x = x.reshape(len(x), -1)
    for name in ("hidden1", "hidden2"):
        x = jax.nn.relu(_dense(weights[name], x))
    return _dense(weights["logits"], x)


def _blocks(count, width):
    """Input channels, filters and strides of each residual block."""
    channels = 16
    for stage in range(_STAGES):
        filters = 16 * width * 2**stage
        for i in range(count):
            yield channels, filters, 2 if stage > 0 and i == 0 else 1
            channels = filters


def _new_resnet20(rng, _):
    blocks = []
    for channels, filters, _ in _blocks(3, 1):
        block = {
            "conv1": _new_kernel(rng, 3, 3, channels, filters),
            "norm1": _new_norm(filters),
            "conv2": _new_kernel(rng, 3, 3, filters, filters),
            "norm2": _new_norm(filters),
        }
        if channels != filters:
            shortcut = _new_kernel(rng, 1, 1, channels, filters)
            block["shortcut_conv"] = shortcut
            block["shortcut_norm"] = _new_norm(filters)
        blocks.append(block)
    return {
        "conv": _new_kernel(rng, 3, 3, 3, 16),
        "norm": _new_norm(16),
        "blocks": blocks,
        "logits": _new_dense(rng, 64, 10),
    }


def _resnet20(weights, x):
    norm = functools.partial(_group_norm, groups=4)
    x = jax.nn.relu(norm(weights["norm"], _conv(weights["conv"], x)))
    for block, (*_, strides) in zip(weights["blocks"], _blocks(3, 1)):
        shortcut = x
        if "shortcut_conv" in block:
            shortcut = _conv(block["shortcut_conv"], x, strides)
            shortcut = norm(block["shortcut_norm"], shortcut)
        x = _conv(block["conv1"], x, strides)
        x = _conv(block["conv2"], jax.nn.relu(norm(block["norm1"], x)))
        x = jax.nn.relu(norm(block["norm2"], x) + shortcut)
    return _dense(weights["logits"], x.mean((1, 2)))


def _new_wrn28_4(rng, _):
    blocks = []
    for channels, filters, _ in _blocks(4, 4):
        block = {
            "norm1": _new_norm(channels),
            "conv1": _new_kernel(rng, 3, 3, channels, filters),
            "norm2": _new_norm(filters),
            "conv2": _new_kernel(rng, 3, 3, filters, filters),
        }
        if channels != filters:
            shortcut = _new_kernel(rng, 1, 1, channels, filters)
            block["shortcut_conv"] = shortcut
        blocks.append(block)
    return {
        "conv": _new_kernel(rng, 3, 3, 3, 16),
        "blocks": blocks,
        "norm": _new_norm(256),
        "logits": _new_dense(rng, 256, 10),
    }


def _wrn28_4(weights, x):
    norm = functools.partial(_group_norm, groups=16)
    x = _conv(weights["conv"], x)
    for block, (*_, strides) in zip(weights["blocks"], _blocks(4, 4)):
        shortcut = x
        x = jax.nn.relu(norm(block["norm1"], x))
        if "shortcut_conv" in block:
            shortcut = _conv(block["shortcut_conv"], x, strides)
        x = _conv(block["conv1"], x, strides)
        x = _conv(block["conv2"], jax.nn.relu(norm(block["norm2"], x)))
        x = x + shortcut
    x = jax.nn.relu(norm(weights["norm"], x))
    return _dense(weights["logits"], x.mean((1, 2)))


def _new_transformer(rng, layers, width):
    return [
        {
            "attention": _new_dense(rng, width, 3 * width),
            "projection": _new_dense(rng, width, width),
            "norm1": _new_norm(width),
            "expansion": _new_dense(rng, width, 4 * width),
            "contraction": _new_dense(rng, 4 * width, width),
            "norm2": _new_norm(width),
        }
        for _ in range(layers)
    ]


def _attention(weights, x, is_causal=False):
    heads = (*x.shape[:2], -1, 64)
    parts = jnp.split(_dense(weights["attention"], x), 3, axis=-1)
    query, key, value = (part.reshape(heads) for part in parts)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)
    return _dense(weights["projection"], mixed.reshape(x.shape))


def _feedforward(weights, x):
    x = jax.nn.gelu(_dense(weights["expansion"], x), approximate=True)
    return _dense(weights["contraction"], x)


def _new_bert(rng, workload):
    return {
        "embeddings": {
            "tokens": _normal(rng, (workload.vocabulary, 384), 0.02),
            "positions": _normal(rng, (workload.tokens, 384), 0.02),
            "segments": _normal(rng, (2, 384), 0.02),
            "norm": _new_norm(384),
        },
        "layers": _new_transformer(rng, 6, 384),
        "pooled": _new_dense(rng, 384, 384),
        "logits": _new_dense(rng, 384, 2),
    }


def _bert(weights, x):
    norm = functools.partial(_layer_norm, epsilon=1e-12)
    embeddings = weights["embeddings"]
    segments = embeddings["segments"][jnp.zeros_like(x)]
    x = embeddings["tokens"][x] + embeddings["positions"] + segments
    x = norm(embeddings["norm"], x)
    for layer in weights["layers"]:
        x = norm(layer["norm1"], x + _attention(layer, x))
        x = norm(layer["norm2"], x + _feedforward(layer, x))
    pooled = jnp.tanh(_dense(weights["pooled"], x[:, 0]))
    return _dense(weights["logits"], pooled)


def _new_gpt2(rng, workload):
    return {
        "tokens": _normal(rng, (workload.vocabulary, 768), 0.02),
        "positions": _normal(rng, (workload.tokens, 768), 0.02),
        "layers": _new_transformer(rng, 12, 768),
        "norm": _new_norm(768),
    }


def _gpt2(weights, x):
    norm = functools.partial(_layer_norm, epsilon=1e-5)
    x = weights["tokens"][x] + weights["positions"]
    for layer in weights["layers"]:
        x = x + _attention(layer, norm(layer["norm1"], x), is_causal=True)
        x = x + _feedforward(layer, norm(layer["norm2"], x))
    return norm(weights["norm"], x) @ weights["tokens"].T


def _new_lstm(rng, workload):
    return {
        "tokens": _normal(rng, (workload.vocabulary, 64), 0.05),
        "inputs": _new_dense(rng, 64, 4 * 128),
        "recurrent": _new_kernel(rng, 128, 4 * 128),
        "logits": _new_dense(rng, 128, 2),
    }


def _lstm(weights, x):
    # The products with the inputs need no loop.
    inputs = _dense(weights["inputs"], weights["tokens"][x])

    def cell(state, x):
        output, memory = state
        gates = x + output @ weights["recurrent"]
        i, f, c, o = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(f) * memory
        memory = memory + jax.nn.sigmoid(i) * jnp.tanh(c)
        return (jax.nn.sigmoid(o) * jnp.tanh(memory), memory), None

    start = jnp.zeros((len(x), 128))
    (output, _), _ = jax.lax.scan(
        cell, (start, start), inputs.transpose(1, 0, 2)
    )
    return _dense(weights["logits"], output)


# Functions that draw the weights of a model, and that apply it.
_MODELS = {
    "cnn": (_new_cnn, _cnn),
    "mlp": (_new_mlp, _mlp),
    "binary": (_new_mlp, _mlp),
    "resnet20": (_new_resnet20, _resnet20),
    "wrn28_4": (_new_wrn28_4, _wrn28_4),
    "bert_frozen": (_new_bert, _bert),
    "bert": (_new_bert, _bert),
    "bert_long_frozen": (_new_bert, _bert),
    "bert_long": (_new_bert, _bert),
    "gpt2": (_new_gpt2, _gpt2),
    "lstm": (_new_lstm, _lstm),
    "lstm_loop": (_new_lstm, _lstm),
}


def _model(name):
    """Loss function of trained and frozen weights on a batch, with weights."""
    workload = workloads.WORKLOADS[name]
    new, model = _MODELS[name]
    trained, frozen = new(np.random.default_rng(0), workload), {}
    if workload.trained < workload.parameters:
        frozen["embeddings"] = trained.pop("embeddings")

    def loss(trained, frozen, x, y):
        logits = model({**trained, **frozen}, x)
        if workload.one_logit:
            return optax.sigmoid_binary_cross_entropy(logits[:, 0], y).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss, trained, frozen


def _plain(loss, name):
    return jax.grad(loss), optax.sgd(_LEARNING_RATE)


def _private(loss, name):
    batch = workloads.WORKLOADS[name].batch
    # On a CPU, microbatches of 1 take the least time for every workload, up to
    # twenty times less than larger ones: XLA is slow there at products and
    # convolutions with a kernel for each example.
    microbatch = 1 if jax.default_backend() == "cpu" else batch
    gradient = jax_privacy.clipped_grad(
        loss,
        l2_clip_norm=_CLIP_NORM,
        normalize_by=batch,
        batch_argnums=(2, 3),
        microbatch_size=microbatch,
    )
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=_NOISE_MULTIPLIER * gradient.sensitivity(), prng_key=0
    )
    return gradient, optax.chain(privatizer, optax.sgd(_LEARNING_RATE))


# Functions that return a gradient function of the weights and the batch, and
# the optax transformation that applies its gradients.
_METHODS = {"plain": _plain, "vmap": _private}


def _size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _built(name, method):
    update, state, *counts = _prepared(name, method)
    batch = jax.device_put(workloads.data(name))

    def step():
        nonlocal state
        state = jax.block_until_ready(update(state, *batch))

    return step, *counts


def _built_epoch(name, method):
    update, state, *counts = _prepared(name, method)
    sizes = workloads.WORKLOADS[name]
    x, y = (
        np.concatenate([part] * sizes.steps_of_epoch)
        for part in workloads.data(name)
    )
    rng = np.random.default_rng(0)

    def epoch():
        nonlocal state
        start = time.perf_counter()
        for indices, is_padding in batches(len(x), sizes.batch, method, rng):
            padding = (
                {} if method == "plain" else {"is_padding_example": is_padding}
            )
            state = jax.block_until_ready(
                update(state, x[indices], y[indices], **padding)
            )
        return time.perf_counter() - start

    return epoch, *counts


def batches(examples, size, method, rng):
    """Yields the indices of the batches of an epoch, and which are padding.

    Args:
        examples: int.
        size: int, the expected batch size.
        method: string.
        rng: `np.random.Generator`.
    """
    steps = examples // size
    if method == "plain":
        for indices in rng.permutation(examples).reshape(steps, size):
            yield indices, np.zeros(size, bool)
        return
    strategy = batch_selection.CyclicPoissonSampling(
        sampling_prob=size / examples, iterations=steps
    )
    for indices in strategy.batch_iterator(examples, rng=rng):
        indices = batch_selection.pad_to_multiple_of(indices, max(1, size // 8))
        yield indices, indices == -1


def _prepared(name, method):
    """The update of a step, its first state, and numbers of parameters."""
    loss, trained, frozen = _model(name)
    gradient, optimizer = _METHODS[method](loss, name)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, frozen, x, y, **padding):
        trained, optimizer_state = state
        updates, optimizer_state = optimizer.update(
            gradient(trained, frozen, x, y, **padding), optimizer_state
        )
        return optax.apply_updates(trained, updates), optimizer_state

    def update_trained(state, *batch, **padding):
        return update(state, frozen, *batch, **padding)

    count = _size(trained)
    state = trained, optimizer.init(trained)
    return update_trained, state, count + _size(frozen), count


if __name__ == "__main__":
    timing.main(
        "JAX",
        f"JAX {jax.__version__}, JAX Privacy {jax_privacy.__version__}",
        tuple(_METHODS),
        _built,
        _built_epoch,
    )
