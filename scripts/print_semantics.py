"""Print docs/semantics.md: ``python scripts/print_semantics.py > docs/semantics.md``."""

from numpy_sdpa.kernelcheck.semantics import as_markdown

print(as_markdown(), end="")
