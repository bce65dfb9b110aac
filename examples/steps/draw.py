"""Step draw: an image of 24×24 pixels for each point, as the data set arrays takes them."""

import sys

import numpy as np

out, points = sys.argv[1:]
table = np.loadtxt(points, delimiter=",")
images = np.zeros((len(table), 24, 24), dtype=np.uint8)
at = np.clip(np.round(table[:, :2] + 12), 1, 22).astype(int)
for shift in (-1, 0, 1):
    images[np.arange(len(table)), at[:, 1] + shift, at[:, 0]] = 255
    images[np.arange(len(table)), at[:, 1], at[:, 0] + shift] = 255
np.savez(f"{out}/images.npz", images=images, labels=table[:, 2].astype(int))
