"""The data pack memory-mapped, which samples make which step, and their augmentation on the device."""
