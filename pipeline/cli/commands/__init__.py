"""What the verbs do, one module a family.

``pipeline.cli.verbs`` names the module of each, which is imported when one of its verbs runs. So what a family needs
stands at the top of its module.
"""
