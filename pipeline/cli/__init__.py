"""How `doit VERB overrides…` reaches the pipeline: doit's loader and reporter plug-ins and the verbs behind dodo.py."""
