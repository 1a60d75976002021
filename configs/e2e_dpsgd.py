"""DP-SGD on E2E: GPT-2 writes sentences about restaurants, at ε = 8.

The model is a preset of keras_hub or a folder with a checkpoint. Its query, key
and value matrices are trained:

    tf-dpsub train --config=configs/e2e_dpsgd.py --workdir=out/e2e \\
        --config.data_dir=FOLDER_OF_CSV_FILES \\
        --config.model_kwargs.preset=gpt2_base_en

Sequence length, batch, clip, learning rate, epochs and delta are those of Li,
Tramèr et al., who train all weights.

Reference:
    - [Li et al.: When Does Differentially Private Learning Not Suffer in High
      Dimensions?, NeurIPS 2022](https://arxiv.org/abs/2207.00160)
    - [Li, Tramèr, Liang, Hashimoto: Large Language Models Can Be Strong
      Differentially Private Learners, ICLR 2022](
      https://arxiv.org/abs/2110.05679)
"""

from ml_collections import config_dict

from tf_dpsub.configs import default


def get_config():
    config = default.get_config()
    config.dataset = "e2e"
    config.model = "gpt2"
    config.model_kwargs = {
        "preset": config_dict.placeholder(str),
        "folder": config_dict.placeholder(str),
        "sequence_length": 100,
        "dropout": 0.0,
    }
    config.trainable_layers = ("self_attention/(query|key|value)$",)
    config.optimizer = "DPSGD"
    config.l2_norm_clip = 0.1
    config.inner_optimizer = "Adam"
    config.learning_rate = 1e-3
    config.epsilon = 8.0
    config.delta = 8e-6
    config.batch_size = 1024
    config.microbatch_size = 16
    config.epochs = 10
    return config
