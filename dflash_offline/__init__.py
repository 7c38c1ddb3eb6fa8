"""Train DFlash drafters offline: cache a target's hidden states once, then train from the cache.

The pipeline, in module order: config → conversations → target → cache → extract → drafter → train → export →
decode/evaluate → report. See docs/design.md.
"""

__version__ = "0.1.0"
