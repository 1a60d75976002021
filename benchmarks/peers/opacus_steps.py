"""Times training steps by PyTorch and Opacus.

    python -m benchmarks.peers.opacus_steps --workload=cnn --method=hooks

All methods run eagerly, as is PyTorch's default, on a GPU if there is one:

- `plain`: PyTorch's own step.
- `hooks`: Opacus's default, `GradSampleModule` and `DPOptimizer`: hooks keep
  the gradients of all examples, and the optimizer clips them.
- `ghost`: Opacus's `GradSampleModuleFastGradientClipping` with its optimizer
  and its loss: a first backward pass finds the norms, of linear layers and
  embeddings without their gradients, and a second one has clipped gradients.

Epochs take their batches from Opacus's `DPDataLoader`, by Poisson sampling and
without padding; those of `plain` from a `DataLoader` that shuffles.
"""

import time

import opacus
import torch
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from opacus.layers import DPLSTM
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import timing, workloads

METHODS = ("plain", "hooks", "ghost")
_CLIP_NORM, _NOISE_MULTIPLIER, _LEARNING_RATE = 1.0, 1.0, 0.01
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def built(workload, method):
    """Builds the step for `timing.main`."""
    model, x, y = _prepared(workload, method)
    one_logit = workloads.WORKLOADS[workload].one_logit
    return new_step(model, x, y, method, one_logit), *_counts(model)


def built_epoch(workload, method):
    """Builds the epoch for `timing.main`."""
    model, x, y = _prepared(workload, method)
    sizes = workloads.WORKLOADS[workload]
    step = new_steps(model, len(x), method, sizes.one_logit)
    repeats = sizes.steps_of_epoch
    loader = DataLoader(
        TensorDataset(*(torch.cat([part] * repeats) for part in (x, y))),
        batch_size=len(x),
        shuffle=True,
    )
    if method != "plain":
        loader = DPDataLoader.from_data_loader(loader)

    def epoch():
        start = time.perf_counter()
        for batch in loader:
            step(*batch)
        return time.perf_counter() - start

    return epoch, *_counts(model)


def _prepared(workload, method):
    """Model and batch of a workload."""
    sizes = workloads.WORKLOADS[workload]
    if method == "ghost" and sizes.is_language_model:
        raise NotImplementedError(
            "Opacus on tied embeddings: 'Parameter tying is not supported with "
            "Ghost Clipping'."
        )
    torch.manual_seed(0)
    model = new_model(workload, private=method != "plain")
    x, y = map(torch.from_numpy, workloads.data(workload))
    if sizes.image is not None:
        # Opacus is silently wrong on other layouts, and `contiguous()` keeps
        # one that PyTorch takes for channels last, if there is one channel.
        x = x.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
    else:
        x = x.long()
    return [value.to(_DEVICE) for value in (model, x, y.long())]


def new_model(workload, private):
    """Model of a workload.

    Args:
        workload: string, one of `benchmarks.peers.workloads.WORKLOADS`.
        private: bool, whether all layers are such as Opacus can train.

    Returns:
        `nn.Module`, from images `[batch, channels, height, width]` or tokens
        `[batch, tokens]` to logits `[batch, classes]`, of a language model
        `[batch * tokens, classes]`.
    """
    if workload in _OF_IMAGES:
        return _OF_IMAGES[workload]()
    sizes = workloads.WORKLOADS[workload]
    if workload.startswith("lstm"):
        return _LSTM(sizes.vocabulary, private)
    if sizes.is_language_model:
        return GPT2(sizes.vocabulary, sizes.tokens)
    model = BERT(sizes.vocabulary, sizes.tokens)
    if sizes.trained < sizes.parameters:
        model.embeddings.requires_grad_(False)
    return model


def new_step(model, x, y, method, one_logit=False):
    """Function that makes one training step, always on the same batch.

    Args:
        model: `nn.Module`.
        x: tensor, inputs.
        y: tensor of int64, labels.
        method: string, one of `METHODS`.
        one_logit: bool, whether the loss is binary cross-entropy. Defaults to
            False.

    Returns:
        Function without arguments. It leaves the gradients of the step in the
        model.
    """
    step = new_steps(model, len(x), method, one_logit)
    return lambda: step(x, y)


