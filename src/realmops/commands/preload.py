"""Imports of all stages, for the fork server: a stage forked from it does not import PyTorch and transformers again.

Nothing imported here may use CUDA, which cannot be used after a fork.
"""

import gc

gc.disable()  # the imports leave no garbage

from realmops.commands import run  # noqa: E402
from realmops.model.transformers_models import import_transformers  # noqa: E402
from realmops.stages import evaluate, finetune, ict, pretrain, tag  # noqa: E402

__all__ = ["evaluate", "finetune", "ict", "pretrain", "run", "tag"]

import_transformers().BertModel  # noqa: B018  # resolving the name imports what all models share
gc.freeze()  # collections in a forked process skip what is imported
gc.enable()
