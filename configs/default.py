"""The fields of a training config, with their defaults."""

import ml_collections
from ml_collections import config_dict


def get_config():
    """Makes the config that the files in `configs/` start from.

    A name is that of the library, as in `tf_dpsub.models.get`; the field
    `..._kwargs` has further arguments. `None` leaves the choice to the library.

    Returns:
        A locked `ml_collections.ConfigDict`, which refuses unknown fields.

    Example:

    ```python
    from tf_dpsub.configs import default

    def get_config():
        config = default.get_config()
        config.dataset = "mnist"
        config.noise_multiplier = 4.0
        return config
    ```
    """
    config = ml_collections.ConfigDict()

    # Data: a name, or an .npz file with the arrays x_train, y_train, x_test and
    # y_test. The test split is taken to be public: it is evaluated without
    # noise after every epoch. Texts need a model with a tokenizer.
    config.dataset = "digits"
    config.data_dir = config_dict.placeholder(str)
    config.private_examples = config_dict.placeholder(int)
    config.public_examples = 0

    config.model = "mlp"
    config.model_kwargs = ml_collections.ConfigDict()

    # For the model "feature_classifier": arguments of
    # `tf_dpsub.models.image_features`. Its public images are given as those of
    # a public subspace: see below. The public texts of "sentence_classifier"
    # are those of `public_examples`, or the lines of the file `public_data`.
    config.features = ml_collections.ConfigDict()

    # A .keras file with the same model, such as that of another run: training
    # starts from its weights. They are taken as public: epsilon of this run
    # does not cover what they reveal about private examples.
    config.initial_weights = config_dict.placeholder(str)

    # For a head on features: it begins at the ridge regression on so many
    # public examples of the data set with their labels, and the recipe halves
    # its rate. They are the first of `public_examples`, unless these are of the
    # file `public_data`. 0: it begins at zero.
    config.ridge_start_examples = 0

    # Regular expressions for the paths of layers to train. Without any, all
    # layers are trained.
    config.trainable_layers = ()
    # Keras's LoRA: `rank`, and `include`, regular expressions for the paths of
    # layers. Their kernels are frozen.
    config.lora = ml_collections.ConfigDict()
    # Arguments of `tf_dpsub.layers.reparametrize`, for the optimizer RGP. With
    # `{"carriers": "public"}` in `optimizer_kwargs` it takes public examples as
    # a public subspace does: see below.
    config.reparametrize = ml_collections.ConfigDict()

    # A private optimizer around one of Keras's.
    config.optimizer = "DPSGD"
    config.optimizer_kwargs = ml_collections.ConfigDict()
    # Number of steps of the optimizer DPSGD that share their noise: an int, or
    # "auto", the best one for the number of examples and steps, the batch size,
    # epsilon and delta.
    config.bands = config_dict.placeholder(object)
    config.inner_optimizer = "SGD"
    config.inner_optimizer_kwargs = ml_collections.ConfigDict()
    config.learning_rate = 0.1
    # "constant", "halfway" (a tenth of it in the second half of the steps), or
    # "linear" or "cosine", which end at 0.
    config.learning_rate_schedule = "constant"

    # The subspace of an optimizer that works in one. The basis of a public
    # subspace comes from `public_examples` of the data set; or, if
    # `public_data` is an .npz file, from so many of its images (0: all),
    # fitted to the model's input; "dead_leaves" stands for images of that
    # random process (0: 2,000). Labels of these images are random: drawn anew
    # whenever the basis is computed. `random_public_labels` does so for the
    # data set, too. The basis of a fixed subspace is read from the .npz file
    # that `subspace_kwargs` names as `basis`: the first `rank` of its
    # `directions` [parameters, n]. `ProjectedDPSGD` projects from `start_epoch`
    # on; the first epoch is 1.
    config.subspace = config_dict.placeholder(str)
    config.subspace_kwargs = ml_collections.ConfigDict()
    config.public_data = config_dict.placeholder(str)
    config.random_public_labels = False
    # The exponent of the scales of a public subspace: from 0 to 1, or "auto".
    config.whiten = config_dict.placeholder(object)
    config.start_epoch = 1

    # Privacy. `epsilon` is a budget: a run that would exceed it does not start.
    # Without a noise multiplier, the smallest one that keeps the budget is
    # used. On the command line, each of the two replaces the other.
    config.l2_norm_clip = 1.0
    config.noise_multiplier = config_dict.placeholder(float)
    config.epsilon = config_dict.placeholder(float)
    config.delta = 1e-5
    config.accountant = "pld"
    # The most rows of one person: epsilon, as budget and in all that the run
    # prints and writes, is then that of all of them together. The data must
    # keep it, as by `tf_dpsub.data.limit_rows`: it is not checked.
    config.rows_per_person = config_dict.placeholder(int)

    # "full_batch": the arguments of `tf_dpsub.heads.FullBatch` that
    # `recipe_kwargs` leaves out follow from the number of examples, epsilon and
    # delta. The recipe replaces the optimizer, its rate and clip, the batch
    # size and the number of epochs.
    config.recipe = config_dict.placeholder(str)
    config.recipe_kwargs = ml_collections.ConfigDict()

    # The expected batch size: batches differ in size. "poisson" draws each
    # example at each step independently, "once_per_epoch" at one step of each
    # epoch, chosen at random.
    config.batch_size = 128
    config.sampling = "poisson"
    config.microbatch_size = config_dict.placeholder(int)
    config.epochs = 30

    # Seed of the split and of the initial weights. Noise and sampling take
    # fresh entropy, unless an experiment fixes their seed; the statement then
    # says so.
    config.seed = 0
    config.fixed_noise_seed = config_dict.placeholder(int)

    # Recorders of gradients, after epochs: "test_projection_error",
    # "test_projection_residual", "test_spectrum" and "private_spectrum".
    # "private_gradients" writes the mean clipped gradients of steps to the
    # folder `gradients`; `private_gradients_kwargs` are arguments of
    # `tf_dpsub.callbacks.PrivateGradientRecorder`. No epsilon covers what the
    # two private recorders write.
    config.recorders = ()
    config.private_gradients_kwargs = ml_collections.ConfigDict()

    # Execution.
    config.dtype_policy = "float32"
    config.jit_compile = config_dict.placeholder(bool)
    config.steps_per_execution = 1
    # "none"; "mirrored": over all GPUs of the machine; "multi_worker": over the
    # processes, on one machine or several, that TF_CONFIG names. They share the
    # workdir.
    config.distribution = "none"
    return config.lock()
