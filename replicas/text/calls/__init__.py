"""Tool calls and reasoning in what a model says: a table of families' ways, and one parser.

Public: `answer_parser.AnswerParser`, `dialects.with_plugin`. Imports
nothing of `text`; `text.tool_calls` and the HTTP side import it.
"""
