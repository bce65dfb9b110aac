"""Node half of Paceline: what runs on every compute node. It needs Python, torch and this package."""
