"""Image readers and generators that need numpy, pillow or pyarrow; imported only when packing begins."""
