"""Training data: the memory-mapped pack, the sample order, the steps of an epoch, and augmentation on the device."""
