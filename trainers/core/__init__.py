"""Configuration, options, errors and files of the node half. The controller reads it too: nothing imports torch."""
