"""The words of a command line: as Hydra reads them, with many values, and where each value comes from."""
