"""A private head on texts: mean hidden states of a pretrained encoder."""

from tf_dpsub import extras
from tf_dpsub.data import public_origins
from tf_dpsub.models import hugging_face, language_models, tokenizers
from tf_dpsub.models.feature_classifier import PURPOSE

_MAKERS = {
    "bert": language_models.bert_classifier,
    "roberta": language_models.roberta_classifier,
}


def sentence_classifier(
    input_shape: tuple = (),
    num_classes: int = 2,
    *,
    public_texts,
    preset: str | None = None,
    folder=None,
    sequence_length: int = 64,
    rank: int | None = None,
    whiten: float = 0.5,
    allow_private: bool = False,
):
    """Builds a linear classifier on features of texts that are not trained.

    Features are the means over tokens of the hidden states of all layers of a
    pretrained encoder, normalised by public texts; and, with a rank, projected
    on their main public directions and whitened. `PrivateModel.fit` computes
    those of private texts once, at a width close to the length of each.

    Formal guarantees: features are functions of one text, of the pretrained
    weights and of public texts. They cost no privacy. `fit` compares these with
    the private texts, unless the model was loaded from a file.

    Args:
        input_shape: tuple, `()` if an input is one text, `(2,)` if it is a
            pair of them. Defaults to `()`.
        num_classes: int, number of logits. Defaults to `2`.
        public_texts: sequence of strings, or of pairs of them, of any kind.
            Some 2,000 are enough.
        preset: string, of an encoder of keras_hub, such as
            `"bert_base_en_uncased"`, which is downloaded. Defaults to `None`.
        folder: string or path-like, of a Hugging Face checkpoint of BERT or
            RoBERTa. Defaults to `None`.
        sequence_length: int, tokens of a text, which is cut or padded to it.
            Defaults to `64`.
        rank: int, number of public directions that are kept. Defaults to
            `None`, all features.
        whiten: float in [0, 1], exponent by which public variances are divided
            out, with a rank. Defaults to `0.5`.
        allow_private: bool, whether some of the public texts may be private
            ones. The statement then says that epsilon does not cover these.
            Defaults to `False`.

    Returns:
        A `keras_hub.models.Task` from texts to logits `[batch, num_classes]`,
        whose head is zero.

    Raises:
        ValueError: if not one of `preset` and `folder` is given, if the encoder
            has no such layers, or if public texts are too few for the rank.
        ImportError: if keras_hub is not installed.

    Example:

    ```python
    model = tf_dpsub.models.sentence_classifier(
        folder="all-MiniLM-L6-v2", public_texts=public_texts, rank=1000
    )
    ```
    """
    hub = extras.require("keras_hub", "nlp")
    from tf_dpsub.models.sentences import SentenceClassifier

    if (preset is None) == (folder is None):
        raise ValueError(
            "Expected a preset or a folder of an encoder, got "
            f"{'neither' if preset is None else 'both'}."
        )
    if preset is not None:
        plain = hub.models.TextClassifier.from_preset(
            preset, num_classes=num_classes
        )
        plain.preprocessor.sequence_length = sequence_length
    else:
        kind = hugging_face.model_type(folder)
        if kind not in _MAKERS:
            raise ValueError(
                "Expected a folder with a checkpoint of BERT or RoBERTa, got "
                f"folder={folder!r}, which holds {kind or 'none'}."
            )
        plain = _MAKERS[kind](
            input_shape,
            num_classes,
            folder=folder,
            sequence_length=sequence_length,
        )
    tokens = tokenizers.preprocessed(plain.preprocessor, public_texts)
    model = SentenceClassifier(
        plain.backbone,
        num_classes,
        rank,
        whiten,
        preprocessor=plain.preprocessor,
        public_tokens=tokens,
    )
    public_origins.remember(
        tokens,
        model.get_layer("features").features.public_statistics,
        PURPOSE,
        allow_private=allow_private,
        are_preprocessed=True,
    )
    return model
