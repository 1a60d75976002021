"""Transformers of keras_hub: from a preset, from a folder, or random."""

import dataclasses
import json
import pathlib

from tf_dpsub import extras
from tf_dpsub.models import hugging_face

# Names in checkpoints of the activation that Keras calls gelu_approximate.
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def bert_classifier(
    input_shape: tuple = (),
    num_classes: int = 2,
    *,
    preset: str | None = None,
    folder=None,
    sequence_length: int = 128,
    dropout: float | None = None,
    first_layers: int | None = None,
    **sizes,
):
    """Builds a BERT encoder with a classifier of texts on its first token.

    Args:
        input_shape: tuple, `()` if an input is one text, `(2,)` if it is a
            pair of them. Defaults to `()`.
        num_classes: int, number of logits. Defaults to `2`.
        preset: string, of keras_hub, such as `"bert_base_en_uncased"`, which is
            downloaded. Defaults to `None`.
        folder: string or path-like, of a Hugging Face checkpoint: config.json,
            .safetensors files and vocab.txt. Defaults to `None`. With neither,
            weights are random, and inputs are tokens: `token_ids`,
            `segment_ids` and `padding_mask`.
        sequence_length: int, tokens of a text, which is cut or padded to it.
            Defaults to `128`.
        dropout: float, of all layers; of the classifier alone with a preset.
            Defaults to `None`, that of the checkpoint, or 0.1.
        first_layers: int, how many layers of a folder's encoder are kept, the
            first ones. Defaults to `None`, all of them.
        **sizes: those of `keras_hub.models.BertBackbone` for random weights,
            such as `num_layers`, `hidden_dim` and `activation`. Defaults to
            BERT-base's.

    Returns:
        A `keras_hub.models.BertTextClassifier`, to logits
        `[batch, num_classes]`. Parts with weights are called `token_embedding`,
        `transformer_layer_0` and so on, `pooled_dense` and `logits`.

    Raises:
        ValueError: if both sources are given, the folder does not fit or has
            no `first_layers` layers, or `sequence_length` exceeds the positions
            that the model has.
        ImportError: if keras_hub is not installed.

    Example:

    ```python
    model = tf_dpsub.models.bert_classifier(folder="all-MiniLM-L6-v2")
    ```

    Reference:
        - [Devlin et al., 2019](https://arxiv.org/abs/1810.04805)
    """
    hub = extras.require("keras_hub", "nlp")
    from tf_dpsub.models.bert_backbone import BertBackbone

    _check_sources(preset, folder, sizes)
    if first_layers is not None and folder is None:
        raise ValueError(
            "Expected first_layers with a folder, got "
            f"first_layers={first_layers} without one. A preset has all of its "
            "layers, and a random model `num_layers`."
        )
    if preset is not None:
        return _from_preset(
            hub.models.BertTextClassifier,
            preset,
            sequence_length,
            num_classes=num_classes,
            dropout=dropout,
        )
    preprocessor = None
    if folder is None:
        backbone = BertBackbone(
            **_random_sizes(sizes, dropout, vocabulary_size=30522)
        )
    else:
        checkpoint = hugging_face.Checkpoint.read(folder, "bert")
        checkpoint.expect("bert")
        if first_layers is not None:
            checkpoint = checkpoint.cut(first_layers)
        config = checkpoint.config
        backbone = BertBackbone(
            **_encoder_sizes(config, dropout),
            max_sequence_length=config["max_position_embeddings"],
            num_segments=config["type_vocab_size"],
            activation=_activation(config["hidden_act"]),
        )
        checkpoint.fill(backbone, hugging_face.bert)
        preprocessor = hub.models.BertTextClassifierPreprocessor(
            _bert_tokenizer(hub, checkpoint.path), sequence_length
        )
    _check_length(sequence_length, backbone)
    return hub.models.BertTextClassifier(
        backbone,
        num_classes=num_classes,
        preprocessor=preprocessor,
        dropout=backbone.dropout,
    )


