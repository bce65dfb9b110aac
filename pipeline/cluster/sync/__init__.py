"""Files and data packs brought to all hosts ahead of a run, and how what lies there differs from what is here.

``folders`` says what goes where, ``rsync`` moves it, ``bring`` and ``compare`` are what `doit sync` calls.
"""

from pipeline.cluster.sync.rsync import Folder, folders
from pipeline.cluster.sync.tree_sync import Tree, TreeState, bring, compare, compare_pack, ensure, remote, tree_of

__all__ = ["Folder", "Tree", "TreeState", "bring", "compare", "compare_pack", "ensure", "folders", "remote", "tree_of"]
