"""Launch a run on its hosts: probe them, render the plan as data, run one attempt from start to end.

Entry points: ``plan.render`` (pure), ``attempt.run`` (start, follow, stop), ``preflight`` (judges the hosts' facts),
``launchers`` (reach the hosts), and ``agent``, the code that is sent to hosts.
"""
