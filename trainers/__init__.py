"""Node half of Paceline: what runs on every compute node. It needs Python, torch and this package. The modules beside
the packages are started as processes; ``entry`` is what ranks share at their start."""
