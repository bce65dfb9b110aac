"""What pyproject.toml can't say: conf/ lies beside the packages here, and inside ``pipeline`` where it is installed."""

from setuptools import find_packages, setup

setup(
    # what scripts of one's own import, also where they run alone
    py_modules=["paceline", "paceline_huggingface", "paceline_lightning"],
    packages=[*find_packages(include=["pipeline*", "trainers*"]), "hydra_plugins", "pipeline.conf"],
    package_dir={"pipeline.conf": "conf"},
    package_data={
        "pipeline": ["py.typed", "comparing/*.jinja", "template/**", "template/.gitignore.txt"],
        "pipeline.conf": ["*.yaml", "*/*.yaml"],
        "trainers": ["py.typed"],
    },
    exclude_package_data={"pipeline.conf": ["local.yaml"]},  # a person's own
)
