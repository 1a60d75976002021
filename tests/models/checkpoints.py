"""Small checkpoints of language models, in Hugging Face's format."""

import json

import numpy as np
from safetensors import numpy as safetensors

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] good bad a film é e ##s".split()


def tensors_of(kind):
    """Random tensors of a small checkpoint, and its config."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.5 * rng.normal(size=shape)).astype("float32")

    v, d, m = 30, 8, 16
    if kind == "gpt2":
        tensors = {"wte.weight": draw(v, d), "wpe.weight": draw(12, d)}
        for i in range(2):
            for name, shape in {
                "attn.c_attn": (d, 3 * d),
                "attn.c_proj": (d, d),
                "mlp.c_fc": (d, m),
                "mlp.c_proj": (m, d),
            }.items():
                tensors[f"h.{i}.{name}.weight"] = draw(*shape)
                tensors[f"h.{i}.{name}.bias"] = draw(shape[1])
            for name in ("ln_1", "ln_2"):
                tensors[f"h.{i}.{name}.weight"] = draw(d)
                tensors[f"h.{i}.{name}.bias"] = draw(d)
            tensors[f"h.{i}.attn.bias"] = np.ones((1, 1, 12, 12), "float32")
        tensors |= {"ln_f.weight": draw(d), "ln_f.bias": draw(d)}
        config = {
            "model_type": "gpt2",
            "vocab_size": v,
            "n_layer": 2,
            "n_head": 2,
            "n_embd": d,
            "n_inner": m,
            "n_positions": 12,
            "resid_pdrop": 0.1,
            "activation_function": "gelu_new",
        }
        return tensors, config
    is_roberta = kind == "roberta"
    tensors = {
        "embeddings.word_embeddings.weight": draw(v, d),
        "embeddings.position_embeddings.weight": draw(12 + 2 * is_roberta, d),
        "embeddings.token_type_embeddings.weight": draw(2 - is_roberta, d),
        "embeddings.LayerNorm.weight": draw(d),
        "embeddings.LayerNorm.bias": draw(d),
    }
    for i in range(2):
        layer = f"encoder.layer.{i}"
        for name, (inputs, outputs) in {
            "attention.self.query": (d, d),
            "attention.self.key": (d, d),
            "attention.self.value": (d, d),
            "attention.output.dense": (d, d),
            "intermediate.dense": (d, m),
            "output.dense": (m, d),
        }.items():
            tensors[f"{layer}.{name}.weight"] = draw(outputs, inputs)
            tensors[f"{layer}.{name}.bias"] = draw(outputs)
        for name in ("attention.output", "output"):
            tensors[f"{layer}.{name}.LayerNorm.weight"] = draw(d)
            tensors[f"{layer}.{name}.LayerNorm.bias"] = draw(d)
    if not is_roberta:
        tensors |= {"pooler.dense.weight": draw(d, d)}
        tensors |= {"pooler.dense.bias": draw(d)}
    config = {
        "model_type": kind,
        "vocab_size": v,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": d,
        "intermediate_size": m,
        "max_position_embeddings": 12 + 2 * is_roberta,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.1,
        "hidden_act": "gelu",
    }
    return tensors, config


def write_gpt2_of_bytes(path, positions=128, width=32, layers=2):
    """Writes a random GPT-2 whose tokens are bytes, for any text."""
    shapes = {
        "wte.weight": (258, width),
        "wpe.weight": (positions, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    for i in range(layers):
        for name, (inputs, outputs) in {
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (width, 4 * width),
            "mlp.c_proj": (4 * width, width),
        }.items():
            shapes[f"h.{i}.{name}.weight"] = (inputs, outputs)
            shapes[f"h.{i}.{name}.bias"] = (outputs,)
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{i}.{name}.weight"] = (width,)
            shapes[f"h.{i}.{name}.bias"] = (width,)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 0.1, shape).astype("float32")
        for name, shape in shapes.items()
    }
    for name in tensors:
        if "ln_" in name and name.endswith("weight"):
            tensors[name] += 1
    safetensors.save_file(tensors, path / "model.safetensors")
    config = {
        "model_type": "gpt2",
        "vocab_size": 258,
        "n_layer": layers,
        "n_head": 2,
        "n_embd": width,
        "n_positions": positions,
        "resid_pdrop": 0.0,
        "activation_function": "gelu_new",
    }
    (path / "config.json").write_text(json.dumps(config))
    # GPT-2 moves bytes without a visible character above all others.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    symbols = [*map(chr, visible), *(chr(256 + k) for k in range(len(hidden)))]
    # keras_hub needs a merge. Token 0 is a symbol, which pads, too.
    words = [*symbols, "th", "<|endoftext|>"]
    ids = {word: k for k, word in enumerate(words)}
    (path / "vocab.json").write_text(json.dumps(ids), "utf-8")
    (path / "merges.txt").write_text("#version\nt h\n", "utf-8")
    return path


def write(path, kind, tensors=None, prefix="", **changes):
    """Writes a folder as Hugging Face's `save_pretrained` does."""
    defaults, config = tensors_of(kind)
    tensors = defaults if tensors is None else tensors
    names = {prefix + name: tensor for name, tensor in tensors.items()}
    # Large models come in several files.
    half = len(names) // 2
    for k, part in enumerate((list(names)[:half], list(names)[half:])):
        safetensors.save_file(
            {name: np.ascontiguousarray(names[name]) for name in part},
            path / f"model-{k}.safetensors",
        )
    (path / "config.json").write_text(json.dumps(config | changes))
    if kind == "bert":
        (path / "vocab.txt").write_text("\n".join(WORDS), "utf-8")
    else:
        vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        vocabulary += ["<|endoftext|>", "a", "b", "ab", "Ġ", "Ġa"]
        ids = {word: k for k, word in enumerate(vocabulary)}
        (path / "vocab.json").write_text(json.dumps(ids), "utf-8")
        (path / "merges.txt").write_text("#version\na b\nĠ a\n", "utf-8")
    return path


def write_bert_of_one_layer(path, head=None):
    """Writes a folder with the smallest BERT, and a head if one is given."""
    tensors, _ = tensors_of("bert")
    tensors = {k: v for k, v in tensors.items() if "layer.1." not in k}
    return write(path, "bert", tensors | (head or {}), num_hidden_layers=1)


def masked_head(kind):
    """Tensors of the head of a masked language model."""
    rng = np.random.default_rng(1)

    def draw(*shape):
        return (0.5 * rng.normal(size=shape)).astype("float32")

    names = {
        "bert": (
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
        ),
        "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    }[kind]
    dense, norm, bias = names
    return {
        f"{dense}.weight": draw(8, 8),
        f"{dense}.bias": draw(8),
        f"{norm}.weight": draw(8),
        f"{norm}.bias": draw(8),
        bias: draw(30),
    }


def write_masked(path, kind="bert", head=None):
    """Writes a folder with a masked language model."""
    tensors, _ = tensors_of(kind)
    head = masked_head(kind) if head is None else head
    return write(path, kind, tensors | head)
