"""Who this rank is and what it does with the others: process group, cores, memory, import path, attempt."""
