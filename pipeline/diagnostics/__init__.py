"""Node modules that measure instead of train; ``node_module`` launches one."""
