"""The flag that programs have in common."""

from absl import flags

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for the files that the program writes."
)
