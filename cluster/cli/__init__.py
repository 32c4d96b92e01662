"""The command line: `mneme serve`, `doctor`, `cache` and `keys`; `lab` adds `chat`, `bench`, `simulate` and `quality`.

Public: `main.main`. Nobody imports it.
"""
