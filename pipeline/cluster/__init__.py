"""A run brought to the hosts: the launch plan as data, the hosts probed, one attempt followed to its end.

Public face: ``plan.render`` (pure), ``attempt`` (start, follow, stop), ``preflight``, ``launchers`` (how hosts are
reached) and ``agent``, which is sent to them.
"""
