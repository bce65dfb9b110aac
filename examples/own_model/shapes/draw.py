"""Draw the images of this example: photos/CLASS/NUMBER.png, a folder for each class. Yours are there already."""

import random
from pathlib import Path

from PIL import Image, ImageDraw

random.seed(0)
for name in ("circle", "square", "triangle"):
    folder = Path("photos", name)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(100):
        image = Image.new("RGB", (24, 24), (random.randrange(80), random.randrange(80), random.randrange(80)))
        x, y, size = random.randrange(8), random.randrange(8), random.randrange(10, 16)
        colour = (random.randrange(150, 256), random.randrange(150, 256), random.randrange(150, 256))
        pen = ImageDraw.Draw(image)
        if name == "circle":
            pen.ellipse((x, y, x + size, y + size), fill=colour)
        elif name == "square":
            pen.rectangle((x, y, x + size, y + size), fill=colour)
        else:
            pen.polygon([(x + size // 2, y), (x, y + size), (x + size, y + size)], fill=colour)
        image.save(folder / f"{number}.png")
