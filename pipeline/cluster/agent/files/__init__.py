"""Files on a host: unpacked for a run, left over from earlier ones, and sent back to the controller."""
