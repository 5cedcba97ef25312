"""REALM: retrieval-augmented language model pre-training, as software that people run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realmops.api import Answerer, AnswerRecord, Citation, Passage, Searcher

__version__ = "0.3.0"
__all__ = ["AnswerRecord", "Answerer", "Citation", "Passage", "Searcher", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public classes of ``realmops.api`` on first access."""
    if name in __all__:
        from realmops import api

        return getattr(api, name)
    raise AttributeError(f"module 'realmops' has no attribute {name!r}")