def new_steps(model, batch_size, method, one_logit=False):
    """Function that makes one training step on a batch.

    Args:
        model, method, one_logit: as for `new_step`.
        batch_size: int, the expected batch size.

    Returns:
        Function of inputs and labels.
    """
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], _LEARNING_RATE
    )
    criterion = nn.BCEWithLogitsLoss() if one_logit else nn.CrossEntropyLoss()
    settings = {
        "noise_multiplier": _NOISE_MULTIPLIER,
        "max_grad_norm": _CLIP_NORM,
        "expected_batch_size": batch_size,
    }
    if method == "hooks":
        model = GradSampleModule(model)
        optimizer = DPOptimizer(optimizer, **settings)
    elif method == "ghost":
        model = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=_CLIP_NORM
        )
        optimizer = DPOptimizerFastGradientClipping(optimizer, **settings)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)

    def step(x, y):
        y = y.flatten().float() if one_logit else y.flatten()
        optimizer.zero_grad(set_to_none=True)
        criterion(model(x), y).backward()
        optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()

    return step


def _counts(model):
    # PyTorch adds a second bias to the first, which no other framework has.
    weights = [p for n, p in model.named_parameters() if "bias_hh" not in n]
    return (
        sum(p.numel() for p in weights),
        sum(p.numel() for p in weights if p.requires_grad),
    )


def _cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def _mlp():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _binary():
    """One logit, without an axis of its own."""
    *hidden, _ = _mlp()
    return nn.Sequential(*hidden, nn.Linear(128, 1), nn.Flatten(0))


def _resnet20():
    return nn.Sequential(
        _conv(3, 16),
        _norm(4, 16),
        nn.ReLU(),
        *_stages(_Block, 16, (16, 32, 64), blocks=3, groups=4),
        *_classifier(64),
    )


def _wrn28_4():
    return nn.Sequential(
        _conv(3, 16),
        *_stages(_PreactivatedBlock, 16, (64, 128, 256), blocks=4, groups=16),
        _norm(16, 256),
        nn.ReLU(),
        *_classifier(256),
    )


_OF_IMAGES = {
    "cnn": _cnn,
    "binary": _binary,
    "mlp": _mlp,
    "resnet20": _resnet20,
    "wrn28_4": _wrn28_4,
}


def _stages(block, channels, widths, blocks, groups):
    for stage, width in enumerate(widths):
        for i in range(blocks):
            stride = 2 if stage > 0 and i == 0 else 1
            yield block(channels, width, stride, groups)
            channels = width


def _classifier(channels):
    return (
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


def _conv(inputs, outputs, size=3, stride=1):
    if stride == 1 or size == 1:
        return nn.Conv2d(
            inputs, outputs, size, stride, padding=size // 2, bias=False
        )
    # Keras pads images of an even size after their last pixels alone.
    return nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.Conv2d(inputs, outputs, size, stride, bias=False),
    )


def _norm(groups, channels):
    return nn.GroupNorm(groups, channels, eps=1e-3)


class _Block(nn.Module):
    def __init__(self, inputs, outputs, stride, groups):
        super().__init__()
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                _conv(inputs, outputs, 1, stride), _norm(groups, outputs)
            )
        self.residual = nn.Sequential(
            _conv(inputs, outputs, stride=stride),
            _norm(groups, outputs),
            nn.ReLU(),
            _conv(outputs, outputs),
            _norm(groups, outputs),
        )

    def forward(self, x):
        return F.relu(self.residual(x) + self.shortcut(x))


class _PreactivatedBlock(nn.Module):
    def __init__(self, inputs, outputs, stride, groups):
        super().__init__()
        self.activation = nn.Sequential(_norm(groups, inputs), nn.ReLU())
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = _conv(inputs, outputs, 1, stride)
        self.residual = nn.Sequential(
            _conv(inputs, outputs, stride=stride),
            _norm(groups, outputs),
            nn.ReLU(),
            _conv(outputs, outputs),
        )

    def forward(self, x):
        activated = self.activation(x)
        if self.shortcut is not None:
            x = self.shortcut(activated)
        return self.residual(activated) + x


