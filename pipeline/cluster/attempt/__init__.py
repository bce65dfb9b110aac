"""One attempt of a run: ``run`` plans and starts it or takes it up again, ``running`` follows it until all nodes ended.

The other modules judge what is seen meanwhile: silent hosts, stalled ranks, failures and their tracebacks.
"""
