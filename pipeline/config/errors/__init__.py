"""What is wrong with a word or a file of the configuration, in one message that names it and its mend."""