def roberta_classifier(
    input_shape=(),
    num_classes=2,
    *,
    preset=None,
    folder=None,
    sequence_length=128,
    dropout=None,
    **sizes,
):
    """Builds a RoBERTa encoder with a classifier of texts on its first token.

    Random models are of DistilRoBERTa's size by default: six layers.

    The tokenizer of a folder is in vocab.json and merges.txt; inputs of a
    random model are `token_ids` and `padding_mask`.

    Args: as `bert_classifier`.

    Returns:
        A `keras_hub.models.RobertaTextClassifier`.

    Raises:
        ValueError: as `bert_classifier`.
        ImportError: as `bert_classifier`.

    Reference:
        - [Liu et al., 2019](https://arxiv.org/abs/1907.11692)
        - [Sanh et al., 2019](https://arxiv.org/abs/1910.01108)
    """
    hub = extras.require("keras_hub", "nlp")
    _check_sources(preset, folder, sizes)
    if preset is not None:
        return _from_preset(
            hub.models.RobertaTextClassifier,
            preset,
            sequence_length,
            num_classes=num_classes,
            dropout=dropout,
        )
    preprocessor = None
    if folder is None:
        backbone = hub.models.RobertaBackbone(
            **_random_sizes(
                {"num_layers": 6} | sizes, dropout, vocabulary_size=50265
            )
        )
    else:
        checkpoint = hugging_face.Checkpoint.read(folder, "roberta")
        config = checkpoint.expect("roberta")
        if _activation(config["hidden_act"]) != "gelu":
            raise ValueError(
                f"Expected the exact GELU in {folder}, which keras_hub's "
                f"RoBERTa has, got {config['hidden_act']!r}."
            )
        backbone = hub.models.RobertaBackbone(
            **_encoder_sizes(config, dropout),
            # Two positions are of padding.
            max_sequence_length=config["max_position_embeddings"] - 2,
        )
        checkpoint.fill(backbone, hugging_face.roberta)
        preprocessor = hub.models.RobertaTextClassifierPreprocessor(
            _byte_pair_tokenizer(hub.models.RobertaTokenizer, checkpoint.path),
            sequence_length,
        )
    _check_length(sequence_length, backbone)
    return hub.models.RobertaTextClassifier(
        backbone,
        num_classes=num_classes,
        preprocessor=preprocessor,
        dropout=backbone.dropout,
    )


