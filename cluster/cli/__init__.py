"""The command line: `mneme serve`, `chat`, `doctor`, `cache`, `simulate` and `quality`.

Public: `main.main`. Nobody imports it.
"""
