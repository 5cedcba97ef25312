"""Imports of pytest's fork server (``forked``): the modules of all stages.

What is forked from there forks its own index builders from there, too.
"""

import gc

gc.disable()  # the imports leave no garbage

from multiprocessing import forkserver  # noqa: E402

from forked import FORKS  # noqa: E402

from realmops.commands import run  # noqa: E402
from realmops.model.transformers_models import import_transformers  # noqa: E402
from realmops.refresh import child_processes  # noqa: E402
from realmops.stages import evaluate, finetune, ict, pretrain, tag  # noqa: E402

__all__ = ["evaluate", "finetune", "ict", "pretrain", "run", "tag"]

import_transformers().BertModel  # noqa: B018  # resolving the name imports what all models share
gc.freeze()  # collections in a forked process skip what is imported
gc.enable()
for server in (forkserver, forkserver._forkserver):  # type: ignore[attr-defined]
    server.ensure_running = lambda: None  # it runs
child_processes.subprocess = FORKS  # type: ignore[attr-defined]
