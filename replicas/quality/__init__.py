"""Measures what reusing documents in place does to answers.

Public: `coreference.px_cases`. Imported by the command line, training and benchmarks.
"""
