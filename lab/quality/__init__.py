"""Measures what reusing documents in place does to answers.

Public: `coreference.px_cases`, `tasks.read_task`, `measure.measure`. Imported by the command line, training and
benchmarks.
"""
