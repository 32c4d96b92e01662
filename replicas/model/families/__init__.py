"""The model families: one file each, which reads a `config.json` and says which tensors a layer is made of.

Public: `table`, `family.Family`. Loading imports this, and whatever reads a model's limits; no family imports
another, and none imports torch. docs/adding-a-model.md leads through adding one.
"""
