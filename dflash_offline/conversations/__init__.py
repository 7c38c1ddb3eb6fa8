"""Data in: rows in many shapes → token ids and a loss mask.

1. ``sources``  files and datasets → ``chunks`` of raw rows, numbered as in the source.
2. ``rows``     one raw row → a conversation, a text, or ready ids; or the reason why it is unusable.
3. ``masks``    a conversation → rendered text, and which characters, then tokens, the assistant wrote.
4. ``encode``   a chunk of rows → token ids and masks; the step that runs on all cores.
5. ``corpus``   all chunks in order → :class:`Corpus` on disk, counted and fingerprinted.
6. ``split``    which prompts are held out.
7. ``preview``  what a recipe would make of the data, for human eyes.
"""

from dflash_offline.conversations.corpus import Corpus, build_corpus, template_sha256, tokenizer_sha256
from dflash_offline.conversations.preview import preview
from dflash_offline.conversations.split import split_heldout

__all__ = ["Corpus", "build_corpus", "preview", "split_heldout", "template_sha256", "tokenizer_sha256"]
