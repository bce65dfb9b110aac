"""Step measure: noisy rings of two classes, as an instrument may write them: x, y, class in each line."""

import argparse
import math
import random
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--count", type=int)
parser.add_argument("--noise", type=float)
parser.add_argument("--seed", type=int)
options = parser.parse_args()

random.seed(options.seed)
with Path(options.out, "points.csv").open("w") as file:
    for number in range(options.count):
        radius, angle = 3 + 5 * (number % 2) + random.gauss(0, options.noise), random.uniform(0, 2 * math.pi)
        file.write(f"{radius * math.cos(angle):.4f},{radius * math.sin(angle):.4f},{number % 2}\n")
