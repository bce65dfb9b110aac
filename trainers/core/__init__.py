"""Configuration, options, errors and files of the node half: standard library only, the controller reads it too."""
