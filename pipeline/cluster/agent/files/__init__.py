"""What the agent does with files on a host: unpack them for a run, send results back, remove what is left over."""
