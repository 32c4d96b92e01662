"""The command line: `mneme serve`, `chat`, `doctor`, `cache` and `simulate`.

Public: `main.main`. Nobody imports it.
"""
