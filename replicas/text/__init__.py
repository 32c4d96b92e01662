"""Text to token ids and back: the tokenizer, chat templates in a process of their own, and incremental decoding.

Public: `tokenizer.Tokenizer`, `prompts`, `detokenizer.TextStream`. Imports of this folder only `request` and `card`.
"""
