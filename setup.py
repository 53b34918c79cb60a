"""The packages, some of which have other names than their folders. Everything else stands in pyproject.toml.

The built-in recipes are in the folder `recipes`. Their package has another name, because a folder `recipes` next to a
user's script must not hide them. The tree of configs is data of `bridge`. No symbolic link is needed, neither in a
checkout nor in a distribution.
"""

from setuptools import find_packages, setup

# Name of a package -> its folder.
FOLDERS = {
    "bridge.conf": "conf",
    "hydra_plugins": "bridge/front/plugins/hydra_plugins",
    "precision_bridge_recipes": "recipes",
}

setup(packages=[*find_packages(include=["bridge", "bridge.*"]), *FOLDERS], package_dir=FOLDERS)
