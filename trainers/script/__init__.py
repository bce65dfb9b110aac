"""A user's own script under torchrun: started from its snapshot, its metrics read, its outputs gathered."""
