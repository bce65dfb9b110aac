"""The way from `doit VERB overrides…` to the pipeline: doit's loader and reporter plug-ins, and the verbs behind
dodo.py.
"""
