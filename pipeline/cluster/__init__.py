"""The launch of a run on its hosts: the plan as data, the probe of the hosts, one attempt from start to end.

Entry points: ``plan.render`` (pure), ``attempt`` (start, follow, stop), ``preflight``, ``launchers`` (how hosts are
reached) and ``agent``, which is sent to them.
"""
