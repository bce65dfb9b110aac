"""A script of anybody's own under torchrun: started from its snapshot, its metrics read, its outputs gathered."""
