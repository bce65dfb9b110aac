"""Words that begin with a dash, and answers to wrong words."""
