"""DP-SGD on SST-2 by a prompt: a masked language model names the class, ε = 8.

The prompt of a sentence is "... It was [mask]."; the words for the classes are
"terrible" and "great". The model comes from a folder with a checkpoint of
RoBERTa or BERT and its head, such as DistilRoBERTa's. Its query and value
matrices are trained:

    tf-dpsub train --config=configs/sst2_prompt_dpsgd.py --workdir=out/sst2 \\
        --config.model_kwargs.folder=FOLDER

Batch, clip, learning rate and epochs are those of Li, Tramèr et al., who train
all weights; delta is n^-1.1 of the 67,349 sentences.

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
    config.dataset = "glue/sst2"
    config.model = "prompted_classifier"
    config.model_kwargs = {
        "folder": config_dict.placeholder(str),
        "words": ("terrible", "great"),
        "template": "{text} It was {mask}.",
        "sequence_length": 64,
        "dropout": 0.0,
    }
    config.trainable_layers = (r"self_attention(_layer)?/(query|value)$",)
    config.optimizer = "DPSGD"
    config.l2_norm_clip = 0.1
    config.inner_optimizer = "Adam"
    config.learning_rate = 5e-4
    config.learning_rate_schedule = "linear"
    config.epsilon = 8.0
    config.delta = 67_349**-1.1
    config.batch_size = 1000
    config.microbatch_size = 50
    config.epochs = 3
    return config
