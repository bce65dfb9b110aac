"""The actions of the verbs, one module per family.

``pipeline.cli.verbs`` names each verb's module, which is imported when one of its verbs runs. So a family's imports
stand at the top of its module.
"""
