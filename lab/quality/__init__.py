"""Measures what reusing documents in place does to answers.

Public: `coreference.px_cases`, `tasks.read_task`, `measure.measure`, `command`. Training and benchmarks import it.
"""
