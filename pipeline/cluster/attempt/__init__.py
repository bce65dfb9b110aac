"""One attempt of a run: ``run`` plans it, ``running`` starts it and follows it until all nodes have ended.

The other modules judge what is seen meanwhile: silent hosts, stalled ranks, failures and their tracebacks.
"""
