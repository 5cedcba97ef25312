"""Imports of all stages, for the fork server: a stage forked from it does not import PyTorch and transformers again.

Nothing imported here may use CUDA, which cannot be used after a fork.
"""

from realmops.commands import run
from realmops.model.transformers_models import import_transformers
from realmops.stages import evaluate, finetune, ict, pretrain, tag

__all__ = ["evaluate", "finetune", "ict", "pretrain", "run", "tag"]

import_transformers().BertModel  # noqa: B018  # resolving the name imports what all models share