class BERT(nn.Module):
    """BERT with a classifier of two classes.

    Args:
        vocabulary: int.
        tokens: int, of each example.
        width: int, a multiple of 64. Defaults to `384`.
        layers: int. Defaults to `6`.
    """

    def __init__(self, vocabulary, tokens, width=384, layers=6):
        super().__init__()
        self.embeddings = _Embeddings(
            vocabulary, tokens, width, segments=True, norm=True
        )
        self.layers = nn.Sequential(
            *(_TransformerLayer(width, decodes=False) for _ in range(layers))
        )
        self.pooling = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.logits = nn.Linear(width, 2)

    def forward(self, tokens):
        x = self.layers(self.embeddings(tokens))
        return self.logits(self.pooling(x[:, 0]))


class GPT2(nn.Module):
    """GPT-2, whose outputs are products with the embeddings of tokens.

    Args:
        vocabulary: int.
        tokens: int, of each example.
        width: int, a multiple of 64. Defaults to `768`.
        layers: int. Defaults to `12`.
    """

    def __init__(self, vocabulary, tokens, width=768, layers=12):
        super().__init__()
        self.embeddings = _Embeddings(vocabulary, tokens, width)
        self.layers = nn.Sequential(
            *(_TransformerLayer(width, decodes=True) for _ in range(layers)),
            nn.LayerNorm(width, eps=1e-5),
        )
        # Opacus sees no use of a weight outside of a layer.
        self.logits = nn.Linear(width, vocabulary, bias=False)
        self.logits.weight = self.embeddings.tokens.weight

    def forward(self, tokens):
        return self.logits(self.layers(self.embeddings(tokens))).flatten(0, 1)


class _Embeddings(nn.Module):
    def __init__(self, vocabulary, tokens, width, segments=False, norm=False):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(tokens, width)
        self.segments = nn.Embedding(2, width) if segments else None
        self.norm = nn.LayerNorm(width, eps=1e-12) if norm else nn.Identity()
        for layer in (self.tokens, self.positions, self.segments):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)

    def forward(self, tokens):
        batch, length = tokens.shape
        # Without the axis of examples, there would be no gradient for each.
        positions = torch.arange(length, device=tokens.device).repeat(batch, 1)
        x = self.tokens(tokens) + self.positions(positions)
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(tokens))
        return self.norm(x)


class _TransformerLayer(nn.Module):
    """A layer: causal and normalized first in a decoder, else last."""

    def __init__(self, width, decodes):
        super().__init__()
        epsilon = 1e-5 if decodes else 1e-12
        self.decodes = decodes
        self.attention = _Attention(width, is_causal=decodes)
        self.attention_norm = nn.LayerNorm(width, eps=epsilon)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )
        self.feed_forward_norm = nn.LayerNorm(width, eps=epsilon)

    def forward(self, x):
        if self.decodes:
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed_forward(self.feed_forward_norm(x))
        x = self.attention_norm(x + self.attention(x))
        return self.feed_forward_norm(x + self.feed_forward(x))


class _Attention(nn.Module):
    """Attention with heads of width 64."""

    def __init__(self, width, is_causal):
        super().__init__()
        self.is_causal = is_causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x):
        query, key, value = (
            projection(x).unflatten(-1, (-1, 64)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        x = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal
        )
        return self.output(x.transpose(1, 2).flatten(2))


class _LSTM(nn.Module):
    def __init__(self, vocabulary, private):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, 64)
        self.lstm = (DPLSTM if private else nn.LSTM)(64, 128, batch_first=True)
        nn.init.zeros_(self.lstm.bias_hh_l0).requires_grad_(False)
        self.logits = nn.Linear(128, 2)

    def forward(self, tokens):
        outputs, _ = self.lstm(self.embeddings(tokens))
        return self.logits(outputs[:, -1])


if __name__ == "__main__":
    timing.main(
        "Opacus",
        f"PyTorch {torch.__version__}, Opacus {opacus.__version__}",
        METHODS,
        built,
        built_epoch,
    )
