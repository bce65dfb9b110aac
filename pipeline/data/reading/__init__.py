"""What reads images with numpy, pillow or pyarrow, and makes them: imported where packing begins, not before."""
