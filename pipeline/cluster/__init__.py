"""Launch a run on its hosts: probe them, render the plan as data, run one attempt from start to end.

Entry points: ``plan.render`` (pure), ``attempt.run`` (start, follow, stop), ``preflight``, ``launchers`` (which reach
the hosts) and ``agent``, which is sent to them.
"""