def prompted_classifier(
    input_shape: tuple = (),
    num_classes: int = 2,
    *,
    folder,
    words: tuple = ("terrible", "great"),
    template: str = "{text} It was {mask}.",
    sequence_length: int = 128,
    dropout: float | None = None,
):
    """Builds a classifier that asks a masked language model for a word.

    A text stands in a template; the logits of the classes are those that the
    head of the model gives one word each. Nothing is random before training.

    Args:
        input_shape: tuple, `()`: an input is one text.
        num_classes: int, the number of words. Defaults to `2`.
        folder: string or path-like, of a Hugging Face checkpoint of BERT or
            RoBERTa for masked language modelling.
        words: tuple of string, one for each class, each one token. Defaults to
            `("terrible", "great")`.
        template: string with `{text}` and, after it, `{mask}`. Defaults to
            `"{text} It was {mask}."`.
        sequence_length: int, tokens of a prompt. Defaults to `128`.
        dropout: float. Defaults to `None`, that of the checkpoint.

    Returns:
        A `tf_dpsub.models.prompts.PromptedClassifier`, to logits
        `[batch, num_classes]`.

    Raises:
        ValueError: if the folder, the words or the template do not fit.
        ImportError: as `bert_classifier`.

    Reference:
        - [Li et al., 2022](https://arxiv.org/abs/2110.05679), Section 3.2
        - [Gao, Fisch, Chen, 2021](https://arxiv.org/abs/2012.15723)
    """
    extras.require("keras_hub", "nlp")
    from tf_dpsub.models import prompts

    if tuple(input_shape) != ():
        raise ValueError(
            "Expected one text as an input, for which the template has a "
            f"place, got inputs of shape {tuple(input_shape)}."
        )
    if len(words) != num_classes:
        raise ValueError(
            f"Expected {num_classes} words, one for each class, got {words}."
        )
    kind = hugging_face.model_type(folder)
    makers = {"bert": bert_classifier, "roberta": roberta_classifier}
    if kind not in makers:
        raise ValueError(
            "Expected a folder with a checkpoint of BERT or RoBERTa, got "
            f"folder={folder!r}, which holds {kind or 'none'}."
        )
    # This model lends its backbone and its tokenizer.
    plain = makers[kind](
        folder=folder, sequence_length=sequence_length, dropout=dropout
    )
    tokenizer = plain.preprocessor.tokenizer
    head = _MASKED_HEADS[kind]
    preprocessor = prompts.PromptPreprocessor(
        tokenizer, sequence_length, template, has_segments=kind == "bert"
    )
    preprocessor(["Whether there is room for a text."])
    model = prompts.PromptedClassifier(
        plain.backbone,
        num_classes,
        tokenizer.mask_token_id,
        activation="gelu",
        layer_norm_epsilon=head.epsilon,
        preprocessor=preprocessor,
    )
    checkpoint = hugging_face.Checkpoint.read(folder, kind)
    width = plain.backbone.hidden_dim
    dense, norm = (
        [
            checkpoint.take(f"{name}.{suffix}", shape)
            for suffix, shape in (("weight", shapes), ("bias", (width,)))
        ]
        for name, shapes in ((head.dense, (width,) * 2), (head.norm, (width,)))
    )
    model.get_layer("head_dense").set_weights([dense[0].T, dense[1]])
    model.get_layer("head_layer_norm").set_weights(norm)
    # Tokens of byte pairs include the space before a word.
    space = "" if kind == "bert" else " "
    ids = [prompts.word_id(tokenizer, space + word) for word in words]
    bias = checkpoint.take(head.bias, (plain.backbone.vocabulary_size,))
    model.set_words(ids, bias[ids])
    return model


@dataclasses.dataclass(frozen=True)
class _MaskedHead:
    dense: str
    norm: str
    bias: str
    epsilon: float


_MASKED_HEADS = {
    "bert": _MaskedHead(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        1e-12,
    ),
    "roberta": _MaskedHead(
        "lm_head.dense", "lm_head.layer_norm", "lm_head.bias", 1e-5
    ),
}


