"""The runner: every loss variant trained from the same start on the same prompts and seeds.

Importing this package imports nothing else, so that `ablate.schema` can be read without torch.
"""

__version__ = "0.1.0"
