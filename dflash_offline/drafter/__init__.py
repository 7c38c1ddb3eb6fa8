"""The DFlash drafter: its shape, model, attention mask, anchors and losses (arXiv 2602.06036).

In reading order: ``shape`` (what a drafter is, torch-free) → ``rope`` → ``model`` (the network) → ``mask`` (who sees
whom) → ``blocks`` (draft blocks of a row: ids, positions, labels) → ``anchors`` (where blocks start) → ``head``
(frozen target head fused with cross-entropy) → ``losses`` (weights, denominators, acceptance) → ``decoding`` (context
key/value cache).
"""
