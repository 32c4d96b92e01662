"""The engine: `Engine.step()`, the thread that runs it, answers to questions between two steps, and how it is loaded.

Public: `engine.Engine`, `loop.EngineLoop`, `commands`, `build.build_engine`. The top of this folder: imports every
other room; `llm` and the cluster's replica import it.
"""
