"""Mneme: an LLM serving cluster that never computes the same attention twice.

`LLM`, `SamplingParams` and `Grammar` are the offline API; they import neither Ray nor FastAPI (but for
`LLM.serve`). `mneme serve` starts a cluster.
"""

from typing import TYPE_CHECKING

from mneme.version import __version__

if TYPE_CHECKING:
    from mneme.replicas.llm import LLM
    from mneme.replicas.request import Grammar, SamplingParams

__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Import the offline API on first use, so that `import mneme.errors` stays light."""
    if name == "LLM":
        from mneme.replicas.llm import LLM

        return LLM
    if name in ("Grammar", "SamplingParams"):
        from mneme.replicas import request

        return getattr(request, name)
    raise AttributeError(f"module 'mneme' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is imported on first use is listed too; what only this file uses is not."""
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})
