"""The command line: doit's loader and reporter plug-ins, and the verbs behind dodo.py."""
