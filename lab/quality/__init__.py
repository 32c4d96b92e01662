"""Measures what reusing documents in place does to answers, and what weights and KV of fewer bits do to predictions.

Public: `coreference.px_cases`, `tasks.read_task`, `measure.measure`, `comparison.compare`, `command`. Training and
benchmarks import it.
"""