def gpt2(
    input_shape=(),
    num_classes=None,
    *,
    preset=None,
    folder=None,
    sequence_length=128,
    dropout=None,
    **sizes,
):
    """Builds a GPT-2 language model, whose output weights are its embedding.

    DistilGPT-2 is one of six layers.

    The tokenizer of a folder is in vocab.json and merges.txt; inputs of a
    random model are `token_ids` and `padding_mask`.

    Args: as `bert_classifier`.
        num_classes: has no effect: a language model has none. Defaults to
            `None`.

    Returns:
        A `keras_hub.models.GPT2CausalLM`, to logits
        `[batch, sequence, vocabulary]`. Its preprocessor is a
        `tf_dpsub.models.responses.ResponsePreprocessor`.

    Raises:
        ValueError: as `bert_classifier`.
        ImportError: as `bert_classifier`.

    Reference:
        - [Radford et al., 2019](
          https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)
    """
    hub = extras.require("keras_hub", "nlp")
    _check_sources(preset, folder, sizes)
    from tf_dpsub.models.responses import ResponsePreprocessor

    if preset is not None:
        model = _from_preset(
            hub.models.GPT2CausalLM, preset, sequence_length, dropout=dropout
        )
        model.preprocessor = ResponsePreprocessor(
            model.preprocessor.tokenizer, sequence_length
        )
        return model
    preprocessor = None
    if folder is None:
        backbone = hub.models.GPT2Backbone(
            **_random_sizes(sizes, dropout, vocabulary_size=50257)
        )
    else:
        checkpoint = hugging_face.Checkpoint.read(folder, "transformer")
        config = checkpoint.expect("gpt2")
        if config["activation_function"] not in _TANH_GELU:
            raise ValueError(
                f"Expected the tanh form of GELU in {folder}, as keras_hub's "
                f"GPT-2 has it, got {config['activation_function']!r}."
            )
        backbone = hub.models.GPT2Backbone(
            vocabulary_size=config["vocab_size"],
            num_layers=config["n_layer"],
            num_heads=config["n_head"],
            hidden_dim=config["n_embd"],
            intermediate_dim=config.get("n_inner") or 4 * config["n_embd"],
            dropout=config["resid_pdrop"] if dropout is None else dropout,
            max_sequence_length=config["n_positions"],
        )
        checkpoint.fill(backbone, hugging_face.gpt2)
        preprocessor = ResponsePreprocessor(
            _byte_pair_tokenizer(hub.models.GPT2Tokenizer, checkpoint.path),
            sequence_length,
        )
    _check_length(sequence_length, backbone)
    return hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)


def _check_sources(preset, folder, sizes):
    sources = {"preset": preset is not None, "folder": folder is not None}
    sources[f"sizes ({', '.join(sizes)})"] = bool(sizes)
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) > 1:
        raise ValueError(
            "Expected a preset, a folder, or sizes of a random model, got "
            f"{' and '.join(given)}. The first two know their sizes."
        )


def _check_length(sequence_length, backbone):
    most = backbone.max_sequence_length
    if not 1 <= sequence_length <= most:
        raise ValueError(
            f"Expected 1 <= sequence_length <= {most}, the positions that "
            f"'{backbone.name}' has, got {sequence_length}."
        )


def _from_preset(cls, preset, sequence_length, **kwargs):
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    model = cls.from_preset(preset, **kwargs)
    _check_length(sequence_length, model.backbone)
    model.preprocessor.sequence_length = sequence_length
    return model


def _random_sizes(sizes, dropout, vocabulary_size):
    base = {
        "vocabulary_size": vocabulary_size,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
        "dropout": 0.1 if dropout is None else dropout,
    }
    return base | sizes


def _encoder_sizes(config, dropout):
    return {
        "vocabulary_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "hidden_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "dropout": (
            config["hidden_dropout_prob"] if dropout is None else dropout
        ),
    }


def _activation(name):
    """Keras's name of an activation of a checkpoint."""
    return "gelu_approximate" if name in _TANH_GELU else name


def _bert_tokenizer(hub, path):
    settings = {}
    if (path / "tokenizer_config.json").is_file():
        text = (path / "tokenizer_config.json").read_text("utf-8")
        settings = json.loads(text)
    lowercase = settings.get("do_lower_case", True)
    strips = settings.get("strip_accents")
    return hub.models.BertTokenizer(
        _tokenizer_file(path, "vocab.txt"),
        lowercase=lowercase,
        # By default, accents are stripped if letters become lower case.
        strip_accents=lowercase if strips is None else strips,
    )


def _byte_pair_tokenizer(cls, path):
    lines = pathlib.Path(_tokenizer_file(path, "merges.txt")).read_text("utf-8")
    return cls(
        vocabulary=_tokenizer_file(path, "vocab.json"),
        # The first line may be a version.
        merges=[v for v in lines.splitlines() if v and v[:8] != "#version"],
    )


def _tokenizer_file(path, name):
    if not (path / name).is_file():
        raise ValueError(
            f"Expected a folder with {name}, the tokenizer of the model, got "
            f"{str(path)!r}, which has none."
        )
    return str(path / name)
