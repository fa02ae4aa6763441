"""Backbones, one per file: `isthmus.nn.registry` finds them here."""
