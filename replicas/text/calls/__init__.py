"""Tool calls and reasoning in what a model says: a table of families' ways, one parser, and grammars that force calls.

Public: `tool_calls.Dialect`, `answer_parser.AnswerParser`, `dialects.with_plugin`. Imports
`text.grammar` and `text.tokenizer`; the HTTP side and sessions import it.
"""
