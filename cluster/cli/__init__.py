"""The command line: `mneme serve`, `chat`, `bench`, `doctor`, `cache`, `simulate` and `quality`.

Public: `main.main`. Nobody imports it.
"""
