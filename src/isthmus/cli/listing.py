"""``isthmus methods``: what there is."""

from __future__ import annotations

from isthmus.cli.console import print_table


def methods() -> None:
    """List the methods."""
    from isthmus.methods.registry import all_methods

    rows = [(method.name, method.summary, method.preset or "by task", method.reference) for method in all_methods()]
    print_table(("method", "what it does", "preset", "reference"), rows)
