"""Tokenized data sets, cached on disk."""

import dataclasses
import hashlib
import json
import os
import pathlib

import numpy as np

from tf_dpsub import files
from tf_dpsub.launchers.training import tasks
from tf_dpsub.models import tokenizers

# Number of texts tokenized at a time.
_CHUNK = 4096
# Key of the targets of a model that generates text.
_TARGETS = "targets"


def tokenized(loaded, model):
    """Tokenizes a data set of texts for a model.

    Tokens are cached in the user's cache folder, which others cannot read, and
    reused for the same texts and tokenizer.

    Args:
        loaded: `tf_dpsub.data.Dataset`.
        model: `keras.Model`, with a keras_hub preprocessor for texts.

    Returns:
        A `tf_dpsub.data.Dataset` whose inputs are dicts of arrays; targets that
        are texts become tokens. `loaded` itself if it holds no texts.

    Raises:
        ValueError: if the model takes no texts.
    """
    if not loaded.is_text:
        return loaded
    preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is None:
        raise ValueError(
            f"Expected a model with a tokenizer for {loaded.name!r}, got "
            f"'{model.name}', which has none. Give it a preset or a folder."
        )
    is_generation = loaded.num_classes is None
    parts = {}
    for split in ("train", "public", "test"):
        x, y = getattr(loaded, f"x_{split}"), getattr(loaded, f"y_{split}")
        if is_generation:
            x = np.stack([x, y], axis=1)
        inputs = _tokens(x, preprocessor, is_generation)
        if is_generation:
            parts[f"y_{split}"] = inputs.pop(_TARGETS)
        parts[f"x_{split}"] = inputs
    return dataclasses.replace(loaded, **parts)


def _tokens(texts, preprocessor, is_generation):
    """Dict of arrays of tokens, from texts or pairs of texts."""
    key = _key(texts, preprocessor, is_generation)
    path = _cache_folder() / f"{key}.npz"
    if path.is_file():
        with np.load(path) as file:
            return dict(file)
    # Without texts, an empty one gives the names and shapes of arrays.
    nonempty_texts = (
        texts if len(texts) else np.full((1, *texts.shape[1:]), "", object)
    )
    chunks = [
        _chunk(part, preprocessor, is_generation)
        for part in np.split(
            nonempty_texts, range(_CHUNK, len(nonempty_texts), _CHUNK)
        )
    ]
    tokens = {
        name: np.concatenate([chunk[name] for chunk in chunks])[: len(texts)]
        for name in chunks[0]
    }
    files.make_folder(path.parent)
    files.replace(path, lambda path: np.savez(path, **tokens))
    return tokens


def _chunk(texts, preprocessor, is_generation):
    if is_generation:
        prompts, responses = map(list, texts.T)
        inputs, targets, weights = preprocessor(
            {"prompts": prompts, "responses": responses}
        )
        targets = tasks.masked_targets(targets, weights)
        inputs = {**inputs, _TARGETS: targets}
    else:
        inputs = tokenizers.preprocessed(preprocessor, texts)
    return {name: np.asarray(array) for name, array in inputs.items()}


def _cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tf_dpsub" / "tokens"


def _without_names(config):
    """A config without the names that Keras numbers automatically."""
    if not isinstance(config, dict):
        return config
    return {k: _without_names(v) for k, v in config.items() if k != "name"}


def _key(texts, preprocessor, is_generation):
    """Digest of the texts and of all settings of the tokenizer."""
    tokenizer = preprocessor.tokenizer
    settings = {
        "type": type(preprocessor).__name__,
        "preprocessor": _without_names(preprocessor.get_config()),
        "vocabulary": list(tokenizer.get_vocabulary()),
        "merges": list(getattr(tokenizer, "merges", ())),
        "shape": [is_generation, *texts.shape],
    }
    digest = hashlib.sha256(json.dumps(settings, default=str).encode())
    for text in texts.flat:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
