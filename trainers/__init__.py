"""Node half of Paceline: what runs on every compute node. It needs Python, torch and this package.

The modules beside the packages are started as processes: ``classifier`` (a rank), ``torchrun`` and ``ranks`` (what
starts ranks), ``call`` (a function of a step), ``exporting``, ``predicting`` and ``torchrun_options`` (by the
controller); ``entry`` is what ranks share at their start.
"""
