"""Configuration, options, errors and files of the node half. The controller reads it too: only files imports torch."""
